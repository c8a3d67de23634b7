//! API keys of worker connections, the rate limit on wrong keys, and the limit on file descriptors.

use std::process::Command;

use faena_wire::v1::{
    ConnectRequest, Register, connect_request::Message as FromWorker, connect_response::Message as FromServer,
    worker_service_client::WorkerServiceClient,
};
use futures_util::{SinkExt, StreamExt};
use serde_json::{Value, json};
use tokio_tungstenite::{
    connect_async,
    tungstenite::{self, Message, client::IntoClientRequest},
};
use tonic::transport::Channel;

use crate::faena::{Faena, eventually};

/// A key and the code with which the registration of a worker for the queue `mail` ends.
struct Case {
    name: &'static str,
    key: Option<String>,
    expected: &'static str,
}

struct Keys {
    faena: Faena,
    admin: String,
    _folder: tempfile::TempDir,
}

impl Keys {
    async fn start() -> Keys {
        let folder = tempfile::tempdir().unwrap();
        let faena = Faena::start(folder.path(), &[]).await;
        let (status, created) = faena.post("/api/v1/api-keys", json!({"name": "admin", "scopes": ["admin"]})).await;
        assert_eq!(status, 201, "{created}");
        Keys { faena, admin: created["key"].as_str().unwrap().to_owned(), _folder: folder }
    }

    async fn call(&self, method: reqwest::Method, path: &str, body: Option<Value>) -> Value {
        let request = self.faena.http.request(method, format!("{}{path}", self.faena.url)).bearer_auth(&self.admin);
        let request = body.iter().fold(request, |request, body| request.json(body));
        let answer = request.send().await.unwrap();
        assert!(answer.status().is_success(), "{path}: {}", answer.status());
        answer.json().await.unwrap()
    }

    async fn create(&self, body: Value) -> (String, String) {
        let created = self.call(reqwest::Method::POST, "/api/v1/api-keys", Some(body)).await;
        (created["key"].as_str().unwrap().to_owned(), created["id"].as_str().unwrap().to_owned())
    }

    async fn with(&self, scopes: &[&str], queues: Option<&[&str]>) -> Option<String> {
        let mut body = json!({"name": "test", "scopes": scopes});
        if let Some(queues) = queues {
            body["queues"] = json!(queues);
        }
        Some(self.create(body).await.0)
    }

    async fn expired(&self) -> String {
        let soon = jiff::Timestamp::now() + std::time::Duration::from_millis(500);
        let body = json!({"name": "expired", "scopes": ["admin"], "expiresAt": soon.to_string()});
        let (key, _) = self.create(body).await;
        eventually("the key expires", async || {
            let request = self.faena.http.get(format!("{}/api/v1/jobs", self.faena.url)).bearer_auth(&key);
            (request.send().await.unwrap().status() == 401).then_some(())
        })
        .await;
        key
    }

    async fn revoked(&self) -> String {
        let (key, id) = self.create(json!({"name": "revoked", "scopes": ["admin"]})).await;
        self.call(reqwest::Method::DELETE, &format!("/api/v1/api-keys/{id}"), None).await;
        key
    }

    /// Every kind of caller.
    async fn cases(&self) -> Vec<Case> {
        let bogus = format!("fna_{}_{}", "b".repeat(12), "c".repeat(43));
        let case = |name, key, expected| Case { name, key, expected };
        vec![
            case("no key", None, "UNAUTHORIZED"),
            case("a bogus key", Some(bogus), "UNAUTHORIZED"),
            case("a text that is not a key", Some("secret".into()), "UNAUTHORIZED"),
            case("an expired key", Some(self.expired().await), "UNAUTHORIZED"),
            case("a revoked key", Some(self.revoked().await), "UNAUTHORIZED"),
            case("read", self.with(&["read"], None).await, "FORBIDDEN"),
            case("write", self.with(&["write"], None).await, "FORBIDDEN"),
            case("worker of another queue", self.with(&["worker"], Some(&["other"])).await, "FORBIDDEN"),
            case("worker of this queue", self.with(&["worker"], Some(&["mail"])).await, "registered"),
            case("worker", self.with(&["worker"], None).await, "registered"),
            case("admin", Some(self.admin.clone()), "registered"),
        ]
    }
}

/// Where a worker presents its key.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Presented {
    InHeader,
    InRegistration,
}

type Socket = tokio_tungstenite::WebSocketStream<tokio_tungstenite::MaybeTlsStream<tokio::net::TcpStream>>;

/// Registers a worker over a WebSocket. Returns `registered` or the code of the rejection.
async fn websocket(url: &str, key: Option<&str>, presented: Presented, worker: &str) -> String {
    open_websocket(url, key, presented, worker).await.0
}

/// Registers a worker and returns its connection too.
async fn open_websocket(url: &str, key: Option<&str>, presented: Presented, worker: &str) -> (String, Option<Socket>) {
    let mut request =
        format!("{}/api/v1/workers/connect", url.replacen("http", "ws", 1)).into_client_request().unwrap();
    let mut register = json!({"type": "register", "workerId": worker, "capabilities": ["a"], "queues": ["mail"]});
    match (key, presented) {
        (Some(key), Presented::InHeader) => {
            request.headers_mut().insert("authorization", format!("Bearer {key}").parse().unwrap());
        }
        (Some(key), Presented::InRegistration) => register["token"] = json!(key),
        (None, _) => {}
    }
    let mut socket = match connect_async(request).await {
        Ok((socket, _)) => socket,
        Err(tungstenite::Error::Http(response)) => {
            let body: Value = serde_json::from_slice(response.body().as_deref().unwrap()).unwrap();
            return (body["error"]["code"].as_str().unwrap().to_owned(), None);
        }
        Err(error) => panic!("{error}"),
    };
    socket.send(Message::text(register.to_string())).await.unwrap();
    let answer: Value = serde_json::from_str(socket.next().await.unwrap().unwrap().to_text().unwrap()).unwrap();
    let code = if answer["type"] == "error" { &answer["error"]["code"] } else { &answer["type"] };
    (code.as_str().unwrap().to_owned(), Some(socket))
}

/// Registers a worker over gRPC. Returns `registered` or the code of the rejection.
async fn grpc(url: &str, key: Option<&str>, presented: Presented, worker: &str) -> String {
    let channel = Channel::from_shared(url.to_owned()).unwrap().connect().await.unwrap();
    let mut register = Register {
        worker_id: Some(worker.into()),
        capabilities: vec!["a".into()],
        queues: vec!["mail".into()],
        ..Register::default()
    };
    if presented == Presented::InRegistration {
        register.token = key.map(str::to_owned);
    }
    let first = ConnectRequest { message: Some(FromWorker::Register(register)) };
    let outgoing = futures_util::stream::once(async { first }).chain(futures_util::stream::pending());
    let mut request = tonic::Request::new(outgoing);
    if let (Some(key), Presented::InHeader) = (key, presented) {
        request.metadata_mut().insert("authorization", format!("Bearer {key}").parse().unwrap());
    }
    let code = |status: tonic::Status| status.metadata().get("x-error-code").unwrap().to_str().unwrap().to_owned();
    match WorkerServiceClient::new(channel).connect(request).await {
        Err(status) => code(status),
        Ok(stream) => match stream.into_inner().message().await {
            Err(status) => code(status),
            Ok(message) => match message.and_then(|message| message.message) {
                Some(FromServer::Registered(_)) => "registered".into(),
                other => panic!("{other:?}"),
            },
        },
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_registers_with_a_key_of_its_scope_and_queue_only() {
    let keys = Keys::start().await;
    let url = keys.faena.url.clone();
    for (number, case) in keys.cases().await.into_iter().enumerate() {
        let key = case.key.as_deref();
        for presented in [Presented::InHeader, Presented::InRegistration] {
            let worker = |transport: &str| format!("{transport}-{number}-{presented:?}");
            let found = websocket(&url, key, presented, &worker("ws")).await;
            assert_eq!(found, case.expected, "WebSocket, {}, {presented:?}", case.name);
            let found = grpc(&url, key, presented, &worker("grpc")).await;
            assert_eq!(found, case.expected, "gRPC, {}, {presented:?}", case.name);
        }
    }
    let listed = keys.call(reqwest::Method::GET, "/api/v1/workers", None).await;
    let ids: Vec<&str> =
        listed["workers"].as_array().unwrap().iter().filter_map(|worker| worker["id"].as_str()).collect();
    assert!(ids.iter().all(|id| !id.contains("-0-") && !id.contains("-7-")), "no rejected worker exists: {ids:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_id_belongs_to_its_key_on_every_transport() {
    let keys = Keys::start().await;
    let url = keys.faena.url.clone();
    let (first, second) = (keys.with(&["worker"], None).await, keys.with(&["worker"], None).await);
    let (found, _connection) = open_websocket(&url, first.as_deref(), Presented::InHeader, "w").await;
    assert_eq!(found, "registered");
    assert_eq!(websocket(&url, second.as_deref(), Presented::InHeader, "w").await, "CONFLICT");
    assert_eq!(grpc(&url, second.as_deref(), Presented::InRegistration, "w").await, "CONFLICT");
    assert_eq!(grpc(&url, first.as_deref(), Presented::InHeader, "w").await, "registered");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_connection_of_a_worker_ends_when_its_key_is_revoked() {
    let keys = Keys::start().await;
    for presented in [Presented::InHeader, Presented::InRegistration] {
        let (key, id) = keys.create(json!({"name": "worker", "scopes": ["worker"]})).await;
        let worker = format!("{presented:?}");
        let (found, connection) = open_websocket(&keys.faena.url, Some(&key), presented, &worker).await;
        assert_eq!(found, "registered");
        keys.call(reqwest::Method::DELETE, &format!("/api/v1/api-keys/{id}"), None).await;
        let mut connection = connection.unwrap();
        let close = async {
            loop {
                match connection.next().await {
                    Some(Ok(Message::Close(Some(frame)))) => return frame.reason.to_string(),
                    Some(Ok(_)) => {}
                    end => panic!("no reason: {end:?}"),
                }
            }
        };
        let reason = tokio::time::timeout(std::time::Duration::from_secs(60), close).await.expect("the server closes");
        assert_eq!(reason, "the API key of the worker is no longer valid; use another key");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn wrong_keys_in_registrations_count_against_the_address() {
    let folder = tempfile::tempdir().unwrap();
    let environment = [("FAENA_LIMITS_REQUESTS_PER_ADDRESS", "1"), ("FAENA_LIMITS_REQUESTS_PER_ADDRESS_BURST", "10")];
    let faena = Faena::start(folder.path(), &environment).await;
    let mut found = Vec::new();
    while found.last().is_none_or(|code| code != "RATE_LIMITED") {
        found.push(websocket(&faena.url, Some("secret"), Presented::InRegistration, "w").await);
        assert!(found.len() < 50, "{found:?}");
    }
    assert!(found.len() <= 7 && found[0] == "UNAUTHORIZED", "each costs a request and a wrong key: {found:?}");
    assert_eq!(grpc(&faena.url, Some("secret"), Presented::InHeader, "w").await, "RATE_LIMITED");
    assert_eq!(faena.get("/health/live").await.0, 200);
}

/// Starts a server through a shell that sets its limit on file descriptors first.
async fn with_descriptors(folder: &std::path::Path, ulimit: &str) -> Faena {
    let mut shell = Command::new("sh");
    let script = format!("{ulimit}; exec \"$0\" \"$@\"");
    shell.args(["-c", &script, env!("CARGO_BIN_EXE_faena")]).current_dir(folder).env_clear();
    let mut faena = Faena::spawn_with(shell, folder, &[("PATH", "/usr/bin:/bin")], &[]);
    faena.wait_until_listening().await;
    faena
}

#[tokio::test(flavor = "multi_thread")]
async fn the_limit_of_file_descriptors_is_raised_at_start() {
    let folder = tempfile::tempdir().unwrap();
    let faena = with_descriptors(folder.path(), "ulimit -S -n 200").await;
    let limits = std::fs::read_to_string(format!("/proc/{}/limits", faena.process_id())).unwrap();
    let line = limits.lines().find_map(|line| line.strip_prefix("Max open files")).unwrap();
    let numbers: Vec<u64> = line.split_whitespace().filter_map(|word| word.parse().ok()).collect();
    assert_eq!(numbers[0], numbers[1].min(21_024), "the default of server.max_connections and a reserve: {limits}");
}
