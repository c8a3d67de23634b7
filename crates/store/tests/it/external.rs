//! An application's outbox: which node reads it, and what that node writes into it.

mod postgres {
    use std::time::Duration;

    use faena_domain::Timestamp;
    use faena_store::{
        ExternalColumns, ExternalEnd, ExternalMapping, ExternalOutbox, ExternalRow, ExternalSettled, ExternalTake,
        StoreError,
    };
    use tokio_postgres::Client;

    use crate::support::{RawDatabase, on_empty_postgres};

    /// Advisory lock of `ExternalMapping::default()`.
    const LOCK: i64 = 42;
    /// Condition on `pg_locks`: a session of this database has `LOCK`.
    const LOCK_IS_HELD: &str = "locktype = 'advisory' AND objid = 42 AND granted
        AND database = (SELECT oid FROM pg_database WHERE datname = current_database())";

    fn at(ms: i64) -> Timestamp {
        Timestamp::from_ms(1_800_000_000_000 + ms)
    }

    /// Runs a test on the tables that `faena outbox init-sql` prints, with some messages.
    async fn on_outbox(messages: usize, test: impl AsyncFnOnce(&str, &Client)) {
        on_mapped(ExternalMapping::default(), messages, test).await;
    }

    async fn on_mapped(mapping: ExternalMapping, messages: usize, test: impl AsyncFnOnce(&str, &Client)) {
        on_empty_postgres(async |url, database| {
            let client = client_in_public_schema(database).await;
            client.batch_execute(&mapping.init_sql()).await.unwrap();
            // Repeating it does no harm.
            client.batch_execute(&mapping.init_sql()).await.unwrap();
            for number in 0..messages {
                insert(client, number).await;
            }
            test(url, client).await;
        })
        .await;
    }

    async fn client_in_public_schema(database: &RawDatabase) -> &Client {
        let client = database.client().await;
        client.batch_execute("SET search_path = public").await.unwrap();
        client
    }

    fn id(number: usize) -> String {
        format!("00000000-0000-0000-0000-{number:012}")
    }

    async fn insert(client: &Client, number: usize) {
        let sql = format!(
            "INSERT INTO \"OutboxMessages\" (\"Id\", \"Type\", \"PayloadJson\", \"OccurredAt\", \"CorrelationId\")
             VALUES ('{}', 'TicketCreatedEvent', '{{\"number\": {number}}}', to_timestamp({number}), 'c{number}')",
            id(number)
        );
        client.batch_execute(&sql).await.unwrap();
    }

    fn open(url: &str) -> ExternalOutbox {
        mapped(url, ExternalMapping::default())
    }

    fn mapped(url: &str, mapping: ExternalMapping) -> ExternalOutbox {
        ExternalOutbox::open(url, mapping).unwrap()
    }

    async fn rows(outbox: &mut ExternalOutbox) -> Vec<ExternalRow> {
        match outbox.take(&[]).await.unwrap() {
            ExternalTake::Rows(rows) => rows,
            ExternalTake::Elsewhere => panic!("another node has the lock"),
        }
    }

    fn ids(rows: &[ExternalRow]) -> Vec<String> {
        rows.iter().map(|row| row.id.clone()).collect()
    }

    fn dispatched(rows: &[ExternalRow]) -> Vec<(String, ExternalEnd)> {
        rows.iter().map(|row| (row.id.clone(), ExternalEnd::Dispatched)).collect()
    }

    fn rejected(row: &ExternalRow, reason: &str) -> Vec<(String, ExternalEnd)> {
        vec![(row.id.clone(), ExternalEnd::Rejected(reason.into()))]
    }

    async fn count(client: &Client, what: &str) -> i64 {
        client.query_one(&format!("SELECT count(*) FROM {what}"), &[]).await.unwrap().get(0)
    }

    async fn setup_error(url: &str, mapping: ExternalMapping) -> String {
        match mapped(url, mapping).take(&[]).await.err() {
            Some(StoreError::Setup(text)) => text,
            other => panic!("a set-up error was expected, not {other:?}"),
        }
    }

    #[tokio::test]
    async fn rows_are_taken_in_order_and_marked_as_processed() {
        on_outbox(3, async |url, client| {
            let mut outbox = open(url);
            let taken = rows(&mut outbox).await;
            assert_eq!(ids(&taken), [id(0), id(1), id(2)]);
            let first = ExternalRow {
                id: id(0),
                kind: "TicketCreatedEvent".into(),
                payload: Ok("{\"number\": 0}".into()),
                occurred_at: Some(Timestamp::from_ms(0)),
                correlation_id: Some("c0".into()),
                is_processed: false,
            };
            assert_eq!(taken[0], first);
            let settled = outbox.settle(&dispatched(&taken[..2]), at(0)).await.unwrap();
            assert_eq!(settled, ExternalSettled { dispatched: 2, rejected: vec![] });
            assert_eq!(ids(&rows(&mut outbox).await), [id(2)], "the row that was not settled");
            let sent = "\"OutboxMessages\" WHERE \"DispatchedAt\" = to_timestamp(1800000000) AND \"Attempts\" = 0 AND \"Error\" IS NULL";
            assert_eq!(count(client, sent).await, 2);
            assert_eq!(count(client, "\"ProcessedEvents\" WHERE \"ProcessedAt\" = to_timestamp(1800000000)").await, 2);
        })
        .await;
    }

    #[tokio::test]
    async fn one_node_at_a_time_has_the_lock() {
        on_outbox(1, async |url, client| {
            let (mut first, mut second) = (open(url), open(url));
            let taken = rows(&mut first).await;
            assert!(matches!(second.take(&[]).await.unwrap(), ExternalTake::Elsewhere));
            first.settle(&dispatched(&taken), at(0)).await.unwrap();
            assert!(
                matches!(second.take(&[]).await.unwrap(), ExternalTake::Elsewhere),
                "the lock is kept between batches"
            );
            first.release().await.unwrap();
            assert!(rows(&mut second).await.is_empty());
            assert!(matches!(first.take(&[]).await.unwrap(), ExternalTake::Elsewhere));
            let locks = format!("pg_locks WHERE {LOCK_IS_HELD}");
            assert_eq!(count(client, &locks).await, 1);
            second.close();
            drop(second);
            // Other users of the lock are respected too.
            crate::external::until(async || {
                client.query_one("SELECT pg_try_advisory_lock($1)", &[&LOCK]).await.unwrap().get(0)
            })
            .await;
            assert!(matches!(first.take(&[]).await.unwrap(), ExternalTake::Elsewhere));
        })
        .await;
    }

    #[tokio::test]
    async fn a_node_that_loses_its_session_stops_immediately_and_another_continues() {
        on_outbox(2, async |url, client| {
            let (mut first, mut second) = (open(url), open(url));
            let taken = rows(&mut first).await;
            let closed = first.closed();
            let terminate = format!("SELECT pg_terminate_backend(pid) FROM pg_locks WHERE {LOCK_IS_HELD}");
            client.execute(&terminate, &[]).await.unwrap();
            tokio::time::timeout(Duration::from_secs(10), closed.cancelled()).await.expect("notified immediately");
            let late = first.settle(&dispatched(&taken), at(0)).await;
            assert!(matches!(late, Err(StoreError::Unavailable(_))), "{late:?}");
            assert_eq!(ids(&rows(&mut second).await), [id(0), id(1)], "the rows that the first did not settle");
            assert!(
                matches!(first.take(&[]).await.unwrap(), ExternalTake::Elsewhere),
                "it connects again, without the lock"
            );
            assert_eq!(count(client, "\"ProcessedEvents\"").await, 0);
        })
        .await;
    }

    #[tokio::test]
    async fn a_session_without_the_lock_takes_no_rows() {
        on_outbox(1, async |url, client| {
            // Simulates a transaction-mode pooler, where the session that runs the statements is not the one that took the lock.
            client
                .batch_execute(
                    "CREATE SCHEMA fake;
                     CREATE FUNCTION fake.pg_try_advisory_lock(bigint) RETURNS bool LANGUAGE sql AS 'SELECT true'",
                )
                .await
                .unwrap();
            let database: String = client.query_one("SELECT current_database()::text", &[]).await.unwrap().get(0);
            let path = format!("ALTER DATABASE \"{database}\" SET search_path = fake, pg_catalog, public");
            client.batch_execute(&path).await.unwrap();
            let error = setup_error(url, ExternalMapping::default()).await;
            assert!(error.contains("not through a transaction-mode pooler"), "{error}");
        })
        .await;
    }

    #[tokio::test]
    async fn rows_that_were_processed_before_are_marked() {
        on_outbox(2, async |url, client| {
            let sql = format!("INSERT INTO \"ProcessedEvents\" VALUES ('{}', now())", id(0));
            client.batch_execute(&sql).await.unwrap();
            let mut outbox = open(url);
            let taken = rows(&mut outbox).await;
            assert_eq!(taken.iter().map(|row| row.is_processed).collect::<Vec<_>>(), [true, false]);
            outbox.settle(&dispatched(&taken), at(0)).await.unwrap();
            assert_eq!(count(client, "\"ProcessedEvents\"").await, 2, "the existing row is kept");
        })
        .await;
    }

    #[tokio::test]
    async fn a_rejected_row_counts_its_attempts_and_is_not_taken_after_the_fifth() {
        on_outbox(1, async |url, client| {
            let mut outbox = open(url);
            for attempt in 1..=5 {
                let taken = rows(&mut outbox).await;
                let settled = outbox.settle(&rejected(&taken[0], &format!("no {attempt}\0")), at(0)).await.unwrap();
                assert_eq!(settled.rejected, [(id(0), attempt)]);
            }
            assert!(rows(&mut outbox).await.is_empty());
            let abandoned =
                "\"OutboxMessages\" WHERE \"DispatchedAt\" IS NULL AND \"Attempts\" = 5 AND \"Error\" = 'no 5 '";
            assert_eq!(count(client, abandoned).await, 1);
        })
        .await;
    }

    #[tokio::test]
    async fn abandoned_rows_move_to_the_dead_letter_table_if_one_is_configured() {
        let mapping = ExternalMapping { dead_table: Some("Dead".into()), ..ExternalMapping::default() };
        on_mapped(mapping.clone(), 2, async |url, client| {
            client.batch_execute("ALTER TABLE \"OutboxMessages\" ADD \"Tenant\" int DEFAULT 7").await.unwrap();
            let error = setup_error(url, mapping.clone()).await;
            assert!(error.starts_with("the table \"Dead\" lacks columns of \"OutboxMessages\": \"Tenant\""), "{error}");
            client.batch_execute("ALTER TABLE \"Dead\" ADD \"Tenant\" int").await.unwrap();
            client.batch_execute("UPDATE \"OutboxMessages\" SET \"Attempts\" = 4").await.unwrap();
            let mut outbox = mapped(url, mapping.clone());
            let taken = rows(&mut outbox).await;
            outbox.settle(&rejected(&taken[0], "never"), at(0)).await.unwrap();
            let dead =
                "\"Dead\" WHERE \"Id\"::text LIKE '%0' AND \"Tenant\" = 7 AND \"Attempts\" = 5 AND \"Error\" = 'never'";
            assert_eq!(count(client, dead).await, 1);
            assert_eq!(ids(&rows(&mut outbox).await), [id(1)]);
            assert_eq!(count(client, "\"OutboxMessages\"").await, 1);
        })
        .await;
    }

    #[tokio::test]
    async fn rows_that_the_application_has_locked_are_taken_later() {
        on_outbox(3, async |url, client| {
            client
                .batch_execute("BEGIN; SELECT * FROM \"OutboxMessages\" WHERE \"CorrelationId\" = 'c1' FOR UPDATE")
                .await
                .unwrap();
            let mut outbox = open(url);
            let taken = rows(&mut outbox).await;
            assert_eq!(ids(&taken), [id(0), id(2)]);
            outbox.settle(&dispatched(&taken), at(0)).await.unwrap();
            client.batch_execute("COMMIT").await.unwrap();
            assert_eq!(ids(&rows(&mut outbox).await), [id(1)]);
        })
        .await;
    }

    #[tokio::test]
    async fn a_batch_is_bounded_and_rows_can_be_excluded() {
        let mapping = ExternalMapping { batch: 2, ..ExternalMapping::default() };
        on_outbox(4, async |url, client| {
            let mut outbox = mapped(url, mapping);
            assert_eq!(ids(&rows(&mut outbox).await), [id(0), id(1)]);
            let ExternalTake::Rows(others) = outbox.take(&[id(0), id(2)]).await.unwrap() else { panic!("no lock") };
            assert_eq!(ids(&others), [id(1), id(3)]);
            client
                .batch_execute("UPDATE \"OutboxMessages\" SET \"Attempts\" = 0 WHERE \"CorrelationId\" = 'c0'")
                .await
                .unwrap();
            let ExternalTake::Rows(none) = outbox.take_of(Some("faena.job"), &[]).await.unwrap() else {
                panic!("no lock")
            };
            assert_eq!(none, []);
        })
        .await;
    }

    #[tokio::test]
    async fn missing_tables_and_columns_are_named() {
        on_empty_postgres(async |url, database| {
            let error = setup_error(url, ExternalMapping::default()).await;
            assert!(error.starts_with("the table \"OutboxMessages\" does not exist in the database"), "{error}");
            let client = client_in_public_schema(database).await;
            let make = "CREATE TABLE \"OutboxMessages\" (\"Id\" uuid, \"Type\" text, \"PayloadJson\" bytea, \"OccurredAt\" timestamp, \"Error\" text)";
            client.batch_execute(make).await.unwrap();
            let error = setup_error(url, ExternalMapping::default()).await;
            assert_eq!(
                error,
                "the table \"OutboxMessages\" has a column \"PayloadJson\" of type bytea (supported types: text, varchar, json, jsonb); \
                 no column \"DispatchedAt\" (configure its name with columns.dispatched_at); no column \"Attempts\" (configure its name with columns.attempts); \
                 no column \"CorrelationId\" (configure its name with columns.correlation_id)"
            );
        })
        .await;
    }

    #[tokio::test]
    async fn ids_of_another_type_than_those_of_processed_events_are_rejected() {
        on_outbox(0, async |url, client| {
            client.batch_execute("ALTER TABLE \"ProcessedEvents\" ALTER \"EventId\" TYPE text").await.unwrap();
            let error = setup_error(url, ExternalMapping::default()).await;
            assert!(error.contains("has type text, but the ids of \"OutboxMessages\" have type uuid"), "{error}");
        })
        .await;
    }

    /// Every usual type of id, payload and time, under names that try to break out of their quotes.
    #[tokio::test]
    async fn common_column_types_and_any_names_work() {
        let evil = "x\"; DROP TABLE y; --";
        for (id_type, expected_ids) in
            [("bigint", ["1", "2"]), ("varchar(10)", ["a", "b\""]), ("uuid", [&id(1), &id(2)])]
        {
            for payload_type in ["text", "json", "jsonb"] {
                for time_type in ["timestamp", "timestamptz"] {
                    on_empty_postgres(async |url, database| {
                        let mapping = ExternalMapping {
                            schema: Some("my schema".into()),
                            table: evil.into(),
                            columns: ExternalColumns {
                                id: "select".into(),
                                occurred_at: evil.into(),
                                correlation_id: None,
                                ..ExternalColumns::default()
                            },
                            order_by: vec![evil.into(), "select".into()],
                            ..ExternalMapping::default()
                        };
                        let client = client_in_public_schema(database).await;
                        let quoted = evil.replace('"', "\"\"");
                        let sql = format!(
                            "ALTER DATABASE \"{}\" SET timezone = 'Asia/Tokyo';
                             CREATE SCHEMA \"my schema\"; SET search_path = \"my schema\";
                             CREATE TABLE \"{quoted}\" (\"select\" {id_type}, \"Type\" varchar(50), \"PayloadJson\" {payload_type},
                                 \"{quoted}\" {time_type}, \"DispatchedAt\" {time_type}, \"Attempts\" smallint, \"Error\" varchar(6));
                             CREATE TABLE \"ProcessedEvents\" (\"EventId\" {id_type}, \"ProcessedAt\" {time_type});
                             INSERT INTO \"{quoted}\" VALUES ('{}', 't', '{{}}', '2027-01-15 08:00:00+00', NULL, NULL, NULL),
                                                            ('{}', 't', '[1]', '2027-01-15 08:00:00+00', NULL, NULL, NULL)",
                            client.query_one("SELECT current_database()::text", &[]).await.unwrap().get::<_, String>(0),
                            expected_ids[0],
                            expected_ids[1],
                        );
                        client.batch_execute(&sql).await.unwrap();
                        let mut outbox = mapped(url, mapping);
                        let taken = rows(&mut outbox).await;
                        assert_eq!(ids(&taken), expected_ids);
                        assert_eq!(taken[1].payload.as_deref(), Ok("[1]"));
                        assert_eq!(taken[0].occurred_at, Some(at(0)), "a time without a zone is UTC");
                        let mut ends = dispatched(&taken[..1]);
                        ends.extend(rejected(&taken[1], "too long for it"));
                        outbox.settle(&ends, at(1_000)).await.unwrap();
                        let shown = format!(
                            "SELECT \"DispatchedAt\"::text, \"Attempts\"::int, \"Error\" FROM \"{quoted}\" ORDER BY \"select\""
                        );
                        client.batch_execute("SET timezone = 'UTC'").await.unwrap();
                        let found = client.query(&shown, &[]).await.unwrap();
                        assert!(found[0].get::<_, String>(0).starts_with("2027-01-15 08:00:01"));
                        assert_eq!((found[1].get::<_, Option<String>>(0), found[1].get::<_, i32>(1)), (None, 1));
                        assert_eq!(found[1].get::<_, String>(2), "too lo");
                        assert_eq!(count(client, "\"ProcessedEvents\"").await, 1);
                        let retaken = rows(&mut outbox).await;
                        assert_eq!(ids(&retaken), [expected_ids[1]]);
                    })
                    .await;
                }
            }
        }
    }

    #[tokio::test]
    async fn unreadable_payloads_and_infinite_times_do_not_stop_other_rows() {
        on_outbox(3, async |url, client| {
            client
                .batch_execute(
                    "ALTER TABLE \"OutboxMessages\" ALTER \"PayloadJson\" DROP NOT NULL;
                     UPDATE \"OutboxMessages\" SET \"PayloadJson\" = NULL, \"OccurredAt\" = '-infinity' WHERE \"CorrelationId\" = 'c0';
                     UPDATE \"OutboxMessages\" SET \"PayloadJson\" = to_jsonb(repeat('x', 4194304)) WHERE \"CorrelationId\" = 'c1'",
                )
                .await
                .unwrap();
            let taken = rows(&mut open(url)).await;
            assert_eq!(taken[0].payload, Err("the payload is NULL".into()));
            assert_eq!(taken[0].occurred_at, None);
            assert_eq!(taken[1].payload, Err("the payload is larger than 4194304 bytes".into()));
            assert!(taken[2].payload.is_ok());
        })
        .await;
    }

    #[tokio::test]
    async fn a_user_without_write_permission_is_rejected_before_rows_are_taken() {
        on_outbox(1, async |url, client| {
            let user = format!("reader_{}", uuid::Uuid::new_v4().simple());
            let make = format!(
                "CREATE ROLE {user} LOGIN; GRANT SELECT, UPDATE (\"DispatchedAt\", \"Error\") ON \"OutboxMessages\" TO {user};
                 GRANT SELECT, INSERT ON \"ProcessedEvents\" TO {user}"
            );
            client.batch_execute(&make).await.unwrap();
            let mut reader_url: url::Url = url.parse().unwrap();
            reader_url.set_username(&user).unwrap();
            let error = setup_error(reader_url.as_str(), ExternalMapping::default()).await;
            assert!(error.starts_with("the user of the source cannot update the column \"Attempts\" of the table \"OutboxMessages\""), "{error}");
            client.batch_execute(&format!("DROP OWNED BY {user}; DROP ROLE {user}")).await.unwrap();
        })
        .await;
    }

    #[tokio::test]
    async fn a_notification_of_the_application_wakes_the_reader() {
        let mapping = ExternalMapping { channel: Some("New \"ones\"".into()), ..ExternalMapping::default() };
        on_outbox(0, async |url, client| {
            let mut outbox = mapped(url, mapping);
            assert!(rows(&mut outbox).await.is_empty());
            outbox.release().await.unwrap();
            client.batch_execute("NOTIFY \"New \"\"ones\"\"\"").await.unwrap();
            tokio::time::timeout(Duration::from_secs(10), outbox.wakeup.notified()).await.expect("a wakeup");
        })
        .await;
    }

    #[tokio::test]
    async fn tables_in_snake_case_work_too() {
        let mapping = ExternalMapping { schema: Some("app".into()), ..ExternalMapping::in_snake_case() };
        on_empty_postgres(async |url, database| {
            let client = client_in_public_schema(database).await;
            client.batch_execute("CREATE SCHEMA app").await.unwrap();
            client.batch_execute(&mapping.init_sql()).await.unwrap();
            client.batch_execute("INSERT INTO app.outbox_messages (type, payload) VALUES ('a', '{}')").await.unwrap();
            let mut outbox = mapped(url, mapping);
            let taken = rows(&mut outbox).await;
            outbox.settle(&dispatched(&taken), at(0)).await.unwrap();
            assert_eq!(count(client, "app.processed_events").await, 1);
        })
        .await;
    }

    #[tokio::test]
    async fn errors_do_not_contain_the_password() {
        let error =
            ExternalOutbox::open("postgres://app:s3cret@host:port/x", ExternalMapping::default()).err().unwrap();
        assert!(!format!("{error} {error:?}").contains("s3cret"));
        let mut unreachable = open("postgres://app:s3cret@127.0.0.1:1/x");
        let error = unreachable.take(&[]).await.err().unwrap();
        assert!(matches!(error, StoreError::Unavailable(_)) && !format!("{error:?}").contains("s3cret"), "{error:?}");
    }
}

/// Repeats a check until it holds.
async fn until(mut check: impl AsyncFnMut() -> bool) {
    let began = std::time::Instant::now();
    while !check().await {
        assert!(began.elapsed() < std::time::Duration::from_secs(20), "the check did not hold within 20 s");
        tokio::time::sleep(std::time::Duration::from_millis(5)).await;
    }
}
