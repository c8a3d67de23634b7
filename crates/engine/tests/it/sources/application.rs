//! An application with an outbox in its own database.

use std::{sync::Arc, time::Duration};

use faena_domain::{AddressRule, JobView, Timestamp, parse::JobParser};
use faena_engine::{Bus, DatabaseUrl, Round, Source, SourceConfig, Target};
use faena_store::{ExternalMapping, Filter, Page, Store};
use serde_json::Value;
use tokio_postgres::{Client, NoTls};

use crate::fixture::{TestDatabase, create_database};

/// Advisory lock of `ExternalMapping::default()`.
pub const LOCK: i64 = 42;
/// Condition on `pg_locks`: a session of this database has `LOCK`.
pub const LOCK_IS_HELD: &str = "locktype = 'advisory' AND objid = 42 AND granted
    AND database = (SELECT oid FROM pg_database WHERE datname = current_database())";

pub struct Application {
    pub client: Client,
    pub url: String,
    _database: TestDatabase,
}

/// One row of the application's outbox.
#[derive(Debug, PartialEq, Eq)]
pub struct OutboxRow {
    pub is_dispatched: bool,
    pub attempts: i32,
    pub error: Option<String>,
}

impl Application {
    pub async fn new() -> Application {
        let (url, database) = create_database().await;
        let client = connect(&url).await;
        client.batch_execute(&ExternalMapping::default().init_sql()).await.unwrap();
        Application { client, url, _database: database }
    }

    /// Commits one message and returns its id.
    pub async fn insert(&self, kind: &str, payload: Value) -> String {
        let sql = "INSERT INTO \"OutboxMessages\" (\"Type\", \"PayloadJson\", \"CorrelationId\", \"OccurredAt\")
                   VALUES ($1, $2::text::jsonb, 'c-1', clock_timestamp()) RETURNING \"Id\"::text";
        self.client.query_one(sql, &[&kind, &payload.to_string()]).await.unwrap().get(0)
    }

    pub async fn insert_many(&self, count: i32) {
        let sql = "INSERT INTO \"OutboxMessages\" (\"Type\", \"PayloadJson\", \"OccurredAt\")
                   SELECT 'TicketCreatedEvent', jsonb_build_object('number', n), to_timestamp(n) FROM generate_series(1, $1) n";
        self.client.execute(sql, &[&count]).await.unwrap();
    }

    pub async fn row(&self, id: &str) -> OutboxRow {
        let sql = "SELECT \"DispatchedAt\" IS NOT NULL, \"Attempts\", \"Error\" FROM \"OutboxMessages\" WHERE \"Id\" = $1::text::uuid";
        let row = self.client.query_one(sql, &[&id]).await.unwrap();
        OutboxRow { is_dispatched: row.get(0), attempts: row.get(1), error: row.get(2) }
    }

    pub async fn count(&self, what: &str) -> i64 {
        self.client.query_one(&format!("SELECT count(*) FROM {what}"), &[]).await.unwrap().get(0)
    }

    pub async fn pending(&self) -> i64 {
        self.count("\"OutboxMessages\" WHERE \"DispatchedAt\" IS NULL").await
    }

    pub async fn attempts(&self) -> i64 {
        self.client
            .query_one("SELECT coalesce(sum(\"Attempts\"), 0) FROM \"OutboxMessages\"", &[])
            .await
            .unwrap()
            .get(0)
    }

    /// Ends the session that has the lock, as an administrator does. Returns `false` if no session has it.
    pub async fn end_lock_session(&self) -> bool {
        let sql = format!("SELECT pg_terminate_backend(pid) FROM pg_locks WHERE {LOCK_IS_HELD}");
        !self.client.query(&sql, &[]).await.unwrap().is_empty()
    }

    pub fn config(&self, sink: Option<Target>) -> SourceConfig {
        SourceConfig {
            name: "app".into(),
            url: DatabaseUrl(self.url.clone()),
            mapping: ExternalMapping::default(),
            sink,
            period: Duration::from_millis(100),
        }
    }

    pub fn runner(&self, store: &Arc<dyn Store>, sink: Option<Target>) -> SourceRunner {
        let addresses = AddressRule::new(&["127.0.0.0/8".parse().unwrap()]);
        let parser = JobParser { addresses, ..JobParser::default() };
        let source = Source::new(&self.config(sink), parser).unwrap();
        SourceRunner { source, store: store.clone(), bus: Bus::default() }
    }
}

pub async fn connect(url: &str) -> Client {
    let (client, connection) = tokio_postgres::connect(url, NoTls).await.unwrap();
    tokio::spawn(connection);
    client
}

/// A source that only runs when the test runs it.
pub struct SourceRunner {
    pub source: Source,
    store: Arc<dyn Store>,
    bus: Bus,
}

impl SourceRunner {
    pub async fn round(&self, now: Timestamp) -> Round {
        self.source.run_once(&*self.store, &self.bus, now).await.unwrap()
    }

    /// Runs rounds until there is nothing more to do.
    pub async fn drain(&self, now: Timestamp) -> usize {
        let mut handled = 0;
        loop {
            let round = self.round(now).await;
            handled += round.handled;
            if !round.more {
                return handled;
            }
        }
    }
}

pub async fn all_jobs(store: &Arc<dyn Store>) -> Vec<JobView> {
    store.job_list(&Filter::default(), Page::offset(0, 1_000)).await.unwrap().jobs
}
