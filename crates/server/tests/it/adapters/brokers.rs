//! The loop over a broker: a sink carries what the server asks for, an inbox what the adapters answer.

mod rabbitmq {
    use lapin::{Connection, ConnectionProperties, options::QueueDeclareOptions, types::FieldTable};
    use uuid::Uuid;

    use crate::{
        adapters::{Workshop, agent, text},
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
        workshop.script("plan.sh", agent::PLAN);
        workshop.script("code.sh", agent::CODE);
        workshop.script("test.sh", agent::TEST);
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
