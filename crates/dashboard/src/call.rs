//! Calls the REST API of the same process on behalf of a viewer.

use std::{
    net::SocketAddr,
    time::{Duration, Instant},
};

use axum::{
    Router,
    body::Body,
    extract::ConnectInfo,
    http::{HeaderMap, HeaderName, HeaderValue, Method, Request, StatusCode, header, request::Parts},
};
use http_body_util::BodyExt;
use parking_lot::Mutex;
use serde::{Deserialize, de::DeserializeOwned};
use serde_json::Value;
use sha2::{Digest, Sha256};
use std::collections::HashMap;
use tower::ServiceExt;

use crate::{error::Failure, session};

/// How long an answer may be shown to the same caller again while a page is live.
pub const FRESH: Duration = Duration::from_millis(900);
/// Maximum number of answers that are kept for other live pages.
const MAX_KEPT: usize = 512;
/// Largest answer that a page reads.
const MAX_BYTES: usize = 32 << 20;

/// The API as a service of this process.
pub struct InProcess {
    service: Router,
    kept: Mutex<HashMap<[u8; 32], (Instant, Value)>>,
}

impl InProcess {
    pub fn new(service: Router) -> InProcess {
        InProcess { service, kept: Mutex::default() }
    }
}

/// Headers that describe the browser's request and not its sender. Calls to the API do not repeat them.
const REQUEST_HEADERS: [HeaderName; 11] = [
    header::ACCEPT,
    header::ACCEPT_ENCODING,
    header::CONNECTION,
    header::CONTENT_ENCODING,
    header::CONTENT_LENGTH,
    header::CONTENT_TYPE,
    header::COOKIE,
    header::EXPECT,
    header::IF_NONE_MATCH,
    header::TRANSFER_ENCODING,
    header::UPGRADE,
];

/// Sender of a call: what the API needs to recognise the viewer of a page.
#[derive(Clone)]
pub struct Sender {
    headers: HeaderMap,
    peer: Option<ConnectInfo<SocketAddr>>,
    /// Whether answers of the last second may be shown again: the viewer watches a live page.
    is_watching: bool,
}

impl Sender {
    /// Copies everything by which the API recognises a caller, and the key in the session's cookie.
    pub fn of(parts: &Parts) -> Sender {
        let mut headers = parts.headers.clone();
        for name in REQUEST_HEADERS {
            headers.remove(name);
        }
        if let Some(authority) = parts.uri.authority()
            && let Ok(host) = HeaderValue::from_str(authority.as_str())
        {
            headers.entry(header::HOST).or_insert(host);
        }
        if !headers.contains_key(header::AUTHORIZATION)
            && let Some(key) = session::key(&parts.headers)
            && let Ok(mut value) = HeaderValue::from_str(&format!("Bearer {key}"))
        {
            value.set_sensitive(true);
            headers.insert(header::AUTHORIZATION, value);
        }
        Sender { headers, peer: parts.extensions.get().copied(), is_watching: session::is_watching(&parts.headers) }
    }

    /// Returns the same sender with another key.
    pub fn with_key(&self, key: &str) -> Option<Sender> {
        let mut sender = self.clone();
        let mut value = HeaderValue::from_str(&format!("Bearer {key}")).ok()?;
        value.set_sensitive(true);
        sender.headers.insert(header::AUTHORIZATION, value);
        Some(sender)
    }

    pub fn has_key(&self) -> bool {
        self.headers.contains_key(header::AUTHORIZATION)
    }

    /// Returns what distinguishes the answers to this sender from those to others.
    fn fingerprint(&self, path: &str) -> [u8; 32] {
        let mut hash = Sha256::new();
        hash.update(path);
        for (name, value) in &self.headers {
            hash.update([0]);
            hash.update(name.as_str());
            hash.update([1]);
            hash.update(value.as_bytes());
        }
        hash.update(self.peer.map(|ConnectInfo(peer)| peer.ip().to_string()).unwrap_or_default());
        hash.finalize().into()
    }
}

impl InProcess {
    /// Returns the answer to a `GET`.
    pub async fn get<T: DeserializeOwned>(&self, sender: &Sender, path: &str) -> Result<T, Failure> {
        parse(self.get_value(sender, path).await?)
    }

    /// Sends a body and returns the answer.
    pub async fn send(&self, sender: &Sender, method: Method, path: &str, body: &Value) -> Result<Value, Failure> {
        self.call(sender, method, path, Some(body)).await
    }

    async fn get_value(&self, sender: &Sender, path: &str) -> Result<Value, Failure> {
        if !sender.is_watching {
            return self.call(sender, Method::GET, path, None).await;
        }
        let fingerprint = sender.fingerprint(path);
        if let Some((at, value)) = self.kept.lock().get(&fingerprint)
            && at.elapsed() < FRESH
        {
            return Ok(value.clone());
        }
        let value = self.call(sender, Method::GET, path, None).await?;
        let mut kept = self.kept.lock();
        if kept.len() >= MAX_KEPT {
            kept.retain(|_, (at, _)| at.elapsed() < FRESH);
        }
        if kept.len() < MAX_KEPT {
            kept.insert(fingerprint, (Instant::now(), value.clone()));
        }
        Ok(value)
    }

    async fn call(&self, sender: &Sender, method: Method, path: &str, body: Option<&Value>) -> Result<Value, Failure> {
        let text = body.map(Value::to_string).unwrap_or_default();
        let mut request =
            Request::builder().method(method).uri(path).body(Body::from(text)).map_err(Failure::internal)?;
        *request.headers_mut() = sender.headers.clone();
        if body.is_some() {
            let json = HeaderValue::from_static("application/json");
            request.headers_mut().insert(header::CONTENT_TYPE, json);
        }
        if let Some(peer) = sender.peer {
            request.extensions_mut().insert(peer);
        }
        let response = match self.service.clone().oneshot(request).await {
            Ok(response) => response,
            Err(never) => match never {},
        };
        let status = response.status();
        let limited = http_body_util::Limited::new(response.into_body(), MAX_BYTES);
        let bytes = limited.collect().await.map_err(|error| Failure::internal(error.to_string()))?.to_bytes();
        if status.is_success() {
            let is_text = !matches!(bytes.first(), Some(b'{' | b'['));
            return match is_text {
                true => Ok(Value::String(String::from_utf8_lossy(&bytes).into_owned())),
                false => serde_json::from_slice(&bytes).map_err(Failure::internal),
            };
        }
        Err(failure(status, &bytes))
    }
}

fn parse<T: DeserializeOwned>(value: Value) -> Result<T, Failure> {
    serde_json::from_value(value).map_err(Failure::internal)
}

#[derive(Deserialize)]
struct ErrorBody {
    error: ErrorText,
}

#[derive(Deserialize)]
struct ErrorText {
    message: String,
    #[serde(default)]
    details: Vec<FieldText>,
}

#[derive(Deserialize)]
struct FieldText {
    path: String,
    message: String,
}

/// Converts an error response of the API.
fn failure(status: StatusCode, body: &[u8]) -> Failure {
    let Ok(ErrorBody { error }) = serde_json::from_slice(body) else {
        return Failure::new(status, status.canonical_reason().unwrap_or("no answer").to_owned());
    };
    match error.details.is_empty() {
        true => Failure::new(status, error.message),
        false => {
            let fields = error.details.into_iter().map(|field| (field.path, field.message)).collect();
            Failure { status, ..Failure::invalid(fields) }
        }
    }
}
