//! Rows of an outbox that become jobs.

use std::{collections::HashSet, sync::Arc};

use faena_domain::{JobState, Timestamp};
use faena_engine::EngineConfig;
use faena_store::{Store, Tally};
use serde_json::json;

use super::application::{Application, OutboxRow, all_jobs, connect};
use crate::fixture::{Fixture, eventually, open_postgres, open_sqlite};

async fn jobs(store: &Arc<dyn Store>) -> i64 {
    let counts = store.counts().await.unwrap();
    [Tally::Pending, Tally::Queued, Tally::InFlight, Tally::Completed]
        .into_iter()
        .map(|tally| counts.total(tally))
        .sum()
}

mod postgres {
    use super::*;

    #[tokio::test]
    async fn a_row_becomes_a_job_that_runs_with_the_rows_correlation_id() {
        for database in [open_sqlite().await, open_postgres().await] {
            let application = Application::new().await;
            let config = EngineConfig { sources: vec![application.config(None)], ..EngineConfig::default() };
            let fixture = Fixture::over(database, config).await;
            let other = application.insert("TicketCreatedEvent", json!({})).await;
            let id = application.insert("faena.job", json!({"type": "noop", "payload": {"a": 1}})).await;
            eventually("it is done", async || (completed_jobs(&fixture).await == 1).then_some(())).await;
            eventually("it is marked", async || application.row(&id).await.is_dispatched.then_some(())).await;
            let job = all_jobs(&fixture.store).await.remove(0);
            assert_eq!((job.correlation_id.as_str(), job.status), ("c-1", JobState::Completed));
            let untouched = OutboxRow { is_dispatched: false, attempts: 0, error: None };
            assert_eq!(application.row(&other).await, untouched, "without a sink only job rows are relayed");
            fixture.stop().await;
        }
    }

    async fn completed_jobs(fixture: &Fixture) -> i64 {
        fixture.store.counts().await.unwrap().total(Tally::Completed)
    }

    #[tokio::test]
    async fn an_invalid_body_is_marked_with_its_errors_and_the_others_continue() {
        let (store, _database) = open_sqlite().await;
        let application = Application::new().await;
        let bad = application.insert("faena.job", json!({"type": "noop", "payload": 7})).await;
        let worse = application.insert("faena.job", json!([])).await;
        let good = application.insert("faena.job", json!({"type": "noop"})).await;
        application.runner(&store, None).drain(Timestamp::now()).await;
        let row = application.row(&bad).await;
        assert_eq!((row.attempts, row.error.as_deref()), (1, Some("payload: must be a JSON object")));
        assert_eq!(application.row(&worse).await.error.as_deref(), Some("body: must be a JSON object"));
        assert!(application.row(&good).await.is_dispatched);
        assert_eq!(jobs(&store).await, 1);
    }

    #[tokio::test]
    async fn a_row_whose_mark_was_lost_creates_no_second_job() {
        for (store, _database) in [open_sqlite().await, open_postgres().await] {
            let application = Application::new().await;
            let id = application.insert("faena.job", json!({"type": "noop"})).await;
            application.runner(&store, None).drain(Timestamp::now()).await;
            let forget = "UPDATE \"OutboxMessages\" SET \"DispatchedAt\" = NULL; TRUNCATE \"ProcessedEvents\"";
            application.client.batch_execute(forget).await.unwrap();
            application.runner(&store, None).drain(Timestamp::now()).await;
            assert!(application.row(&id).await.is_dispatched);
            assert_eq!(jobs(&store).await, 1);
        }
    }

    #[tokio::test]
    async fn while_the_job_database_is_down_rows_wait_and_use_no_attempts() {
        let (store, database) = open_postgres().await;
        let application = Application::new().await;
        let id = application.insert("faena.job", json!({"type": "noop"})).await;
        let runner = application.runner(&store, None);
        let now = Timestamp::now();
        database.reject_connections().await;
        for minute in 0..7 {
            runner.round(now.plus_ms(minute * 60_000)).await;
        }
        assert_eq!(application.row(&id).await, OutboxRow { is_dispatched: false, attempts: 0, error: None });
        database.accept_connections().await;
        assert_eq!(runner.drain(now.plus_ms(600_000)).await, 1);
        assert_eq!(jobs(&store).await, 1);
    }

    /// Several writers roll back some transactions, and two sources crash between storing a job and marking its row.
    /// Exactly the committed jobs exist.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn exactly_the_committed_rows_become_jobs() {
        let (store, _database) = open_postgres().await;
        let application = Application::new().await;
        let writers: Vec<_> = (0..4)
            .map(|writer| {
                let url = application.url.clone();
                tokio::spawn(async move {
                    let client = connect(&url).await;
                    let mut committed = Vec::new();
                    for number in 0..100 {
                        let name = format!("{writer}-{number}");
                        let end = if number % 3 == 0 { "ROLLBACK" } else { "COMMIT" };
                        let sql = format!(
                            "BEGIN; INSERT INTO \"OutboxMessages\" (\"Type\", \"PayloadJson\")
                             VALUES ('faena.job', '{{\"type\": \"later\", \"payload\": {{\"name\": \"{name}\"}}}}'); {end}"
                        );
                        client.batch_execute(&sql).await.unwrap();
                        if end == "COMMIT" {
                            committed.push(name);
                        }
                    }
                    committed
                })
            })
            .collect();
        // Every second mark ends its session: the jobs are stored, the rows are not marked.
        application
            .client
            .batch_execute(
                "CREATE SEQUENCE crashes;
                 CREATE FUNCTION crash() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
                     IF nextval('crashes') % 2 = 1 THEN PERFORM pg_terminate_backend(pg_backend_pid()); END IF;
                     RETURN NULL;
                 END $$;
                 CREATE TRIGGER crash BEFORE UPDATE ON \"OutboxMessages\" FOR EACH STATEMENT EXECUTE FUNCTION crash()",
            )
            .await
            .unwrap();
        let runners = [application.runner(&store, None), application.runner(&store, None)];
        let mut now = Timestamp::now();
        loop {
            let [first, second] = &runners;
            tokio::join!(first.round(now), second.round(now));
            // Later than any backoff, so that both sources try again.
            now = now.plus_ms(60_000);
            let marks: i64 = application.client.query_one("SELECT last_value FROM crashes", &[]).await.unwrap().get(0);
            if writers.iter().all(|writer| writer.is_finished()) && marks > 1 {
                break;
            }
        }
        application.client.batch_execute("DROP TRIGGER crash ON \"OutboxMessages\"").await.unwrap();
        for runner in &runners {
            runner.drain(now).await;
        }
        let mut committed = HashSet::new();
        for writer in writers {
            committed.extend(writer.await.unwrap());
        }
        let stored = all_jobs(&store).await;
        let stored: Vec<String> = stored
            .iter()
            .map(|job| {
                serde_json::from_str::<serde_json::Value>(job.payload.get()).unwrap()["name"]
                    .as_str()
                    .unwrap()
                    .to_owned()
            })
            .collect();
        assert_eq!(stored.len(), committed.len(), "none twice");
        assert_eq!(stored.into_iter().collect::<HashSet<_>>(), committed);
        assert_eq!((application.pending().await, application.attempts().await), (0, 0));
    }
}
