//! API keys from the command line, TLS, and connection limits, with the real binary.

use std::{
    io::{Read, Write},
    net::{SocketAddr, TcpStream},
    path::Path,
    time::Duration,
};

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, CertifiedKey, IsCa, KeyPair};
use reqwest::{Certificate, Client, Identity, StatusCode, Version};
use serde_json::json;

use crate::{
    faena::{Faena, TIMEOUT, command, eventually, run},
    shell::{Shell, output_parts},
    tables::common_beginning,
};

fn token(key: &str) -> [(&'static str, String); 1] {
    [("FAENA_TOKEN", key.to_owned())]
}

/// Runs a command with an API key.
fn with_key(shell: &Shell, key: &str, arguments: &[&str]) -> (i32, String, String) {
    let [(name, value)] = token(key);
    output_parts(&run(shell.folder.path(), &[("FAENA_URL", &shell.faena.url), (name, &value)], arguments))
}

#[tokio::test(flavor = "multi_thread")]
async fn the_first_key_is_created_from_this_machine_and_from_then_on_a_key_is_needed() {
    let shell = Shell::start(&[]).await;
    let created = shell.json(&["keys", "create", "ops", "--scopes", "admin", "--json"]);
    let key = created["key"].as_str().unwrap();
    assert!(key.starts_with("fna_"), "{key}");
    let (code, _, stderr) = shell.run(&["jobs", "list"]);
    assert_eq!(code, 1, "{stderr}");
    assert!(stderr.contains("an API key is required") && stderr.contains("set FAENA_TOKEN"), "{stderr}");
    let (code, listed, _) = with_key(&shell, key, &["keys", "list"]);
    assert!(code == 0 && listed.contains("ops") && listed.contains("admin"), "{listed}");
    assert!(!listed.contains(key), "a secret is shown only once: {listed}");
    assert_eq!(with_key(&shell, key, &["config"]).0, 0, "FAENA_TOKEN is not a key of the configuration");
    let (code, job, stderr) = with_key(&shell, key, &["enqueue", "noop", "--watch"]);
    assert_eq!(code, 0, "{job}{stderr}");

    let id = created["id"].as_str().unwrap();
    let (_, rotated, _) = with_key(&shell, key, &["keys", "rotate", id, "--overlap", "0s", "--json"]);
    let rotated: serde_json::Value = serde_json::from_str(&rotated).unwrap();
    assert_eq!(with_key(&shell, key, &["keys", "list"]).0, 1, "without an overlap the old secret ends now");
    let key = rotated["key"].as_str().unwrap();
    let (code, answer, stderr) = with_key(&shell, key, &["keys", "revoke", id]);
    assert!(code == 0 && answer.contains("is revoked"), "{answer}{stderr}");
    let log = shell.faena.log();
    assert!(!log.contains(key) && !log.contains("fna_"), "no secret in the log: {log}");
}

#[tokio::test(flavor = "multi_thread")]
async fn every_key_is_listed_and_found_by_the_beginning_of_its_id() {
    const KEYS: usize = 251; // more than a page
    let shell = Shell::start(&[]).await;
    let (status, oldest) = shell.faena.post("/api/v1/api-keys", json!({"name": "oldest", "scopes": ["admin"]})).await;
    assert_eq!(status, StatusCode::CREATED, "{oldest}");
    let key = oldest["key"].as_str().unwrap();
    let client = Client::new();
    for n in 1..KEYS {
        let request = client.post(format!("{}/api/v1/api-keys", shell.faena.url)).bearer_auth(key);
        let answer = request.json(&json!({"name": format!("key {n}"), "scopes": ["read"]})).send().await.unwrap();
        assert_eq!(answer.status(), StatusCode::CREATED);
    }
    let (_, listed, _) = with_key(&shell, key, &["keys", "list", "--json"]);
    let listed: serde_json::Value = serde_json::from_str(&listed).unwrap();
    assert_eq!(listed["apiKeys"].as_array().unwrap().len(), KEYS);
    let id = oldest["id"].as_str().unwrap();
    let others = listed["apiKeys"].as_array().unwrap().iter().map(|key| key["id"].as_str().unwrap());
    let common = others.filter(|other| *other != id).map(|other| common_beginning(id, other)).max().unwrap();
    let (code, _, stderr) = with_key(&shell, key, &["keys", "revoke", &id[..common]]);
    assert!(code == 1 && stderr.contains("pass more characters"), "{stderr}");
    let (code, revoked, stderr) = with_key(&shell, key, &["keys", "revoke", &id[..=common]]);
    assert!(code == 0 && revoked.contains("\"oldest\""), "{revoked}{stderr}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_key_created_offline_lets_the_server_listen_on_every_address() {
    let folder = tempfile::tempdir().unwrap();
    let refused = run(folder.path(), &[], &["serve", "--host", "0.0.0.0", "--port", "0"]);
    let (code, _, stderr) = output_parts(&refused);
    assert!(code == 2 && stderr.contains("faena keys create"), "{stderr}");
    let created = run(folder.path(), &[], &["keys", "create", "ops", "--scopes", "admin", "--offline", "--json"]);
    let (code, stdout, stderr) = output_parts(&created);
    assert_eq!((code, stderr.as_str()), (0, ""));
    let created: serde_json::Value = serde_json::from_str(&stdout).unwrap();
    let key = created["key"].as_str().unwrap();

    let mut faena = Faena::spawn_with(command(folder.path()), folder.path(), &[], &["--host", "0.0.0.0"]);
    faena.wait_until_listening().await;
    let url = faena.url.replace("0.0.0.0", "127.0.0.1");
    let get = |path: &str| faena.http.get(format!("{url}{path}"));
    assert_eq!(get("/api/v1/jobs").send().await.unwrap().status(), 401);
    assert_eq!(get("/api/v1/jobs").bearer_auth(key).send().await.unwrap().status(), 200);
    assert_eq!(get("/health/live").send().await.unwrap().status(), 200);
}

#[test]
fn a_key_is_created_offline_in_the_database_that_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let create = ["keys", "create", "ops", "--scopes", "admin", "--offline"];
    let own = folder.path().join("own.toml");
    std::fs::write(&own, "[database]\nurl = \"sqlite:configured.db\"\n").unwrap();
    for (flags, file) in
        [(["--config", own.to_str().unwrap()], "configured.db"), (["--database-url", "sqlite:named.db"], "named.db")]
    {
        let (code, _, stderr) = output_parts(&run(folder.path(), &[], &[&create[..], &flags[..]].concat()));
        assert!(code == 0 && folder.path().join(file).exists(), "{file}: {stderr}");
    }
    assert!(!folder.path().join("faena-data").exists(), "the default database is not used");
    let online = run(folder.path(), &[], &["keys", "create", "x", "--scopes", "read", "--database-url", "sqlite:x.db"]);
    assert_eq!(online.status.code(), Some(2), "the flags need --offline");
}

#[test]
fn an_invalid_key_is_not_created_offline() {
    let folder = tempfile::tempdir().unwrap();
    let output = run(folder.path(), &[], &["keys", "create", "x", "--scopes", "root", "--offline"]);
    let (code, _, stderr) = output_parts(&output);
    assert!(code == 2 && stderr.contains("scopes"), "{stderr}");
}

/// A certificate authority and the certificates that it issues, as files.
struct Certificates {
    authority: CertifiedIssuer<'static, KeyPair>,
}

impl Certificates {
    fn new() -> Certificates {
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        Certificates { authority: CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap() }
    }

    fn issue(&self, name: &str) -> CertifiedKey<KeyPair> {
        let signing_key = KeyPair::generate().unwrap();
        let params = CertificateParams::new(vec![name.to_owned()]).unwrap();
        let cert = params.signed_by(&signing_key, &self.authority).unwrap();
        CertifiedKey { cert, signing_key }
    }

    fn write(&self, folder: &Path, name: &str) {
        let issued = self.issue(name);
        std::fs::write(folder.join("key.pem"), issued.signing_key.serialize_pem()).unwrap();
        std::fs::write(folder.join("certificate.pem"), issued.cert.pem()).unwrap();
        std::fs::write(folder.join("ca.pem"), self.authority.pem()).unwrap();
    }

    fn client(&self, identity: Option<Identity>) -> Client {
        let root = Certificate::from_pem(self.authority.pem().as_bytes()).unwrap();
        let mut builder = Client::builder().no_proxy().timeout(Duration::from_secs(20)).tls_certs_only([root]);
        if let Some(identity) = identity {
            builder = builder.identity(identity);
        }
        builder.build().unwrap()
    }
}

const TLS: [(&str, &str); 2] = [("FAENA_TLS_CERTIFICATE", "certificate.pem"), ("FAENA_TLS_KEY", "key.pem")];

#[tokio::test(flavor = "multi_thread")]
async fn a_server_with_a_certificate_speaks_https_and_reloads_a_changed_certificate() {
    let (folder, certificates) = (tempfile::tempdir().unwrap(), Certificates::new());
    certificates.write(folder.path(), "127.0.0.1");
    let faena = Faena::start(folder.path(), &TLS).await;
    assert!(faena.url.starts_with("https://"), "{}", faena.url);
    let url = format!("{}/health/live", faena.url);
    let answer = certificates.client(None).get(&url).send().await.unwrap();
    assert_eq!((answer.status().as_u16(), answer.version()), (200, Version::HTTP_2), "by ALPN");

    let renewed = Certificates::new();
    renewed.write(folder.path(), "127.0.0.1");
    eventually("the new certificate is served", async || renewed.client(None).get(&url).send().await.ok()).await;
    std::fs::write(folder.path().join("key.pem"), "broken").unwrap();
    eventually("the broken file is reported", async || faena.log().contains("certificate not reloaded").then_some(()))
        .await;
    assert!(renewed.client(None).get(&url).send().await.is_ok(), "the last good certificate stays");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_without_a_certificate_is_refused_if_one_is_required() {
    let (folder, certificates) = (tempfile::tempdir().unwrap(), Certificates::new());
    certificates.write(folder.path(), "127.0.0.1");
    let environment = [TLS[0], TLS[1], ("FAENA_TLS_CLIENT_CA", "ca.pem")];
    let faena = Faena::start(folder.path(), &environment).await;
    let url = format!("{}/health/live", faena.url);
    assert!(certificates.client(None).get(&url).send().await.is_err());
    let issued = certificates.issue("worker");
    let pem = format!("{}{}", issued.cert.pem(), issued.signing_key.serialize_pem());
    let identity = Identity::from_pem(pem.as_bytes()).unwrap();
    assert_eq!(certificates.client(Some(identity)).get(&url).send().await.unwrap().status(), 200);
}

#[test]
fn incomplete_or_unreadable_tls_files_are_named() {
    let folder = tempfile::tempdir().unwrap();
    for (environment, expected) in [
        (vec![("FAENA_TLS_CERTIFICATE", "a.pem")], "tls.certificate and tls.key"),
        (vec![("FAENA_TLS_CERTIFICATE", "a.pem"), ("FAENA_TLS_KEY", "b.pem")], "a.pem"),
    ] {
        let (code, _, stderr) = output_parts(&run(folder.path(), &environment, &["serve", "--port", "0"]));
        assert!(code == 2 && stderr.contains(expected), "{stderr}");
    }
}

/// Opens a connection and sends `start`, the beginning of a request.
fn open(faena: &Faena, start: &[u8]) -> TcpStream {
    let address: SocketAddr = faena.url.strip_prefix("http://").unwrap().parse().unwrap();
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(TIMEOUT)).unwrap();
    stream.write_all(start).unwrap();
    stream
}

#[tokio::test(flavor = "multi_thread")]
async fn connections_that_send_no_complete_request_are_closed() {
    let folder = tempfile::tempdir().unwrap();
    let faena = Faena::start(folder.path(), &[("FAENA_SERVER_IDLE_TIMEOUT", "1s")]).await;
    let starts: [&[u8]; 5] = [
        b"",
        b"P",
        b"GET /health/live HTTP/1.1\r\nHost: 127.0",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET /health/live HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
    ];
    let mut streams: Vec<TcpStream> = starts.iter().map(|start| open(&faena, start)).collect();
    for (stream, start) in streams.iter_mut().zip(starts) {
        // Ends when the server closes the connection; the read timeout would be an error.
        let mut answer = Vec::new();
        let read = stream.read_to_end(&mut answer);
        let is_closed = read.is_ok() || read.is_err_and(|error| error.kind() == std::io::ErrorKind::ConnectionReset);
        assert!(is_closed, "{:?}", String::from_utf8_lossy(start));
    }
    assert_eq!(faena.get("/health/live").await.0, 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn above_the_connection_limit_only_health_is_served() {
    let folder = tempfile::tempdir().unwrap();
    let faena = Faena::start(folder.path(), &[("FAENA_SERVER_MAX_CONNECTIONS", "10")]).await;
    // A stream of events is a request that does not end.
    let events = b"GET /api/v1/events HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n";
    let mut busy: Vec<TcpStream> = (0..10).map(|_| open(&faena, events)).collect();
    for stream in &mut busy {
        stream.read_exact(&mut [0; 12]).unwrap();
    }
    eventually("the connections are counted", async || (faena.get("/api/v1/jobs").await.0 == 503).then_some(())).await;
    assert_eq!(faena.get("/health/live").await.0, 200);
    drop(busy);
    eventually("closed connections are free again", async || (faena.get("/api/v1/jobs").await.0 == 200).then_some(()))
        .await;
}
