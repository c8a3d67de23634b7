//! Tests of the log file sink.

use std::{
    fs,
    path::{Path, PathBuf},
};

use bytes::Bytes;
use faena_brokers::{
    Message, PublishOutcome, Sink,
    file::{FileSink, FileSinkOptions},
};
use serde_json::{Value, json};

use crate::messages::{assert_all_arrived, assert_no_duplicates, message, messages, outage, rejection};

fn stored_ids(path: &Path) -> Vec<String> {
    let text = fs::read_to_string(path).unwrap();
    assert!(text.is_empty() || text.ends_with('\n'));
    let lines =
        text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap_or_else(|error| panic!("{error}: {line}")));
    lines.map(|line| line["id"].as_str().unwrap().to_owned()).collect()
}

#[tokio::test]
async fn ten_thousand_messages_are_written_in_order() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("faena-events.log");
    let sink = FileSink::new(FileSinkOptions::new(&path));
    for batch in messages(10_000).chunks(1_000) {
        let report = sink.publish(batch).await;
        assert_eq!((report.confirmed(), report.outage), (1_000, None));
    }
    assert_all_arrived(10_000, &stored_ids(&path));
    assert_no_duplicates(&stored_ids(&path));
}

#[tokio::test]
async fn a_line_contains_the_message_for_every_kind_of_body() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("events.log");
    let sink = FileSink::new(FileSinkOptions::new(&path));
    let with_body = |number, body: &'static [u8]| Message { body: Bytes::from_static(body), ..message(number) };
    let batch = [
        with_body(1, b"{\n  \"a\": 1.10,\r\n  \"b\": \"x\\ny\"\n}"),
        with_body(2, b"plain\ntext"),
        with_body(3, b"\xff\xfe"),
    ];
    let report = sink.publish(&batch).await;
    assert_eq!(report.outcomes[..2], [Some(PublishOutcome::Confirmed), Some(PublishOutcome::Confirmed)]);
    assert_eq!(rejection(&report.outcomes[2]), "body is not UTF-8 text");
    let text = fs::read_to_string(&path).unwrap();
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(lines.len(), 2);
    assert!(lines[0].contains(r#""a": 1.10"#), "numbers keep their spelling: {}", lines[0]);
    let first: Value = serde_json::from_str(lines[0]).unwrap();
    let expected = json!({
        "id": "id-1", "type": "job.status.changed", "key": "key-1", "sequence": 1, "at": "2023-11-14T22:13:20.123Z", "correlationId": "c-1",
        "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "contentType": "application/json", "body": { "a": 1.10, "b": "x\ny" },
    });
    assert_eq!(first, expected);
    let second: Value = serde_json::from_str(lines[1]).unwrap();
    assert_eq!(second["body"], "plain\ntext");
}

#[tokio::test]
async fn a_file_that_grows_too_large_is_rotated_and_the_oldest_is_deleted() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("faena-events.log");
    let sink = FileSink::new(FileSinkOptions { max_bytes: 20_000, keep: 3, ..FileSinkOptions::new(&path) });
    let mut sent = 0;
    while sent < 1_000 {
        let batch: Vec<_> = (sent..sent + 50).map(message).collect();
        assert_eq!(sink.publish(&batch).await.confirmed(), 50);
        sent += 50;
    }
    let rotated = |number: usize| PathBuf::from(format!("{}.{number}", path.display()));
    assert!(!rotated(4).exists());
    let files = [rotated(3), rotated(2), rotated(1), path];
    let kept: Vec<String> = files.iter().flat_map(|file| stored_ids(file)).collect();
    assert!(files.iter().all(|file| fs::metadata(file).unwrap().len() <= 20_000));
    let first = 1_000 - kept.len();
    let expected: Vec<String> = (first..1_000).map(|number| format!("id-{number}")).collect();
    assert!(first > 0 && kept.len() > 150);
    assert_eq!(kept, expected, "the newest messages, without a gap");
}

#[tokio::test]
async fn a_torn_last_line_damages_no_other_line() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("events.log");
    fs::write(&path, "{\"id\":\"whole\"}\n{\"id\":\"to").unwrap();
    let sink = FileSink::new(FileSinkOptions::new(&path));
    assert_eq!(sink.publish(&messages(1)).await.confirmed(), 1);
    let text = fs::read_to_string(&path).unwrap();
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(lines[..2], ["{\"id\":\"whole\"}", "{\"id\":\"to"]);
    assert!(lines[2].starts_with("{\"id\":\"id-0\"") && lines.len() == 3);
}

#[tokio::test]
async fn a_full_disk_is_an_outage_and_no_message_is_rejected() {
    let sink = FileSink::new(FileSinkOptions::new("/dev/full"));
    let report = sink.publish(&messages(3)).await;
    assert_eq!(report.outcomes, [None, None, None]);
    let error = outage(&report);
    assert!(error.contains("No space left on device"), "{error}");
}

#[tokio::test]
async fn a_missing_directory_is_an_outage_until_it_is_created() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("later/events.log");
    let sink = FileSink::new(FileSinkOptions::new(&path));
    assert!(outage(&sink.publish(&messages(1)).await).starts_with("cannot write"));
    fs::create_dir(directory.path().join("later")).unwrap();
    assert_eq!(sink.publish(&messages(1)).await.confirmed(), 1);
}

#[tokio::test]
async fn a_file_that_was_moved_away_is_created_again() {
    let directory = tempfile::tempdir().unwrap();
    let (path, moved) = (directory.path().join("events.log"), directory.path().join("moved"));
    let sink = FileSink::new(FileSinkOptions::new(&path));
    assert_eq!(sink.publish(&messages(2)).await.confirmed(), 2);
    fs::rename(&path, &moved).unwrap();
    assert_eq!(sink.publish(&messages(1)).await.confirmed(), 1);
    assert_eq!((stored_ids(&moved).len(), stored_ids(&path).len()), (2, 1));
}

#[tokio::test]
async fn a_file_has_only_one_writer() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("events.log");
    let (first, second) = (FileSink::new(FileSinkOptions::new(&path)), FileSink::new(FileSinkOptions::new(&path)));
    assert_eq!(first.publish(&messages(1)).await.confirmed(), 1);
    let error = outage(&second.publish(&messages(1)).await);
    assert!(error.contains("another process is writing to it"), "{error}");
    first.close().await;
    assert_eq!(second.publish(&messages(1)).await.confirmed(), 1);
}
