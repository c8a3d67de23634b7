//! A connection to an application's database. It holds the advisory lock of the source and relays its outbox.
//!
//! When a session ends, PostgreSQL releases its locks and rolls its transaction back, and Faena cancels the work that uses
//! it. Within 30 seconds, PostgreSQL drops a client that no longer responds, so the lock of a dead node is soon free.

use faena_domain::error_chain;
use std::{sync::Arc, time::Duration};

use futures_util::{StreamExt, stream};
use tokio::{sync::Notify, task::AbortHandle};
use tokio_postgres::{AsyncMessage, Client, Config, Connection, NoTls, Socket, config::SslMode, tls::TlsStream};
use tokio_util::sync::CancellationToken;

use super::{
    mapping::{ExternalMapping, quoted},
    shape::Statements,
};
use crate::{Result, StoreError, postgres::connect};

/// Limit for one call to the application's database.
pub const CALL_TIMEOUT: Duration = Duration::from_secs(15);

/// Timeouts of PostgreSQL: for a statement, a lock, an idle transaction and a client that stops responding.
const SETTINGS: &str = "SET statement_timeout = '10s'; SET lock_timeout = '5s'; SET idle_in_transaction_session_timeout = '60s';
    SET tcp_keepalives_idle = 10; SET tcp_keepalives_interval = 5; SET tcp_keepalives_count = 3; SET tcp_user_timeout = '25s'";

pub struct Session {
    pub client: Client,
    pub statements: Statements,
    pub holds_lock: bool,
    pub in_transaction: bool,
    closed: CancellationToken,
    _reader: AbortOnDrop,
}

impl Session {
    pub async fn open(config: &Config, mapping: &ExternalMapping, wakeup: Arc<Notify>) -> Result<Session> {
        let (client, closed, reader) = if config.get_ssl_mode() == SslMode::Require {
            let (client, connection) = config.connect(connect::tls()?).await.map_err(|error| connect_error(&error))?;
            spawn_reader(client, connection, wakeup)
        } else {
            let (client, connection) = config.connect(NoTls).await.map_err(|error| connect_error(&error))?;
            spawn_reader(client, connection, wakeup)
        };
        // From here on a failure closes the connection.
        let reader = AbortOnDrop(reader);
        client.batch_execute(SETTINGS).await?;
        let statements = Statements::prepare(&client, mapping).await?;
        if let Some(channel) = &mapping.channel {
            client.batch_execute(&format!("LISTEN {}", quoted(channel))).await?;
        }
        Ok(Session { client, statements, holds_lock: false, in_transaction: false, closed, _reader: reader })
    }

    /// Returns a token that is cancelled when the connection has ended.
    pub fn closed(&self) -> CancellationToken {
        self.closed.clone()
    }

    /// Takes the lock unless another session holds it. Returns whether this session holds it.
    pub async fn try_lock(&mut self, lock: i64) -> Result<bool> {
        if !self.holds_lock {
            self.holds_lock = self.client.query_one("SELECT pg_try_advisory_lock($1)", &[&lock]).await?.get(0);
        }
        Ok(self.holds_lock)
    }

    pub async fn unlock(&mut self, lock: i64) -> Result<()> {
        if std::mem::take(&mut self.holds_lock) {
            self.client.execute("SELECT pg_advisory_unlock($1)", &[&lock]).await?;
        }
        Ok(())
    }

    /// Begins a transaction, and checks that this session holds the lock. It does not if a pooler switched the session.
    pub async fn begin(&mut self, lock: i64) -> Result<()> {
        self.client.batch_execute("BEGIN").await?;
        self.in_transaction = true;
        let (high, low) = ((lock >> 32) as u32, lock as u32);
        let has_lock: bool = self
            .client
            .query_one(
                "SELECT EXISTS (SELECT FROM pg_locks
                                WHERE locktype = 'advisory' AND classid = $1 AND objid = $2 AND objsubid = 1 AND granted
                                  AND pid = pg_backend_pid())",
                &[&high, &low],
            )
            .await?
            .get(0);
        if has_lock {
            return Ok(());
        }
        Err(StoreError::Setup(format!(
            "this session does not hold the advisory lock {lock} that it took; connect to PostgreSQL directly, not through a transaction-mode pooler"
        )))
    }

    pub async fn commit(&mut self) -> Result<()> {
        self.in_transaction = false;
        Ok(self.client.batch_execute("COMMIT").await?)
    }

    pub async fn rollback(&mut self) -> Result<()> {
        self.in_transaction = false;
        Ok(self.client.batch_execute("ROLLBACK").await?)
    }
}

/// Ends the connection when dropped.
struct AbortOnDrop(AbortHandle);

impl Drop for AbortOnDrop {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// Spawns a task that reads the server's messages until the connection ends.
fn spawn_reader<T>(
    client: Client,
    mut connection: Connection<Socket, T>,
    wakeup: Arc<Notify>,
) -> (Client, CancellationToken, AbortHandle)
where
    T: TlsStream + Unpin + Send + 'static,
{
    let closed = CancellationToken::new();
    let end = closed.clone().drop_guard();
    let reader = tokio::spawn(async move {
        let _end = end;
        let mut messages = stream::poll_fn(move |context| connection.poll_message(context));
        while let Some(Ok(message)) = messages.next().await {
            if let AsyncMessage::Notification(_) = message {
                wakeup.notify_one();
            }
        }
    });
    (client, closed, reader.abort_handle())
}

fn connect_error(error: &tokio_postgres::Error) -> StoreError {
    StoreError::Unavailable(format!("cannot connect to the source's database: {}", error_chain(error)).into())
}
