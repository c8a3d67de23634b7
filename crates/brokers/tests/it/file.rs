//! Log files.

use std::{
    fs,
    path::{Path, PathBuf},
};

use bytes::Bytes;
use faena_brokers::{
    Message, Sink, Verdict,
    file::{FileSink, FileSinkOptions},
};
use serde_json::{Value, json};

use crate::messages::{assert_all_arrived, assert_no_duplicates, message, messages, refusal};

fn ids(path: &Path) -> Vec<String> {
    let text = fs::read_to_string(path).unwrap();
    assert!(text.is_empty() || text.ends_with('\n'));
    let lines =
        text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap_or_else(|error| panic!("{error}: {line}")));
    lines.map(|line| line["id"].as_str().unwrap().to_owned()).collect()
}

#[tokio::test]
async fn ten_thousand_messages_stand_in_order() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("faena-events.log");
    let sink = FileSink::new(FileSinkOptions::new(&path));
    for batch in messages(10_000).chunks(1_000) {
        let published = sink.publish(batch).await;
        assert_eq!((published.confirmed(), published.down), (1_000, None));
    }
    assert_all_arrived(10_000, &ids(&path));
    assert_no_duplicates(&ids(&path));
}

#[tokio::test]
async fn a_line_holds_the_message_whatever_its_body() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("events.log");
    let sink = FileSink::new(FileSinkOptions::new(&path));
    let with = |number, body: &'static [u8]| Message { body: Bytes::from_static(body), ..message(number) };
    let batch = [with(1, b"{\n  \"a\": 1.10,\r\n  \"b\": \"x\\ny\"\n}"), with(2, b"plain\ntext"), with(3, b"\xff\xfe")];
    let published = sink.publish(&batch).await;
    assert_eq!(published.verdicts[..2], [Some(Verdict::Confirmed), Some(Verdict::Confirmed)]);
    assert_eq!(refusal(&published.verdicts[2]), "its body is no text");
    let text = fs::read_to_string(&path).unwrap();
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(lines.len(), 2);
    assert!(lines[0].contains(r#""a": 1.10"#), "numbers are passed on as they are: {}", lines[0]);
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
async fn a_file_that_grows_too_large_is_rotated_and_old_ones_go() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("faena-events.log");
    let sink = FileSink::new(FileSinkOptions { max_bytes: 20_000, keep: 3, ..FileSinkOptions::new(&path) });
    let mut sent = 0;
    while sent < 1_000 {
        let batch: Vec<_> = (sent..sent + 50).map(message).collect();
        assert_eq!(sink.publish(&batch).await.confirmed(), 50);
        sent += 50;
    }
    let old = |number: usize| PathBuf::from(format!("{}.{number}", path.display()));
    assert!(!old(4).exists());
    let files = [old(3), old(2), old(1), path];
    let kept: Vec<String> = files.iter().flat_map(|file| ids(file)).collect();
    assert!(files.iter().all(|file| fs::metadata(file).unwrap().len() <= 20_000));
    let first = 1_000 - kept.len();
    let expected: Vec<String> = (first..1_000).map(|number| format!("id-{number}")).collect();
    assert!(first > 0 && kept.len() > 150);
    assert_eq!(kept, expected, "the newest, without a gap");
}

#[tokio::test]
async fn a_torn_last_line_costs_no_other() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("events.log");
    fs::write(&path, "{\"id\":\"whole\"}\n{\"id\":\"to").unwrap();
    let sink = FileSink::new(FileSinkOptions::new(&path));
    assert_eq!(sink.publish(&messages(1)).await.confirmed(), 1);
    let text = fs::read_to_string(&path).unwrap();
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(lines[..2], ["{\"id\":\"whole\"}", "{\"id\":\"to"]);
    assert!(lines[2].starts_with("{\"id\":\"id-0\"") && lines.len() == 3);
}

#[tokio::test]
async fn a_full_disk_is_down_and_no_message_is_to_blame() {
    let sink = FileSink::new(FileSinkOptions::new("/dev/full"));
    let published = sink.publish(&messages(3)).await;
    assert_eq!(published.verdicts, [None, None, None]);
    let reason = published.down.unwrap();
    assert!(reason.contains("No space left on device"), "{reason}");
}

#[tokio::test]
async fn a_folder_that_is_missing_is_down_and_used_once_it_is_there() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("later/events.log");
    let sink = FileSink::new(FileSinkOptions::new(&path));
    assert!(sink.publish(&messages(1)).await.down.unwrap().contains("cannot write"));
    fs::create_dir(folder.path().join("later")).unwrap();
    assert_eq!(sink.publish(&messages(1)).await.confirmed(), 1);
}

#[tokio::test]
async fn a_file_that_was_moved_away_is_begun_anew() {
    let folder = tempfile::tempdir().unwrap();
    let (path, moved) = (folder.path().join("events.log"), folder.path().join("moved"));
    let sink = FileSink::new(FileSinkOptions::new(&path));
    assert_eq!(sink.publish(&messages(2)).await.confirmed(), 2);
    fs::rename(&path, &moved).unwrap();
    assert_eq!(sink.publish(&messages(1)).await.confirmed(), 1);
    assert_eq!((ids(&moved).len(), ids(&path).len()), (2, 1));
}

#[tokio::test]
async fn a_file_has_one_writer() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("events.log");
    let (one, other) = (FileSink::new(FileSinkOptions::new(&path)), FileSink::new(FileSinkOptions::new(&path)));
    assert_eq!(one.publish(&messages(1)).await.confirmed(), 1);
    assert!(other.publish(&messages(1)).await.down.unwrap().contains("another process writes it"));
    one.close().await;
    assert_eq!(other.publish(&messages(1)).await.confirmed(), 1);
}
