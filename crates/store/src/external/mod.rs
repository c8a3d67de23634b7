//! The outbox of an application, in its own PostgreSQL database, read in exclusive mode.
//!
//! One node at a time reads it, under an advisory lock of the session that does the work. Each round is one transaction, which
//! takes rows, publishes them, writes the outcome of each, and commits. It takes rows with `FOR UPDATE SKIP LOCKED`, so rows that
//! the application has locked are taken later. If the node dies in between, the rows stay as they were, and are published again
//! under the same id. Ids in `ProcessedEvents` are never published again.
//!
//! Only the dispatch time, the attempts and the error of a row are written. If a dead-letter table is configured,
//! rows that were rejected `MAX_ATTEMPTS` times are moved to it.

mod mapping;
mod session;
mod shape;

use std::{collections::HashSet, sync::Arc};

use faena_domain::Timestamp;
use tokio::sync::Notify;
use tokio_postgres::Config;
use tokio_util::sync::CancellationToken;

pub use mapping::{ExternalColumns, ExternalMapping};

use self::session::{CALL_TIMEOUT, Session};
use crate::{MAX_ATTEMPTS, Result, StoreError, postgres::connect};

pub struct ExternalOutbox {
    config: Config,
    mapping: ExternalMapping,
    session: Option<Session>,
    /// Wakes the caller when the application sends a notification.
    pub wakeup: Arc<Notify>,
}

/// Result of a take.
#[derive(Debug)]
pub enum ExternalTake {
    /// Another node has the lock.
    Elsewhere,
    /// This node has the lock and these rows, in order, until they are settled or released.
    Rows(Vec<ExternalRow>),
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ExternalRow {
    pub id: String,
    pub kind: String,
    /// The payload, or why it cannot be read.
    pub payload: std::result::Result<String, String>,
    pub occurred_at: Option<Timestamp>,
    pub correlation_id: Option<String>,
    /// It was processed before and only has to be marked as dispatched.
    pub is_processed: bool,
}

/// Outcome of a row. Rows without an outcome stay as they are.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum ExternalEnd {
    Dispatched,
    Rejected(String),
}

#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct ExternalSettled {
    pub dispatched: usize,
    /// Ids of the rejected rows, and how often each has been rejected so far. After `MAX_ATTEMPTS` a row is not taken again.
    pub rejected: Vec<(String, u32)>,
}

impl ExternalOutbox {
    /// Returns the outbox without connecting; the first `take` connects.
    pub fn open(url: &str, mapping: ExternalMapping) -> Result<ExternalOutbox> {
        let mut config = connect::config(url).map_err(|_| {
            // Omits the text of the error, which may contain a password.
            StoreError::Setup(
                "the url of the source is not valid; use postgres://user:password@host:5432/database".into(),
            )
        })?;
        config.application_name("faena outbox");
        Ok(ExternalOutbox { config, mapping, session: None, wakeup: Arc::new(Notify::new()) })
    }

    pub fn batch(&self) -> usize {
        usize::try_from(self.mapping.batch).unwrap_or(usize::MAX)
    }

    /// Takes the lock and the next rows except those in `except`, and keeps their transaction open.
    pub async fn take(&mut self, except: &[String]) -> Result<ExternalTake> {
        self.take_of(None, except).await
    }

    /// Takes rows as `take` does, but only those of type `kind`, if it is given. Other rows are not changed.
    pub async fn take_of(&mut self, kind: Option<&str>, except: &[String]) -> Result<ExternalTake> {
        bounded(&mut self.session, async |slot: &mut Option<Session>| {
            let mut session = match slot.take() {
                Some(session) => session,
                None => Session::open(&self.config, &self.mapping, self.wakeup.clone()).await?,
            };
            let found = take(&mut session, &self.mapping, kind, except).await?;
            *slot = Some(session);
            Ok(found)
        })
        .await
    }

    /// Returns how many rows of a type wait, counted up to 100 000, and since when the first of them waits. Returns `None`
    /// if this session does not hold the lock.
    pub async fn count_pending(&mut self, kind: Option<&str>) -> Result<Option<(u64, Option<Timestamp>)>> {
        bounded(&mut self.session, async |slot: &mut Option<Session>| {
            let Some(session) = slot.take_if(|session| session.holds_lock) else { return Ok(None) };
            let row = session.client.query_one(&session.statements.count_pending, &[&kind]).await?;
            let (count, oldest): (i64, Option<i64>) = (row.get(0), row.get(1));
            *slot = Some(session);
            Ok(Some((count.unsigned_abs(), oldest.map(Timestamp::from_ms))))
        })
        .await
    }

    /// Returns a token that is cancelled when the session ends. Its lock and its rows are lost then, so work on the
    /// rows must stop.
    pub fn closed(&self) -> CancellationToken {
        self.session.as_ref().map_or_else(
            || {
                let ended = CancellationToken::new();
                ended.cancel();
                ended
            },
            Session::closed,
        )
    }

    /// Writes the outcome of rows that were taken, and releases the others. All or nothing.
    pub async fn settle(&mut self, ends: &[(String, ExternalEnd)], now: Timestamp) -> Result<ExternalSettled> {
        bounded(&mut self.session, async |slot: &mut Option<Session>| {
            let Some(mut session) = slot.take().filter(|session| session.in_transaction) else {
                return Err(StoreError::Unavailable("the session has ended; its rows will be read again".into()));
            };
            let settled = settle(&mut session, ends, now).await?;
            session.commit().await?;
            *slot = Some(session);
            Ok(settled)
        })
        .await
    }

    /// Releases rows and lock, so that another node may continue. The connection stays.
    pub async fn release(&mut self) -> Result<()> {
        let lock = self.mapping.lock;
        bounded(&mut self.session, async |slot: &mut Option<Session>| {
            let Some(mut session) = slot.take() else { return Ok(()) };
            if session.in_transaction {
                session.rollback().await?;
            }
            session.unlock(lock).await?;
            *slot = Some(session);
            Ok(())
        })
        .await
    }

    /// Ends the session: rows that were taken and not settled are free immediately.
    pub fn close(&mut self) {
        self.session = None;
    }
}

/// Runs a call with a time limit. A session that failed, or did not answer in time, is not used again.
async fn bounded<T>(
    slot: &mut Option<Session>,
    work: impl AsyncFnOnce(&mut Option<Session>) -> Result<T>,
) -> Result<T> {
    match tokio::time::timeout(CALL_TIMEOUT, work(slot)).await {
        Ok(result) => result,
        Err(_) => Err(StoreError::Unavailable(
            format!("the source's database did not answer within {} s", CALL_TIMEOUT.as_secs()).into(),
        )),
    }
}

async fn take(
    session: &mut Session,
    mapping: &ExternalMapping,
    kind: Option<&str>,
    except: &[String],
) -> Result<ExternalTake> {
    if session.in_transaction {
        session.rollback().await?;
    }
    if !session.try_lock(mapping.lock).await? {
        return Ok(ExternalTake::Elsewhere);
    }
    session.begin(mapping.lock).await?;
    let rows =
        session.client.query(&session.statements.select_pending, &[&except, &i64::from(mapping.batch), &kind]).await?;
    let ids: Vec<&str> = rows.iter().map(|row| row.get(0)).collect();
    let processed: HashSet<String> = match &session.statements.select_processed {
        Some(statement) if !ids.is_empty() => {
            let known = session.client.query(statement, &[&ids]).await?;
            known.iter().map(|row| row.get(0)).collect()
        }
        _ => HashSet::new(),
    };
    Ok(ExternalTake::Rows(rows.iter().map(|row| read(row, &processed)).collect()))
}

fn read(row: &tokio_postgres::Row, processed: &HashSet<String>) -> ExternalRow {
    let (id, is_null): (String, bool) = (row.get(0), row.get(3));
    let payload = row.get::<_, Option<String>>(2).ok_or_else(|| {
        if is_null {
            "the payload is NULL".to_owned()
        } else {
            format!("the payload is larger than {} bytes", shape::MAX_PAYLOAD_BYTES)
        }
    });
    ExternalRow {
        is_processed: processed.contains(&id),
        id,
        kind: row.get::<_, Option<String>>(1).unwrap_or_default(),
        payload,
        occurred_at: row.get::<_, Option<i64>>(4).map(Timestamp::from_ms),
        correlation_id: row.get::<_, Option<String>>(5).filter(|id| !id.is_empty()),
    }
}

async fn settle(session: &mut Session, ends: &[(String, ExternalEnd)], now: Timestamp) -> Result<ExternalSettled> {
    let (client, statements) = (&session.client, &session.statements);
    let mut settled = ExternalSettled::default();
    let dispatched: Vec<&str> =
        ends.iter().filter(|(_, end)| *end == ExternalEnd::Dispatched).map(|(id, _)| id.as_str()).collect();
    if !dispatched.is_empty() {
        client.execute(&statements.mark_dispatched, &[&dispatched, &now.as_ms()]).await?;
        if let Some(record) = &statements.record_processed {
            client.execute(record, &[&dispatched, &now.as_ms()]).await?;
        }
        settled.dispatched = dispatched.len();
    }
    let mut abandoned = Vec::new();
    for (id, end) in ends {
        let ExternalEnd::Rejected(reason) = end else { continue };
        // PostgreSQL cannot store NUL characters.
        let reason = reason.replace('\0', " ");
        let attempts: i64 = client.query_one(&statements.record_rejection, &[id, &reason]).await?.get(0);
        if attempts >= i64::from(MAX_ATTEMPTS) {
            abandoned.push(id.as_str());
        }
        settled.rejected.push((id.clone(), u32::try_from(attempts).unwrap_or(MAX_ATTEMPTS)));
    }
    if let Some(move_to_dlq) = &statements.move_to_dlq
        && !abandoned.is_empty()
    {
        client.execute(move_to_dlq, &[&abandoned]).await?;
    }
    Ok(settled)
}
