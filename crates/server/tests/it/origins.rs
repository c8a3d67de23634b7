//! Tests which hosts and web pages may call a server without API keys, over every protocol.

use std::{
    io::{Read, Write},
    net::{SocketAddr, TcpStream},
};

use reqwest::StatusCode;

use crate::faena::{Faena, TIMEOUT};

/// A request as a browser or a program sends it. `OWN` stands for the address of the server, `PORT` for its port.
struct Case {
    name: &'static str,
    /// Host in the target of the request: absolute form in HTTP/1, `:authority` in HTTP/2.
    target: Option<&'static str>,
    hosts: &'static [&'static str],
    headers: &'static [(&'static str, &'static str)],
    is_accepted: bool,
}

const fn case(name: &'static str, hosts: &'static [&'static str], is_accepted: bool) -> Case {
    Case { name, target: None, hosts, headers: &[], is_accepted }
}

const fn page(name: &'static str, headers: &'static [(&'static str, &'static str)], is_accepted: bool) -> Case {
    Case { name, target: None, hosts: &["OWN"], headers, is_accepted }
}

const fn target(name: &'static str, target: &'static str, hosts: &'static [&'static str], is_accepted: bool) -> Case {
    Case { name, target: Some(target), hosts, headers: &[], is_accepted }
}

const CASES: &[Case] = &[
    case("the address", &["OWN"], true),
    case("localhost", &["localhost:PORT"], true),
    case("upper case", &["LOCALHOST:PORT"], true),
    case("without a port", &["localhost"], true),
    case("IPv6", &["[::1]:PORT"], true),
    case("another name", &["evil.example"], false),
    case("a name that begins like this machine", &["localhost.evil.example"], false),
    case("a name behind a bracket", &["[::1].evil.com:80"], false),
    case("a name as a port", &["localhost:evil.com"], false),
    case("a trailing dot", &["localhost.:PORT"], false),
    case("user information", &["localhost@evil.example"], false),
    case("this machine as user information", &["localhost:PORT@evil.example"], false),
    case("no port after the colon", &["localhost:"], false),
    case("an empty host", &[""], false),
    case("no host", &[], false),
    case("two hosts", &["localhost:PORT", "evil.example"], false),
    case("the same host twice", &["localhost:PORT", "localhost:PORT"], false),
    target("own target", "OWN", &["OWN"], true),
    target("own target without Host", "OWN", &[], true),
    target("another target", "evil.example", &["OWN"], false),
    target("another target without Host", "evil.example", &[], false),
    target("another Host", "OWN", &["evil.example"], false),
    target("target and Host of another name", "evil.example", &["evil.example"], false),
    target("target with user information", "localhost@evil.example", &[], false),
    page("own origin", &[("origin", "http://OWN")], true),
    page("own origin and site", &[("origin", "http://OWN"), ("sec-fetch-site", "same-origin")], true),
    page("another origin", &[("origin", "http://evil.example")], false),
    page("another port", &[("origin", "http://127.0.0.1:1")], false),
    page("an opaque origin", &[("origin", "null")], false),
    page("an origin with user information", &[("origin", "http://x@OWN")], false),
    page("an origin with a trailing dot", &[("origin", "http://localhost.:PORT")], false),
    page("two origins", &[("origin", "http://OWN"), ("origin", "http://evil.example")], false),
    page("a request of another site", &[("sec-fetch-site", "cross-site")], false),
    page("a request of the same site", &[("sec-fetch-site", "same-site")], false),
    page("an address that a person typed", &[("sec-fetch-site", "none")], true),
    page("two sites", &[("sec-fetch-site", "same-origin"), ("sec-fetch-site", "cross-site")], false),
];

impl Case {
    fn check(&self, protocol: &str, status: StatusCode) {
        let is_accepted = status.is_success() || status == StatusCode::SWITCHING_PROTOCOLS;
        let is_refused = [StatusCode::BAD_REQUEST, StatusCode::FORBIDDEN].contains(&status);
        assert!(if self.is_accepted { is_accepted } else { is_refused }, "{protocol}, {}: {status}", self.name);
    }
}

fn fill(text: &str, own: SocketAddr) -> String {
    text.replace("OWN", &own.to_string()).replace("PORT", &own.port().to_string())
}

/// Sends a request over HTTP/1 and returns the status of its answer.
fn http1(case: &Case, own: SocketAddr, path: &str, more_headers: &str) -> StatusCode {
    let prefix = case.target.map(|target| format!("http://{}", fill(target, own))).unwrap_or_default();
    let mut request = format!("GET {prefix}{path} HTTP/1.1\r\n{more_headers}");
    for host in case.hosts {
        request.push_str(&format!("Host: {}\r\n", fill(host, own)));
    }
    for (name, value) in case.headers {
        request.push_str(&format!("{name}: {}\r\n", fill(value, own)));
    }
    request.push_str("\r\n");
    let mut stream = TcpStream::connect(own).unwrap();
    stream.set_read_timeout(Some(TIMEOUT)).unwrap();
    stream.write_all(request.as_bytes()).unwrap();
    let mut head = [0; 12];
    stream.read_exact(&mut head).unwrap();
    StatusCode::from_bytes(&head[9..]).unwrap()
}

const UPGRADE: &str = "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n\
                       Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n";

#[tokio::test(flavor = "multi_thread")]
async fn other_hosts_and_pages_of_other_origins_are_rejected_over_http1_and_websocket() {
    let folder = tempfile::tempdir().unwrap();
    let faena = Faena::start(folder.path(), &[]).await;
    let own: SocketAddr = faena.url.strip_prefix("http://").unwrap().parse().unwrap();
    for case in CASES {
        case.check("HTTP/1", http1(case, own, "/api/v1/jobs", ""));
        case.check("WebSocket", http1(case, own, "/api/v1/workers/connect", UPGRADE));
    }
    let link = page("a link", &[("sec-fetch-site", "cross-site"), ("sec-fetch-mode", "navigate")], true);
    link.check("HTTP/1", http1(&link, own, "/docs", ""));
}

/// Sends a request over HTTP/2. Returns its status, or 403 for a gRPC call that was rejected; `None` if no client of
/// HTTP/2 can send it.
async fn http2(case: &Case, own: SocketAddr, method: &str, path: &str) -> Option<StatusCode> {
    let (authority, hosts) = match (case.target, case.hosts) {
        (Some(target), hosts) => (target, hosts),
        (None, []) => return None,
        (None, [only]) => (*only, &[][..]),
        (None, hosts) => (hosts[0], hosts),
    };
    let mut request =
        axum::http::Request::builder().method(method).uri(format!("http://{}{path}", fill(authority, own)));
    for host in hosts {
        request = request.header("host", fill(host, own));
    }
    for (name, value) in case.headers {
        request = request.header(*name, fill(value, own));
    }
    if method == "POST" {
        request = request.header("content-type", "application/grpc").header("te", "trailers");
    }
    let request = request.body(()).ok()?;
    let stream = tokio::net::TcpStream::connect(own).await.unwrap();
    let (client, connection) = h2::client::handshake(stream).await.unwrap();
    tokio::spawn(connection);
    let mut client = client.ready().await.unwrap();
    let (response, mut body) = client.send_request(request, method == "GET").ok()?;
    if method == "POST" {
        // Fails if the server has refused the request by its headers and closed the stream already.
        let _ = body.send_data(vec![0; 5].into(), true);
    }
    // The library of the server refuses some requests before the server sees them.
    let Ok(response) = response.await else { return Some(StatusCode::BAD_REQUEST) };
    let (head, mut answer) = response.into_parts();
    while let Some(Ok(_)) = answer.data().await {}
    // A stream that the server closes without reading the body ends without trailers.
    let trailers = answer.trailers().await.ok().flatten().unwrap_or_default();
    match head.headers.get("grpc-status").or(trailers.get("grpc-status")) {
        Some(status) if status != "0" => Some(StatusCode::FORBIDDEN),
        _ => Some(head.status),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn other_hosts_and_pages_of_other_origins_are_rejected_over_http2_and_grpc() {
    let folder = tempfile::tempdir().unwrap();
    let faena = Faena::start(folder.path(), &[]).await;
    let own: SocketAddr = faena.url.strip_prefix("http://").unwrap().parse().unwrap();
    let mut sent = 0;
    for case in CASES {
        for (protocol, method, path) in
            [("HTTP/2", "GET", "/api/v1/jobs"), ("gRPC", "POST", "/faena.v1.JobService/ListJobs")]
        {
            if let Some(status) = http2(case, own, method, path).await {
                case.check(protocol, status);
                sent += 1;
            }
        }
    }
    assert!(sent > CASES.len(), "only {sent} requests were sent");
}
