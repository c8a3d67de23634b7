//! Relays events to files, and to several sinks at the same time.

use async_trait::async_trait;
use faena_brokers::file::FileSinkOptions;
use faena_engine::{SinkConfig, Target};

use super::{Arrived, all_sent, config, destination::Destination, events_of_a_job_arrive, rabbitmq, sink, view};
use crate::fixture::{Fixture, job, open_sqlite};

struct Log(std::path::PathBuf);

#[async_trait]
impl Destination for Log {
    async fn arrived(&self) -> Vec<Arrived> {
        let text = std::fs::read_to_string(&self.0).unwrap_or_default();
        let line = |line: &str| {
            let line: serde_json::Value = serde_json::from_str(line).unwrap();
            Arrived { message_id: line["id"].as_str().unwrap().into(), body: line["body"].clone() }
        };
        text.lines().map(line).collect()
    }
}

fn target(log: &Log) -> Target {
    Target::File(FileSinkOptions::new(&log.0))
}

#[tokio::test]
async fn events_of_a_job_arrive_as_cloud_events_in_order() {
    let folder = tempfile::tempdir().unwrap();
    let log = Log(folder.path().join("events.log"));
    let fixture = Fixture::over(open_sqlite().await, config(vec![sink("bus", target(&log))])).await;
    events_of_a_job_arrive(&fixture, &log).await;
    fixture.stop().await;
}

#[tokio::test]
async fn a_sink_that_is_down_delays_neither_jobs_nor_other_sinks() {
    let folder = tempfile::tempdir().unwrap();
    let (ends, all) = (Log(folder.path().join("ends.log")), Log(folder.path().join("all.log")));
    let only_ends = SinkConfig { types: vec!["job.completed".into()], ..sink("ends", target(&ends)) };
    let down = sink("down", rabbitmq::target("amqp://127.0.0.1:1", "any"));
    let fixture = Fixture::over(open_sqlite().await, config(vec![down, only_ends, sink("all", target(&all))])).await;
    for _ in 0..20 {
        fixture.run_to(job("noop", "{}"), faena_domain::JobState::Completed).await;
    }
    all_sent(&*fixture.store, "ends").await;
    all_sent(&*fixture.store, "all").await;
    let kinds: Vec<String> = ends.arrived().await.iter().map(|message| message.text("type").to_owned()).collect();
    assert_eq!(kinds, vec!["job.completed"; 20]);
    let of_jobs = all.arrived().await.iter().filter(|message| message.text("type").starts_with("job.")).count();
    assert_eq!(of_jobs, 100);
    let down = view(&*fixture.store, "down").await;
    assert!(down.pending >= 100 && down.down_since.is_some() && down.dead == 0, "{down:?}");
    fixture.stop().await;
}
