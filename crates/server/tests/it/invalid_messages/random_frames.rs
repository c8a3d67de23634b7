//! Random sequences of valid and invalid frames.

use proptest::{
    prelude::*,
    test_runner::{Config, TestRunner},
};
use reqwest::StatusCode;
use serde_json::json;
use tokio_tungstenite::tungstenite::Message;

use super::{Fixture, RawSocket, UNKNOWN_JOB};
use crate::{faena::events, load::assert_completed_once};

/// A frame of a worker, valid or not.
#[derive(Clone, Debug)]
enum RandomFrame {
    Report { what: &'static str, job: usize, run: Option<i64>, is_malformed: bool },
    Plain(&'static str),
    Text(String),
    Bytes(Vec<u8>),
}

fn random_frames() -> impl Strategy<Value = Vec<RandomFrame>> {
    let what = prop::sample::select(vec!["started", "progress", "log", "step", "complete", "fail", "release"]);
    let run = prop_oneof![3 => Just(None), 3 => Just(Some(0)), 1 => Just(Some(-1)), 1 => Just(Some(1))];
    // 0 and 1: the worker's own jobs, 2: the job of another worker, 3: a job that does not exist.
    let report = (what, 0_usize..4, run, prop::bool::weighted(0.1))
        .prop_map(|(what, job, run, is_malformed)| RandomFrame::Report { what, job, run, is_malformed });
    let plain = prop::sample::select(vec!["heartbeat", "register", "drain", "dance"]).prop_map(RandomFrame::Plain);
    let bytes = prop::collection::vec(any::<u8>(), 0..40).prop_map(RandomFrame::Bytes);
    prop::collection::vec(
        prop_oneof![8 => report, 2 => plain, 1 => "\\PC{0,40}".prop_map(RandomFrame::Text), 1 => bytes],
        1..25,
    )
}

fn encode(random_frame: &RandomFrame, jobs: &[(String, i64)]) -> Message {
    match random_frame {
        RandomFrame::Plain(kind) => Message::text(json!({ "type": kind }).to_string()),
        RandomFrame::Text(text) => Message::text(text.clone()),
        RandomFrame::Bytes(bytes) => Message::binary(bytes.clone()),
        RandomFrame::Report { what, job, run, is_malformed } => {
            let (id, current) = &jobs[*job];
            let mut frame = json!({"type": what, "jobId": id});
            if let Some(offset) = run {
                frame["run"] = (current + offset).into();
            }
            let (field, value) = match *what {
                "progress" => ("progress", json!({"percentage": 50})),
                "log" => ("message", json!("hello")),
                "step" => ("name", json!("E1")),
                "complete" => ("result", json!({"n": 1})),
                "fail" => ("error", json!("no")),
                _ => ("jobId", json!(id)),
            };
            frame[field] = if *is_malformed { json!([[null]]) } else { value };
            Message::text(frame.to_string())
        }
    }
}

async fn check_random_frames(fixture: &Fixture, case: usize, frames: &[RandomFrame]) {
    let kind = format!("random.{case}");
    let jobs = json!({"jobs": [
        {"name": kind, "maxRetries": 1, "retryDelay": 100},
        {"name": kind, "maxRetries": 0},
    ]});
    let (status, answer) = fixture.faena.post("/api/v1/jobs/batch", jobs).await;
    assert_eq!(status, StatusCode::CREATED, "{answer}");
    let mut socket = RawSocket::connect(&fixture.faena).await;
    let register = json!({"type": "register", "workerId": kind, "capabilities": [kind], "concurrency": 2});
    socket.send(register.to_string()).await;
    assert_eq!(socket.receive().await["type"], "registered");
    let mut known = Vec::new();
    for _ in 0..2 {
        let assigned = socket.receive().await;
        known.push((assigned["job"]["id"].as_str().unwrap().to_owned(), assigned["job"]["run"].as_i64().unwrap()));
    }
    known.push((fixture.job.id.clone(), fixture.job.run));
    known.push((UNKNOWN_JOB.into(), 1));
    for random_frame in frames {
        socket.send(encode(random_frame, &known)).await;
    }
    // The server answers in order, so it has read all frames when it answers this one.
    socket.send(json!({"type": "last-frame"}).to_string()).await;
    loop {
        let answer = socket.receive().await;
        assert_ne!(answer["type"], "closed", "{answer}");
        if answer["error"]["message"].as_str().is_some_and(|message| message.contains("last-frame")) {
            break;
        }
    }
    for (id, _) in &known[..2] {
        let job = fixture.faena.job(id).await;
        let count = |event: &str| events(&job).iter().filter(|found| **found == event).count();
        let ends = count("completed") + usize::from(job["status"] == "FAILED");
        assert!(ends <= 1, "{job:#}");
        assert!(count("failed") <= 2, "{job:#}");
        if job["status"] == "COMPLETED" {
            assert_completed_once(&job);
        }
    }
    let healthy = fixture.faena.job(&fixture.job.id).await;
    assert_eq!((&healthy["status"], &healthy["run"]), (&json!("PROCESSING"), &json!(fixture.job.run)), "{healthy:#}");
    socket.send(json!({"type": "leave"}).to_string()).await;
    socket.wait_until_closed().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn for_any_sequence_of_frames_the_server_answers_and_no_job_ends_twice() {
    let fixture = Fixture::start(&[]).await;
    fixture.faena.wait_for_state(&fixture.job.id, "PROCESSING").await;
    let case = std::cell::Cell::new(0);
    let mut runner = TestRunner::new(Config { cases: 200, failure_persistence: None, ..Config::default() });
    tokio::task::block_in_place(|| {
        let runtime = tokio::runtime::Handle::current();
        let outcome = runner.run(&random_frames(), |frames| {
            case.set(case.get() + 1);
            runtime.block_on(check_random_frames(&fixture, case.get(), &frames));
            Ok(())
        });
        outcome.unwrap_or_else(|error| panic!("{error}"));
    });
    fixture.assert_undisturbed().await;
}
