//! Requests that are not valid HTTP, bodies that expand, and texts that would change a terminal or a log.

use std::{
    io::{Read, Write},
    net::{SocketAddr, TcpStream},
    path::Path,
};

use async_compression::tokio::bufread::GzipEncoder;
use serde_json::{Value, json};
use tokio::io::AsyncReadExt;

use crate::{
    faena::{Faena, TIMEOUT, run},
    shell::{Shell, output_parts},
};

/// Sends bytes and returns the status and the body of the answer.
fn exchange(faena: &Faena, request: &[u8]) -> (u16, String) {
    let address: SocketAddr = faena.url.strip_prefix("http://").unwrap().parse().unwrap();
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(TIMEOUT)).unwrap();
    // The server may answer and stop reading before everything is sent.
    let _ = stream.write_all(request);
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).unwrap();
    let answer = String::from_utf8(answer).unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap_or_else(|| {
        panic!("no answer to {:?}: {answer:?}", String::from_utf8_lossy(&request[..request.len().min(100)]))
    });
    assert!(head.to_lowercase().contains("x-request-id: "), "{head}");
    (head[9..12].parse().unwrap(), body.to_owned())
}

fn with_header(header: &[u8]) -> Vec<u8> {
    [b"GET /api/v1/jobs HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n", header, b"\r\n\r\n"].concat()
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_that_are_not_valid_http_get_the_error_body() {
    let folder = tempfile::tempdir().unwrap();
    let faena = Faena::start(folder.path(), &[("LOG_LEVEL", "debug")]).await;
    let many: String = (0..200).map(|n| format!("X-{n}: 1\r\n")).collect();
    let path = |path: &str| format!("GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n").into_bytes();
    let invalid = (400, "VALIDATION_ERROR");
    let large = (431, "HEADERS_TOO_LARGE");
    let cases: Vec<(&str, Vec<u8>, (u16, &str))> = vec![
        ("no HTTP", b"hello\r\n\r\n".to_vec(), invalid),
        ("a version that does not exist", b"GET / HTTP/9.9\r\n\r\n".to_vec(), invalid),
        ("a space in a header name", with_header(b"X Y: 1"), invalid),
        ("a null byte in a header", with_header(b"X-Request-Id: a\0b"), invalid),
        ("an escape sequence in a header", with_header(b"X-Request-Id: \x1b[31m"), invalid),
        ("a header without a colon", with_header(b"nonsense"), invalid),
        ("a line that continues a header", with_header(b"X-A: 1\r\n folded"), invalid),
        ("an invalid length", with_header(b"Content-Length: -1"), invalid),
        ("two lengths", with_header(b"Content-Length: 1\r\nContent-Length: 2"), invalid),
        ("an invalid path", b"GET /a b HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".to_vec(), invalid),
        ("a path with control characters", path("/\x1b[2J"), invalid),
        ("one huge header", with_header(format!("X-A: {}", "a".repeat(200 << 10)).as_bytes()), large),
        ("very many headers", with_header(many.as_bytes()), large),
        ("a huge path", path(&format!("/{}", "a".repeat(200 << 10))), large),
        ("a path that is not UTF-8", path("/api/v1/jobs/%ff%1b[31m"), (400, "VALIDATION_ERROR")),
        ("a path with line breaks", path("/api/v1/%0d%0aINFO%20forged"), (404, "NOT_FOUND")),
        ("a path outside", path("/../../etc/passwd"), (404, "NOT_FOUND")),
    ];
    for (name, request, (status, code)) in cases {
        let (found, body) = exchange(&faena, &request);
        let body: Value = serde_json::from_str(&body).unwrap_or_else(|error| panic!("{name}: {error}: {found} {body}"));
        assert_eq!((found, body["error"]["code"].as_str()), (status, Some(code)), "{name}: {body}");
        assert!(!body["error"]["requestId"].as_str().unwrap().is_empty(), "{name}: {body}");
        assert!(body["error"]["message"].as_str().is_some_and(|message| !message.is_empty()), "{name}: {body}");
    }
    assert_eq!(faena.get("/health/live").await.0, 200);
    let log = faena.log();
    assert!(!log.contains(|c: char| c.is_control() && c != '\n'), "no control characters in the log: {log:?}");
    assert!(log.lines().all(|line| line.starts_with("20")), "every line is one of ours: {log}");
    assert!(!log.contains("panicked") && log.contains("request handled"), "{log}");
}

/// Returns the most memory that a process ever had.
fn peak_mib(process_id: u32) -> u64 {
    let status = std::fs::read_to_string(Path::new("/proc").join(process_id.to_string()).join("status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() >> 10
}

#[tokio::test(flavor = "multi_thread")]
async fn a_body_that_expands_to_gigabytes_is_rejected_and_takes_no_memory() {
    let folder = tempfile::tempdir().unwrap();
    let faena = Faena::start(folder.path(), &[]).await;
    let mut member = Vec::new();
    GzipEncoder::new(&vec![b' '; 16 << 20][..]).read_to_end(&mut member).await.unwrap();
    // 4 GiB of spaces in about 4 MiB.
    let bomb = member.repeat(256);
    let url = format!("{}/api/v1/jobs/batch", faena.url);
    let before = peak_mib(faena.process_id());
    for _ in 0..3 {
        let request = faena.http.post(&url).header("content-encoding", "gzip").header("connection", "close");
        let answer = request.body(bomb.clone()).send().await;
        // The server closes the connection without reading the rest, which some clients report as an error.
        if let Ok(answer) = answer {
            assert_eq!(answer.status(), 413);
        }
    }
    let after = peak_mib(faena.process_id());
    assert!(after - before < 150, "{before} MiB before, {after} MiB after");
    assert_eq!(faena.get("/health/live").await.0, 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn control_sequences_in_texts_of_workers_do_not_reach_the_terminal() {
    let shell = Shell::start(&[]).await;
    let hostile = "\u{1b}[2J\u{1b}[31mowned\u{7}\u{9b}1A\rstatus \u{202e}DETELPMOC\u{2066}\u{200f}\u{2028}";
    for (id, name) in [("w", "plain"), ("bidirectional", "a\u{202e}b"), ("control", hostile)] {
        // Names with control characters are rejected.
        let worker = json!({"workerId": id, "capabilities": ["bad"], "name": name});
        shell.faena.post("/api/v1/workers/register", worker).await;
    }
    let id = shell.faena.submit(json!({"name": "bad", "maxRetries": 0, "payload": {"text": hostile}})).await;
    let schedule = json!({"name": "s", "cron": "0 0 * * *", "job": {"name": "bad", "payload": {"text": hostile}}});
    shell.faena.post("/api/v1/schedules", schedule).await;
    shell.faena.post("/api/v1/queues/default/pause", json!({"reason": hostile})).await;
    shell.faena.post("/api/v1/queues/default/resume", json!({})).await;
    let (_, claimed) = shell.faena.post("/api/v1/workers/w/claim", json!({"waitMs": 20_000})).await;
    assert_eq!(claimed["jobs"][0]["id"], id.as_str(), "{claimed}");
    let report = format!("/api/v1/workers/w/jobs/{id}");
    let number = &claimed["jobs"][0]["run"];
    shell.faena.post(&format!("{report}/log"), json!({"run": number, "message": hostile})).await;
    shell.faena.post(&format!("{report}/fail"), json!({"run": number, "error": hostile})).await;
    shell.faena.wait_for_state(&id, "FAILED").await;
    for command in [
        &["jobs", "show", &id][..],
        &["jobs", "show", &id, "--json"],
        &["jobs", "list"],
        &["jobs", "list", "--json"],
        &["dlq", "list"],
        &["dlq", "show", &id],
        &["trace", &id],
        &["trace", &id, "--json"],
        &["jobs", "why", &id],
        &["workers", "list"],
        &["workers", "show", "w"],
        &["workers", "list", "--json"],
        &["queues", "list"],
        &["queues", "show", "default"],
        &["schedules", "list"],
        &["limits", "list"],
        &["webhooks", "list"],
        &["keys", "list"],
        &["machines", "list"],
        &["tasks", "list"],
        &["outbox", "dlq", "list"],
        &["audit"],
        &["audit", "--json"],
        &["health"],
        &["doctor"],
        &["config"],
        &["config", "--json"],
    ] {
        let (code, stdout, stderr) = shell.run(command);
        assert!(code == 0 || ["health", "doctor", "outbox"].contains(&command[0]), "{command:?}: {stderr}");
        assert_printable(command, &format!("{stdout}{stderr}"));
        if command.contains(&"--json") {
            serde_json::from_str::<Value>(&stdout).unwrap_or_else(|error| panic!("{command:?}: {error}: {stdout}"));
        }
    }
    let (_, shown, _) = shell.run(&["jobs", "show", &id]);
    assert!(shown.contains("\\u001b[31mowned"), "{shown}");
    let (code, _, stderr) = shell.run(&["jobs", "show", "\u{1b}[2J"]);
    assert!(code != 0 && !stderr.contains('\u{1b}'), "{stderr:?}");
    for arguments in
        [&["jobs", "show", hostile][..], &[hostile], &["worker", "--type", "x", "--url", hostile, "--", "true"]]
    {
        let (code, stdout, stderr) = shell.run(arguments);
        assert_ne!((code, stderr.len()), (0, 0));
        assert_printable(arguments, &format!("{stdout}{stderr}"));
    }
    // The name of the file is part of the messages of commands that use the database.
    let database = format!("sqlite:{hostile}/faena.db");
    for arguments in [
        &["doctor"][..],
        &["config"],
        &["serve", "--roles", "nonsense"],
        &["keys", "create", "--offline", "--name", "n"],
    ] {
        let output =
            run(shell.folder.path(), &[("DATABASE_URL", database.as_str()), ("HOST", "not-a-host.invalid")], arguments);
        let (_, stdout, stderr) = output_parts(&output);
        assert_printable(arguments, &format!("{stdout}{stderr}"));
    }
    assert_printable(&["the log"], &shell.faena.log());
}

fn assert_printable(what: &[&str], shown: &str) {
    let is_control = |c: char| (c.is_control() && c != '\n' && c != '\t') || ('\u{2028}'..='\u{202e}').contains(&c);
    let is_hidden =
        |c: char| ['\u{200e}', '\u{200f}', '\u{61c}'].contains(&c) || ('\u{2066}'..='\u{2069}').contains(&c);
    assert!(!shown.contains(|c: char| is_control(c) || is_hidden(c)), "{what:?}: {shown:?}");
}
