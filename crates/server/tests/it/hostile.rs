//! Tests of clients that hold connections, do not read, or send too much before they have registered.

use std::{
    io::{ErrorKind, Read, Write},
    net::{SocketAddr, TcpStream},
    process::Command,
    time::Duration,
};

use futures_util::{SinkExt, StreamExt};
use serde_json::{Value, json};
use tokio_tungstenite::{connect_async, tungstenite::Message};

use crate::faena::{Faena, TIMEOUT, eventually, run};

fn address(faena: &Faena) -> SocketAddr {
    faena.url.strip_prefix("http://").unwrap().parse().unwrap()
}

/// Starts a server with this limit on file descriptors.
async fn with_descriptors(folder: &std::path::Path, limit: usize) -> Faena {
    let mut shell = Command::new("sh");
    let script = format!("ulimit -n {limit}; exec \"$0\" \"$@\"");
    shell.args(["-c", &script, env!("CARGO_BIN_EXE_faena")]).current_dir(folder).env_clear();
    let mut faena = Faena::spawn_with(shell, folder, &[("PATH", "/usr/bin:/bin")], &[]);
    faena.wait_until_listening().await;
    faena
}

#[tokio::test(flavor = "multi_thread")]
async fn more_idle_sockets_than_descriptors_lock_no_client_out() {
    let folder = tempfile::tempdir().unwrap();
    let faena = with_descriptors(folder.path(), 200).await;
    let idle: Vec<TcpStream> = (0..300)
        .map(|number| {
            let mut stream = TcpStream::connect(address(&faena)).unwrap();
            let start: [&[u8]; 4] = [b"", b"P", b"GET / HTTP/1.1\r\nHost: x", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"];
            let _ = stream.write_all(start[number % 4]);
            stream
        })
        .collect();
    // The sockets are accepted one after the other; until then each of them makes room for the next.
    let path = format!("{}/health/live", faena.url);
    eventually("the server answers", async || faena.http.get(&path).send().await.ok()).await;
    for _ in 0..20 {
        assert_eq!(faena.get("/health/live").await.0, 200);
        assert_eq!(faena.get("/api/v1/jobs").await.0, 200);
    }
    assert!(!faena.log().contains("connection not accepted"), "{}", faena.log());
    drop(idle);
}

/// Returns whether the server has closed a connection that still has unread data.
fn is_closed(stream: &mut TcpStream) -> bool {
    stream.write_all(b"\r\n").is_err_and(|error| error.kind() != ErrorKind::WouldBlock)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_does_not_read_its_answer_is_disconnected() {
    let folder = tempfile::tempdir().unwrap();
    let faena = Faena::start(folder.path(), &[("FAENA_SERVER_WRITE_TIMEOUT", "1s")]).await;
    let id = faena.submit(json!({"name": "elsewhere", "payload": {"text": "x".repeat(900_000)}})).await;
    let mut stream = TcpStream::connect(address(&faena)).unwrap();
    // More than the buffers of both sockets hold.
    let request = format!("GET /api/v1/jobs/{id} HTTP/1.1\r\nHost: localhost\r\n\r\n").repeat(20);
    stream.write_all(request.as_bytes()).unwrap();
    stream.set_nonblocking(true).unwrap();
    eventually("the server closes the connection", async || is_closed(&mut stream).then_some(())).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn clients_that_do_not_read_make_room_for_the_large_answers_of_others() {
    let folder = tempfile::tempdir().unwrap();
    let settings = [("FAENA_SERVER_UNSENT_BYTES", "1048576"), ("FAENA_SERVER_WRITE_TIMEOUT", "1h")];
    let faena = Faena::start(folder.path(), &settings).await;
    let id = faena.submit(json!({"name": "elsewhere", "payload": {"text": "x".repeat(900_000)}})).await;
    let request = format!("GET /api/v1/jobs/{id} HTTP/1.1\r\nHost: localhost\r\n\r\n").repeat(20);
    let mut hostile: Vec<TcpStream> = (0..3)
        .map(|_| {
            let mut stream = TcpStream::connect(address(&faena)).unwrap();
            stream.write_all(request.as_bytes()).unwrap();
            stream.set_nonblocking(true).unwrap();
            stream
        })
        .collect();
    // The server closes them long before the timeout of an hour, because other answers wait for the memory.
    for stream in &mut hostile {
        eventually("the server closes the connection", async || is_closed(stream).then_some(())).await;
    }
    let (status, job) = faena.get(&format!("/api/v1/jobs/{id}")).await;
    assert_eq!(status, 200);
    assert_eq!(job["payload"]["text"].as_str().unwrap().len(), 900_000);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_memory_of_large_requests_is_released() {
    let folder = tempfile::tempdir().unwrap();
    let faena = Faena::start(folder.path(), &[("FAENA_SERVER_IN_FLIGHT_BYTES", "268435456")]).await;
    let resident_mib = || {
        let status = std::fs::read_to_string(format!("/proc/{}/status", faena.process_id())).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
        line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() / 1_024
    };
    faena.submit(json!({"name": "elsewhere"})).await;
    let before = resident_mib();
    // Batches that never end: the server keeps what it has received.
    let body = " ".repeat(15 << 20);
    let head = "POST /api/v1/jobs/batch HTTP/1.1\r\nHost: localhost\r\nContent-Length: 16777216\r\n\r\n";
    let unfinished: Vec<TcpStream> = (0..8)
        .map(|_| {
            let mut stream = TcpStream::connect(address(&faena)).unwrap();
            stream.write_all(head.as_bytes()).unwrap();
            stream.write_all(body.as_bytes()).unwrap();
            stream
        })
        .collect();
    eventually("the batches are in memory", async || (resident_mib() > before + 90).then_some(())).await;
    drop(unfinished);
    eventually("the memory is given back", async || (resident_mib() < before + 30).then_some(())).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_of_http2_that_is_not_read_ends_its_connection() {
    let folder = tempfile::tempdir().unwrap();
    let faena = Faena::start(folder.path(), &[("FAENA_SERVER_WRITE_TIMEOUT", "1s")]).await;
    let id = faena.submit(json!({"name": "elsewhere", "payload": {"text": "x".repeat(900_000)}})).await;
    let stream = tokio::net::TcpStream::connect(address(&faena)).await.unwrap();
    let (client, connection) = h2::client::handshake(stream).await.unwrap();
    let connection = tokio::spawn(connection);
    let mut client = client.ready().await.unwrap();
    let request = axum::http::Request::get(format!("{}/api/v1/jobs/{id}", faena.url)).body(()).unwrap();
    let (response, _) = client.send_request(request, true).unwrap();
    let answer = response.await.unwrap();
    // The connection answers pings, but nothing reads the body.
    tokio::time::timeout(TIMEOUT, connection).await.expect("the server closes the connection").unwrap().ok();
    drop(answer);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_connection_of_http2_without_requests_is_closed_although_it_answers_pings() {
    let folder = tempfile::tempdir().unwrap();
    let faena = Faena::start(folder.path(), &[("FAENA_SERVER_IDLE_TIMEOUT", "1s")]).await;
    let stream = tokio::net::TcpStream::connect(address(&faena)).await.unwrap();
    let (client, connection) = h2::client::handshake(stream).await.unwrap();
    tokio::time::timeout(TIMEOUT, connection).await.expect("the server closes the connection").unwrap();
    drop(client);
}

async fn websocket(
    faena: &Faena,
) -> tokio_tungstenite::WebSocketStream<tokio_tungstenite::MaybeTlsStream<tokio::net::TcpStream>> {
    let url = format!("{}/api/v1/workers/connect", faena.url.replacen("http", "ws", 1));
    connect_async(url).await.unwrap().0
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_sends_small_frames_until_it_has_registered() {
    let folder = tempfile::tempdir().unwrap();
    let faena = Faena::start(folder.path(), &[]).await;
    let large = json!({"type": "log", "message": "x".repeat(200 << 10)}).to_string();
    let mut unknown = websocket(&faena).await;
    let _ = unknown.send(Message::text(large.clone())).await;
    let answer = tokio::time::timeout(TIMEOUT, unknown.next()).await.expect("the server closes the connection");
    let is_closed = matches!(&answer, None | Some(Err(_)))
        || matches!(&answer, Some(Ok(Message::Close(Some(frame)))) if u16::from(frame.code) == 1009);
    assert!(is_closed, "{answer:?}");

    let mut worker = websocket(&faena).await;
    worker.send(Message::text(json!({"type": "register", "capabilities": ["a"]}).to_string())).await.unwrap();
    let registered = worker.next().await.unwrap().unwrap();
    assert!(registered.to_text().unwrap().contains("registered"), "{registered:?}");
    worker.send(Message::text(large)).await.unwrap();
    let answer = worker.next().await.unwrap().unwrap();
    assert!(
        answer.to_text().unwrap().contains("jobId"),
        "a large frame is read and its content is checked: {answer:?}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn an_accept_that_fails_is_logged() {
    let folder = tempfile::tempdir().unwrap();
    let faena = Faena::start(folder.path(), &[]).await;
    let pid = faena.process_id().to_string();
    let used = std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap().count();
    // The limit falls below what the server counted on at its start. The descriptors that are left are for connections,
    // and are free again when these have been closed.
    let limit = format!("--nofile={}:", used + 10);
    let limited = Command::new("prlimit").args(["--pid", &pid, &limit]).status().unwrap();
    assert!(limited.success());
    let idle: Vec<TcpStream> = (0..50).map(|_| TcpStream::connect(address(&faena)).unwrap()).collect();
    eventually("the failed accept is logged", async || faena.log().contains("connection not accepted").then_some(()))
        .await;
    let log = faena.log();
    let line = log.lines().find(|line| line.contains("connection not accepted")).unwrap();
    assert!(line.contains("ERROR") && line.contains("error=Too many open files"), "{line}");
    drop(idle);
    eventually("the server accepts again", async || {
        let mut stream = TcpStream::connect(address(&faena)).ok()?;
        stream.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
        stream.write_all(b"GET /health/live HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n").ok()?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer).ok()?;
        answer.starts_with("HTTP/1.1 200").then_some(())
    })
    .await;
}

#[test]
fn a_regular_client_is_served_during_every_attack() {
    let folder = tempfile::tempdir().unwrap();
    let arguments =
        ["bench", "--attacks", "--clients", "20", "--seconds", "1", "--json", "figures.json", "--folder", "."];
    let output = run(folder.path(), &[], &arguments);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let figures: Value = serde_json::from_slice(&std::fs::read(folder.path().join("figures.json")).unwrap()).unwrap();
    let figures = figures["figures"].as_array().unwrap();
    let errors = figures.iter().filter(|row| row["what"].as_str().unwrap().ends_with("errors of the regular client"));
    let errors: Vec<f64> = errors.map(|row| row["value"].as_f64().unwrap()).collect();
    assert_eq!(errors, [0.0; 9], "{figures:#?}");
}
