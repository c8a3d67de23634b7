//! Adapters over a broker: a sink publishes the requests of the server, and an inbox receives the results of the
//! adapters.

mod rabbitmq {
    use lapin::{Connection, ConnectionProperties, options::QueueDeclareOptions, types::FieldTable};
    use uuid::Uuid;

    use crate::{
        adapters::{Workshop, text},
        faena::eventually,
    };

    /// Waits until an adapter consumes from its queue. An event that no queue receives is rejected.
    async fn wait_for_consumer(connection: &Connection, queue: &str) {
        eventually(&format!("{queue} has a consumer"), async || {
            let passive = QueueDeclareOptions { passive: true, ..Default::default() };
            let channel = connection.create_channel().await.unwrap();
            let declared = channel.queue_declare(queue.into(), passive, FieldTable::default()).await.ok()?;
            (declared.consumer_count() > 0).then_some(())
        })
        .await;
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_task_with_a_failed_test_is_completed_over_rabbitmq() {
        let url = std::env::var("FAENA_TEST_RABBITMQ").expect("./test sets FAENA_TEST_RABBITMQ");
        let exchange = format!("tasks-{}", Uuid::now_v7().simple());
        let config = format!(
            r#"
[[sink]]
name = "services"
kind = "rabbitmq"
url = "{url}"
exchange = "{exchange}"
types = ["tarea.*", "task.state.changed", "task.ended"]
body = "data"

[[inbox]]
name = "services"
kind = "rabbitmq"
url = "{url}"
queue = "{exchange}.results"
exchange = "{exchange}"
bind = ["resultado.#"]
deliver = "task-events"
"#
        );
        let mut workshop = Workshop::start_with(&config).await;
        workshop.broker = Some(url.clone());
        let queues = [format!("{exchange}.smith"), format!("{exchange}.sandbox")];
        let transport = |queue| ["--transport", "rabbitmq", "--exchange", &exchange, "--queue", queue];
        workshop.start_smith("plan.sh", "code.sh", &transport(&queues[0]));
        workshop.start_sandbox("test.sh", &transport(&queues[1]));
        let connection = Connection::connect(&url, ConnectionProperties::default()).await.unwrap();
        for queue in &queues {
            wait_for_consumer(&connection, queue).await;
        }
        let id = workshop.create("coding-task", true).await;
        workshop.wait_for_plan(&id, "").await;
        workshop.decide(&id, "approve", "go").await;
        let task = workshop.wait_for(&id, "COMPLETADA").await;
        assert_eq!(task["counters"]["correcciones"], 1, "{task}");
        assert_eq!(workshop.lines("codes"), ["written", "corrected"]);
        let senders: Vec<String> = workshop.history(&id).await.iter().map(|record| text(record, "actor")).collect();
        assert!(senders.iter().any(|actor| actor == "inbox:services"), "{senders:?}");
    }
}

mod nats {
    use crate::{
        adapters::{Workshop, agent, text},
        broker_support::Broker,
    };

    /// Waits until the file `go` exists, so that the test decides when a run ends.
    const SLOW_CODE: &str = "until [ -e \"$HOME/go\" ]; do sleep 0.1; done\n";

    #[tokio::test(flavor = "multi_thread")]
    async fn tasks_are_completed_over_nats_although_it_is_killed_in_the_middle() {
        let mut nats = Broker::nats("").await;
        let url = nats.url();
        let config = format!(
            r#"
[[sink]]
name = "services"
kind = "nats"
url = "{url}"
stream = "TASKS"
subject_prefix = "tasks"
types = ["tarea.*", "task.state.changed", "task.ended"]
body = "data"

[[inbox]]
name = "services"
kind = "nats"
url = "{url}"
stream = "TASKS"
subject = "tasks.resultado.>"
subject_prefix = "tasks"
deliver = "task-events"
"#
        );
        let mut workshop = Workshop::start_with(&config).await;
        workshop.broker = Some(url);
        // Over a broker, the adapters never call the server.
        workshop.url = "http://127.0.0.1:9".into();
        workshop.script("code.sh", &format!("{}{SLOW_CODE}", agent::CODE));
        let transport = ["--transport", "nats", "--stream", "TASKS", "--subject-prefix", "tasks"];
        workshop.start_smith("plan.sh", "code.sh", &transport);
        workshop.start_sandbox("test.sh", &transport);
        let first = workshop.create("coding-task", true).await;
        workshop.wait_for_plan(&first, "").await;
        workshop.decide(&first, "approve", "go").await;
        workshop.wait_for_lines("codes", 1).await;

        // Results, heartbeats and new requests cannot be delivered.
        nats.kill();
        std::fs::write(workshop.path("go"), "").unwrap();
        workshop.smith.as_mut().unwrap().wait_for_log("result not delivered, trying again").await;
        let second = workshop.create("coding-task", false).await;
        nats.start().await;

        for id in [&first, &second] {
            let task = workshop.wait_for(id, "COMPLETADA").await;
            assert_eq!(task["counters"]["correcciones"], 1, "{task}");
            let transitions = workshop.transitions(id).await;
            for (event, count) in
                [("resultado.plan_generado", 1), ("resultado.pr_generada", 2), ("resultado.integracion_finalizada", 2)]
            {
                assert_eq!(transitions.iter().filter(|found| *found == event).count(), count, "{transitions:?}");
            }
            let branch = format!("main..faena/{id}");
            assert_eq!(workshop.git(&["-C", "git/origin.git", "rev-list", "--count", &branch]), "2");
            let history = workshop.history(id).await;
            let results = history.iter().filter(|record| text(record, "event").starts_with("resultado."));
            assert!(results.clone().count() > 0 && results.clone().all(|record| record["actor"] == "inbox:services"));
        }
        let mut runs = workshop.lines("codes");
        runs.sort();
        assert_eq!(runs, ["corrected", "corrected", "written", "written"], "nothing ran twice");
    }
}
