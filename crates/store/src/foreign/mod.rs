//! An application's own outbox, in its own PostgreSQL database, read in exclusive mode.
//!
//! One worker at a time: an advisory lock, held by the session that does the work. A round is one transaction: rows are taken with `FOR UPDATE SKIP LOCKED`, so
//! rows that the application has locked come later; what became of them is written down; then it is committed. Who dies in between leaves the rows as they
//! were, and they are published again under the same id. What `ProcessedEvents` holds is never published again.
//!
//! Only the dispatch time, the attempts and the error of a row are ever written, unless a table for dead letters is named, to which rows are moved.

mod mapping;
mod session;
mod shape;

use std::{collections::HashSet, sync::Arc};

use faena_domain::Timestamp;
use tokio::sync::Notify;
use tokio_postgres::Config;
use tokio_util::sync::CancellationToken;

pub use mapping::{ForeignColumns, ForeignMapping};

use self::session::{CALL_TIMEOUT, Session};
use crate::{MAX_ATTEMPTS, Result, StoreError, postgres::connect};

pub struct ForeignOutbox {
    config: Config,
    mapping: ForeignMapping,
    session: Option<Session>,
    /// Told when the application notifies.
    pub nudge: Arc<Notify>,
}

/// What a worker finds.
#[derive(Debug)]
pub enum ForeignTake {
    /// Another worker has the lock.
    Elsewhere,
    /// The lock is ours, and these rows, in order, until they are settled or let go.
    Rows(Vec<ForeignRow>),
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ForeignRow {
    pub id: String,
    pub kind: String,
    /// Or why there is none that could be read.
    pub payload: std::result::Result<String, String>,
    pub occurred_at: Option<Timestamp>,
    pub correlation_id: Option<String>,
    /// It was dealt with before: it is only to be marked.
    pub is_processed: bool,
}

/// What became of a row. Of rows about which nothing is known nothing is said, and they stay as they are.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum ForeignEnd {
    Dispatched,
    Refused(String),
}

#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct ForeignSettled {
    pub dispatched: usize,
    /// With how often each was refused by now. After `MAX_ATTEMPTS` it does not come again.
    pub refused: Vec<(String, u32)>,
}

impl ForeignOutbox {
    /// Connects with the first call.
    pub fn open(url: &str, mapping: ForeignMapping) -> Result<ForeignOutbox> {
        let mut config = connect::config(url).map_err(|_| {
            // Without the text: it may hold a password.
            StoreError::Setup(
                "the url of the source is not valid; write postgres://user:password@host:5432/database".into(),
            )
        })?;
        config.application_name("faena outbox");
        Ok(ForeignOutbox { config, mapping, session: None, nudge: Arc::new(Notify::new()) })
    }

    pub fn batch(&self) -> usize {
        usize::try_from(self.mapping.batch).unwrap_or(usize::MAX)
    }

    /// Takes the lock and the next rows, but those in `except`, and keeps a transaction open over them.
    pub async fn take(&mut self, except: &[String]) -> Result<ForeignTake> {
        self.take_of(None, except).await
    }

    /// The same for rows of one type; others are not touched.
    pub async fn take_of(&mut self, kind: Option<&str>, except: &[String]) -> Result<ForeignTake> {
        bounded(&mut self.session, async |place: &mut Option<Session>| {
            let mut session = match place.take() {
                Some(session) => session,
                None => Session::open(&self.config, &self.mapping, self.nudge.clone()).await?,
            };
            let found = take(&mut session, &self.mapping, kind, except).await?;
            *place = Some(session);
            Ok(found)
        })
        .await
    }

    /// Told when the session is over, with the lock and the rows: whoever works on them stops.
    pub fn gone(&self) -> CancellationToken {
        self.session.as_ref().map_or_else(
            || {
                let over = CancellationToken::new();
                over.cancel();
                over
            },
            Session::gone,
        )
    }

    /// Writes down what became of rows that were taken, and lets the others go. All or nothing.
    pub async fn settle(&mut self, ends: &[(String, ForeignEnd)], now: Timestamp) -> Result<ForeignSettled> {
        bounded(&mut self.session, async |place: &mut Option<Session>| {
            let Some(mut session) = place.take().filter(|session| session.in_transaction) else {
                return Err(StoreError::Unavailable("the session is over; its rows come again".into()));
            };
            let settled = settle(&mut session, ends, now).await?;
            session.commit().await?;
            *place = Some(session);
            Ok(settled)
        })
        .await
    }

    /// Lets rows and lock go; another worker may go on. The connection stays.
    pub async fn release(&mut self) -> Result<()> {
        let lock = self.mapping.lock;
        bounded(&mut self.session, async |place: &mut Option<Session>| {
            let Some(mut session) = place.take() else { return Ok(()) };
            if session.in_transaction {
                session.rollback().await?;
            }
            session.unlock(lock).await?;
            *place = Some(session);
            Ok(())
        })
        .await
    }

    /// Ends the session: what was taken and not settled is free at once.
    pub fn close(&mut self) {
        self.session = None;
    }
}

/// A session on which something went wrong, or that did not answer in time, is not used again.
async fn bounded<T>(
    place: &mut Option<Session>,
    work: impl AsyncFnOnce(&mut Option<Session>) -> Result<T>,
) -> Result<T> {
    match tokio::time::timeout(CALL_TIMEOUT, work(place)).await {
        Ok(result) => result,
        Err(_) => Err(StoreError::Unavailable(
            format!("the source's database did not answer within {} s", CALL_TIMEOUT.as_secs()).into(),
        )),
    }
}

async fn take(
    session: &mut Session,
    mapping: &ForeignMapping,
    kind: Option<&str>,
    except: &[String],
) -> Result<ForeignTake> {
    if session.in_transaction {
        session.rollback().await?;
    }
    if !session.lock(mapping.lock).await? {
        return Ok(ForeignTake::Elsewhere);
    }
    session.begin(mapping.lock).await?;
    let rows = session.client.query(&session.statements.take, &[&except, &i64::from(mapping.batch), &kind]).await?;
    let ids: Vec<&str> = rows.iter().map(|row| row.get(0)).collect();
    let processed: HashSet<String> = match &session.statements.processed {
        Some(statement) if !ids.is_empty() => {
            let known = session.client.query(statement, &[&ids]).await?;
            known.iter().map(|row| row.get(0)).collect()
        }
        _ => HashSet::new(),
    };
    Ok(ForeignTake::Rows(rows.iter().map(|row| read(row, &processed)).collect()))
}

fn read(row: &tokio_postgres::Row, processed: &HashSet<String>) -> ForeignRow {
    let (id, is_null): (String, bool) = (row.get(0), row.get(3));
    let payload = row.get::<_, Option<String>>(2).ok_or_else(|| {
        if is_null {
            "the payload is NULL".to_owned()
        } else {
            format!("the payload is larger than {} bytes", shape::MAX_PAYLOAD_BYTES)
        }
    });
    ForeignRow {
        is_processed: processed.contains(&id),
        id,
        kind: row.get::<_, Option<String>>(1).unwrap_or_default(),
        payload,
        occurred_at: row.get::<_, Option<i64>>(4).map(Timestamp::from_ms),
        correlation_id: row.get::<_, Option<String>>(5).filter(|id| !id.is_empty()),
    }
}

async fn settle(session: &mut Session, ends: &[(String, ForeignEnd)], now: Timestamp) -> Result<ForeignSettled> {
    let (client, statements) = (&session.client, &session.statements);
    let mut settled = ForeignSettled::default();
    let dispatched: Vec<&str> =
        ends.iter().filter(|(_, end)| *end == ForeignEnd::Dispatched).map(|(id, _)| id.as_str()).collect();
    if !dispatched.is_empty() {
        client.execute(&statements.mark, &[&dispatched, &now.as_ms()]).await?;
        if let Some(record) = &statements.record {
            client.execute(record, &[&dispatched, &now.as_ms()]).await?;
        }
        settled.dispatched = dispatched.len();
    }
    let mut given_up = Vec::new();
    for (id, end) in ends {
        let ForeignEnd::Refused(reason) = end else { continue };
        // PostgreSQL keeps no zero bytes.
        let reason = reason.replace('\0', " ");
        let attempts: i64 = client.query_one(&statements.refuse, &[id, &reason]).await?.get(0);
        if attempts >= i64::from(MAX_ATTEMPTS) {
            given_up.push(id.as_str());
        }
        settled.refused.push((id.clone(), u32::try_from(attempts).unwrap_or(MAX_ATTEMPTS)));
    }
    if let Some(move_to_dlq) = &statements.move_to_dlq
        && !given_up.is_empty()
    {
        client.execute(move_to_dlq, &[&given_up]).await?;
    }
    Ok(settled)
}
