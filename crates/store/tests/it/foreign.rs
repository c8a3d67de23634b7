//! The outbox of an application: which node reads it, what is written into it, and what is not.

mod postgres {
    use std::time::Duration;

    use faena_domain::Timestamp;
    use faena_store::{
        ForeignColumns, ForeignEnd, ForeignMapping, ForeignOutbox, ForeignRow, ForeignSettled, ForeignTake, StoreError,
    };
    use tokio_postgres::Client;

    use crate::support::{Ledger, on_empty_postgres};

    fn at(ms: i64) -> Timestamp {
        Timestamp::from_ms(1_800_000_000_000 + ms)
    }

    /// The tables as `faena outbox init-sql` prints them, and some messages, oldest first.
    async fn on_outbox(messages: usize, test: impl AsyncFnOnce(&str, &Client)) {
        on_mapped(ForeignMapping::default(), messages, test).await;
    }

    async fn on_mapped(mapping: ForeignMapping, messages: usize, test: impl AsyncFnOnce(&str, &Client)) {
        on_empty_postgres(async |url, ledger| {
            let client = public(ledger).await;
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

    async fn public(ledger: &Ledger) -> &Client {
        let client = ledger.client().await;
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

    fn open(url: &str) -> ForeignOutbox {
        mapped(url, ForeignMapping::default())
    }

    fn mapped(url: &str, mapping: ForeignMapping) -> ForeignOutbox {
        ForeignOutbox::open(url, mapping).unwrap()
    }

    async fn rows(outbox: &mut ForeignOutbox) -> Vec<ForeignRow> {
        match outbox.take(&[]).await.unwrap() {
            ForeignTake::Rows(rows) => rows,
            ForeignTake::Elsewhere => panic!("another worker has the lock"),
        }
    }

    fn ids(rows: &[ForeignRow]) -> Vec<String> {
        rows.iter().map(|row| row.id.clone()).collect()
    }

    fn dispatched(rows: &[ForeignRow]) -> Vec<(String, ForeignEnd)> {
        rows.iter().map(|row| (row.id.clone(), ForeignEnd::Dispatched)).collect()
    }

    fn refused(row: &ForeignRow, reason: &str) -> Vec<(String, ForeignEnd)> {
        vec![(row.id.clone(), ForeignEnd::Refused(reason.into()))]
    }

    async fn count(client: &Client, what: &str) -> i64 {
        client.query_one(&format!("SELECT count(*) FROM {what}"), &[]).await.unwrap().get(0)
    }

    async fn setup_error(url: &str, mapping: ForeignMapping) -> String {
        match mapped(url, mapping).take(&[]).await.err() {
            Some(StoreError::Setup(text)) => text,
            other => panic!("a set-up error was expected, not {other:?}"),
        }
    }

    #[tokio::test]
    async fn rows_come_in_order_and_are_marked_and_recorded() {
        on_outbox(3, async |url, client| {
            let mut outbox = open(url);
            let taken = rows(&mut outbox).await;
            assert_eq!(ids(&taken), [id(0), id(1), id(2)]);
            let first = ForeignRow {
                id: id(0),
                kind: "TicketCreatedEvent".into(),
                payload: Ok("{\"number\": 0}".into()),
                occurred_at: Some(Timestamp::from_ms(0)),
                correlation_id: Some("c0".into()),
                is_processed: false,
            };
            assert_eq!(taken[0], first);
            let settled = outbox.settle(&dispatched(&taken[..2]), at(0)).await.unwrap();
            assert_eq!(settled, ForeignSettled { dispatched: 2, refused: vec![] });
            assert_eq!(ids(&rows(&mut outbox).await), [id(2)], "of which nothing was said");
            let sent = "\"OutboxMessages\" WHERE \"DispatchedAt\" = to_timestamp(1800000000) AND \"Attempts\" = 0 AND \"Error\" IS NULL";
            assert_eq!(count(client, sent).await, 2);
            assert_eq!(count(client, "\"ProcessedEvents\" WHERE \"ProcessedAt\" = to_timestamp(1800000000)").await, 2);
        })
        .await;
    }

    #[tokio::test]
    async fn one_worker_at_a_time_has_the_lock() {
        on_outbox(1, async |url, client| {
            let (mut first, mut second) = (open(url), open(url));
            let taken = rows(&mut first).await;
            assert!(matches!(second.take(&[]).await.unwrap(), ForeignTake::Elsewhere));
            first.settle(&dispatched(&taken), at(0)).await.unwrap();
            assert!(matches!(second.take(&[]).await.unwrap(), ForeignTake::Elsewhere), "it is kept between batches");
            first.release().await.unwrap();
            assert!(rows(&mut second).await.is_empty());
            assert!(matches!(first.take(&[]).await.unwrap(), ForeignTake::Elsewhere));
            let held = "pg_locks WHERE locktype = 'advisory' AND objid = 42 AND granted
                        AND database = (SELECT oid FROM pg_database WHERE datname = current_database())";
            assert_eq!(count(client, held).await, 1);
            second.close();
            drop(second);
            // Other users of the lock are respected too.
            crate::foreign::until(async || {
                client.query_one("SELECT pg_try_advisory_lock(42)", &[]).await.unwrap().get(0)
            })
            .await;
            assert!(matches!(first.take(&[]).await.unwrap(), ForeignTake::Elsewhere));
        })
        .await;
    }

    #[tokio::test]
    async fn a_node_that_loses_its_session_stops_immediately_and_another_continues() {
        on_outbox(2, async |url, client| {
            let (mut first, mut second) = (open(url), open(url));
            let taken = rows(&mut first).await;
            let gone = first.closed();
            let holder =
                "SELECT pg_terminate_backend(pid) FROM pg_locks WHERE locktype = 'advisory' AND objid = 42 AND granted
                 AND database = (SELECT oid FROM pg_database WHERE datname = current_database())";
            client.execute(holder, &[]).await.unwrap();
            tokio::time::timeout(Duration::from_secs(10), gone.cancelled()).await.expect("notified immediately");
            let late = first.settle(&dispatched(&taken), at(0)).await;
            assert!(matches!(late, Err(StoreError::Unavailable(_))), "{late:?}");
            assert_eq!(ids(&rows(&mut second).await), [id(0), id(1)], "as if the first had never been");
            assert!(
                matches!(first.take(&[]).await.unwrap(), ForeignTake::Elsewhere),
                "it connects again, without the lock"
            );
            assert_eq!(count(client, "\"ProcessedEvents\"").await, 0);
        })
        .await;
    }

    #[tokio::test]
    async fn a_lock_that_somebody_took_away_is_noticed_before_anything_is_taken() {
        on_outbox(1, async |url, client| {
            // As a transaction-mode pooler does: another session works than the one that took the lock.
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
            let error = setup_error(url, ForeignMapping::default()).await;
            assert!(error.contains("not through a transaction-mode pooler"), "{error}");
        })
        .await;
    }

    #[tokio::test]
    async fn what_was_dealt_with_before_is_told_apart() {
        on_outbox(2, async |url, client| {
            let sql = format!("INSERT INTO \"ProcessedEvents\" VALUES ('{}', now())", id(0));
            client.batch_execute(&sql).await.unwrap();
            let mut outbox = open(url);
            let taken = rows(&mut outbox).await;
            assert_eq!(taken.iter().map(|row| row.is_processed).collect::<Vec<_>>(), [true, false]);
            outbox.settle(&dispatched(&taken), at(0)).await.unwrap();
            assert_eq!(count(client, "\"ProcessedEvents\"").await, 2, "one that is there stays");
        })
        .await;
    }

    #[tokio::test]
    async fn a_refused_row_counts_its_attempts_and_does_not_come_after_the_fifth() {
        on_outbox(1, async |url, client| {
            let mut outbox = open(url);
            for attempt in 1..=5 {
                let taken = rows(&mut outbox).await;
                let settled = outbox.settle(&refused(&taken[0], &format!("no {attempt}\0")), at(0)).await.unwrap();
                assert_eq!(settled.refused, [(id(0), attempt)]);
            }
            assert!(rows(&mut outbox).await.is_empty());
            let given_up =
                "\"OutboxMessages\" WHERE \"DispatchedAt\" IS NULL AND \"Attempts\" = 5 AND \"Error\" = 'no 5 '";
            assert_eq!(count(client, given_up).await, 1);
        })
        .await;
    }

    #[tokio::test]
    async fn abandoned_rows_move_to_the_dead_letter_table_if_one_is_configured() {
        let mapping = ForeignMapping { dead_table: Some("Dead".into()), ..ForeignMapping::default() };
        on_mapped(mapping.clone(), 2, async |url, client| {
            client.batch_execute("ALTER TABLE \"OutboxMessages\" ADD \"Tenant\" int DEFAULT 7").await.unwrap();
            let error = setup_error(url, mapping.clone()).await;
            assert!(error.starts_with("the table \"Dead\" lacks columns of \"OutboxMessages\": \"Tenant\""), "{error}");
            client.batch_execute("ALTER TABLE \"Dead\" ADD \"Tenant\" int").await.unwrap();
            client.batch_execute("UPDATE \"OutboxMessages\" SET \"Attempts\" = 4").await.unwrap();
            let mut outbox = mapped(url, mapping.clone());
            let taken = rows(&mut outbox).await;
            outbox.settle(&refused(&taken[0], "never"), at(0)).await.unwrap();
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
    async fn a_batch_is_bounded_and_rows_can_be_left_out() {
        let mapping = ForeignMapping { batch: 2, ..ForeignMapping::default() };
        on_outbox(4, async |url, client| {
            let mut outbox = mapped(url, mapping);
            assert_eq!(ids(&rows(&mut outbox).await), [id(0), id(1)]);
            let ForeignTake::Rows(others) = outbox.take(&[id(0), id(2)]).await.unwrap() else { panic!("no lock") };
            assert_eq!(ids(&others), [id(1), id(3)]);
            client
                .batch_execute("UPDATE \"OutboxMessages\" SET \"Attempts\" = 0 WHERE \"CorrelationId\" = 'c0'")
                .await
                .unwrap();
            let ForeignTake::Rows(none) = outbox.take_of(Some("faena.job"), &[]).await.unwrap() else {
                panic!("no lock")
            };
            assert_eq!(none, []);
        })
        .await;
    }

    #[tokio::test]
    async fn what_is_missing_is_named() {
        on_empty_postgres(async |url, ledger| {
            let error = setup_error(url, ForeignMapping::default()).await;
            assert!(error.starts_with("the table \"OutboxMessages\" does not exist in the database"), "{error}");
            let client = public(ledger).await;
            let make = "CREATE TABLE \"OutboxMessages\" (\"Id\" uuid, \"Type\" text, \"PayloadJson\" bytea, \"OccurredAt\" timestamp, \"Error\" text)";
            client.batch_execute(make).await.unwrap();
            let error = setup_error(url, ForeignMapping::default()).await;
            assert_eq!(
                error,
                "the table \"OutboxMessages\" has a column \"PayloadJson\" of type bytea, which must be one of text, varchar, json, jsonb; \
                 no column \"DispatchedAt\" (configure its name with columns.dispatched_at); no column \"Attempts\" (configure its name with columns.attempts); \
                 no column \"CorrelationId\" (configure its name with columns.correlation_id)"
            );
        })
        .await;
    }

    #[tokio::test]
    async fn ids_of_another_type_than_those_of_processed_events_are_refused() {
        on_outbox(0, async |url, client| {
            client.batch_execute("ALTER TABLE \"ProcessedEvents\" ALTER \"EventId\" TYPE text").await.unwrap();
            let error = setup_error(url, ForeignMapping::default()).await;
            assert!(error.contains("has type text, but the ids of \"OutboxMessages\" have type uuid"), "{error}");
        })
        .await;
    }

    /// Every usual type of id, payload and time, under names that try to break out of their quotes.
    #[tokio::test]
    async fn any_usual_types_and_any_names_work() {
        let evil = "x\"; DROP TABLE y; --";
        for (id_type, ids_are) in [("bigint", ["1", "2"]), ("varchar(10)", ["a", "b\""]), ("uuid", [&id(1), &id(2)])] {
            for payload_type in ["text", "json", "jsonb"] {
                for time_type in ["timestamp", "timestamptz"] {
                    on_empty_postgres(async |url, ledger| {
                        let mapping = ForeignMapping {
                            schema: Some("my schema".into()),
                            table: evil.into(),
                            columns: ForeignColumns {
                                id: "select".into(),
                                occurred_at: evil.into(),
                                correlation_id: None,
                                ..ForeignColumns::default()
                            },
                            order_by: vec![evil.into(), "select".into()],
                            ..ForeignMapping::default()
                        };
                        let client = public(ledger).await;
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
                            ids_are[0],
                            ids_are[1],
                        );
                        client.batch_execute(&sql).await.unwrap();
                        let mut outbox = mapped(url, mapping);
                        let taken = rows(&mut outbox).await;
                        assert_eq!(ids(&taken), ids_are);
                        assert_eq!(taken[1].payload.as_deref(), Ok("[1]"));
                        assert_eq!(taken[0].occurred_at, Some(at(0)), "a time without a zone is UTC");
                        let mut ends = dispatched(&taken[..1]);
                        ends.extend(refused(&taken[1], "too long for it"));
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
                        let again = rows(&mut outbox).await;
                        assert_eq!(ids(&again), [ids_are[1]]);
                    })
                    .await;
                }
            }
        }
    }

    #[tokio::test]
    async fn a_payload_that_cannot_be_read_and_a_time_without_end_are_no_obstacle() {
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
    async fn a_user_who_may_not_write_is_told_before_anything_is_published() {
        on_outbox(1, async |url, client| {
            let user = format!("reader_{}", uuid::Uuid::new_v4().simple());
            let make = format!(
                "CREATE ROLE {user} LOGIN; GRANT SELECT, UPDATE (\"DispatchedAt\", \"Error\") ON \"OutboxMessages\" TO {user};
                 GRANT SELECT, INSERT ON \"ProcessedEvents\" TO {user}"
            );
            client.batch_execute(&make).await.unwrap();
            let mut theirs: url::Url = url.parse().unwrap();
            theirs.set_username(&user).unwrap();
            let error = setup_error(theirs.as_str(), ForeignMapping::default()).await;
            assert!(error.starts_with("cannot write the column \"Attempts\" of the table \"OutboxMessages\""), "{error}");
            client.batch_execute(&format!("DROP OWNED BY {user}; DROP ROLE {user}")).await.unwrap();
        })
        .await;
    }

    #[tokio::test]
    async fn a_notification_of_the_application_is_heard() {
        let mapping = ForeignMapping { channel: Some("New \"ones\"".into()), ..ForeignMapping::default() };
        on_outbox(0, async |url, client| {
            let mut outbox = mapped(url, mapping);
            assert!(rows(&mut outbox).await.is_empty());
            outbox.release().await.unwrap();
            client.batch_execute("NOTIFY \"New \"\"ones\"\"\"").await.unwrap();
            tokio::time::timeout(Duration::from_secs(10), outbox.nudge.notified()).await.expect("heard");
        })
        .await;
    }

    #[tokio::test]
    async fn the_tables_in_the_other_spelling_work_too() {
        let mapping = ForeignMapping { schema: Some("app".into()), ..ForeignMapping::in_snake_case() };
        on_empty_postgres(async |url, ledger| {
            let client = public(ledger).await;
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
    async fn a_wrong_password_is_not_repeated() {
        let error = ForeignOutbox::open("postgres://app:geheim@host:port/x", ForeignMapping::default()).err().unwrap();
        assert!(!format!("{error} {error:?}").contains("geheim"));
        let mut away = open("postgres://app:geheim@127.0.0.1:1/x");
        let error = away.take(&[]).await.err().unwrap();
        assert!(matches!(error, StoreError::Unavailable(_)) && !format!("{error:?}").contains("geheim"), "{error:?}");
    }
}

/// Repeats a check until it holds.
async fn until(mut look: impl AsyncFnMut() -> bool) {
    let began = std::time::Instant::now();
    while !look().await {
        assert!(began.elapsed() < std::time::Duration::from_secs(20), "waited in vain");
        tokio::time::sleep(std::time::Duration::from_millis(5)).await;
    }
}
