//! Calls to endpoints of the HTTP API that have no method of their own.

use std::{fmt, time::Duration};

use reqwest::{RequestBuilder, Response, header::HeaderMap};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use tokio::time::timeout;

pub use reqwest::Method;

use crate::{Client, Error, ErrorCode, EventStream, FieldError, sse::SILENCE_LIMIT};

/// A server cannot make a client wait for longer than this.
const LONGEST_RETRY_AFTER: Duration = Duration::from_secs(60);

/// A call to any endpoint of the HTTP API. Created by [`Client::request`].
///
/// ```no_run
/// # async fn example(client: faena::Client) -> Result<(), faena::Error> {
/// let queues: serde_json::Value = client.request(faena::Method::GET, "/api/v1/queues").send().await?;
///
/// let mut events = client.request(faena::Method::GET, "/api/v1/events").query("types", "job.*").stream().await?;
/// while let Some(event) = events.next().await {
///     println!("{}", event.data);
/// }
/// # Ok(()) }
/// ```
#[must_use = "a request is sent by send, text or stream"]
pub struct ApiRequest<'a> {
    client: &'a Client,
    builder: RequestBuilder,
    timeout: Duration,
}

impl<'a> ApiRequest<'a> {
    pub(crate) fn new(client: &'a Client, builder: RequestBuilder, timeout: Duration) -> ApiRequest<'a> {
        ApiRequest { client, builder, timeout }
    }

    /// Adds a parameter to the query.
    pub fn query(mut self, name: &str, value: impl fmt::Display) -> Self {
        self.builder = self.builder.query(&[(name, value.to_string())]);
        self
    }

    /// Adds a parameter to the query if there is a value.
    pub fn query_opt(self, name: &str, value: Option<impl fmt::Display>) -> Self {
        match value {
            Some(value) => self.query(name, value),
            None => self,
        }
    }

    /// Adds a header.
    pub fn header(mut self, name: &str, value: impl AsRef<str>) -> Self {
        self.builder = self.builder.header(name, value.as_ref());
        self
    }

    /// Sets the body.
    pub fn json(mut self, body: &impl Serialize) -> Self {
        self.builder = self.builder.json(body);
        self
    }

    /// Sets the body to a text that already is JSON. It is sent unchanged, so no number in it loses digits.
    pub fn json_text(mut self, body: String) -> Self {
        self.builder = self.builder.header("content-type", "application/json").body(body);
        self
    }

    /// Sets how long the call may take, instead of the timeout of the client. Does not apply to streams.
    pub fn timeout(mut self, limit: Duration) -> Self {
        self.timeout = limit;
        self
    }

    /// Sends the request and reads the answer.
    pub async fn send<T: DeserializeOwned>(self) -> Result<T, Error> {
        serde_json::from_str(&self.text().await?)
            .map_err(|error| Error::Decode { what: "the answer of the server", source: error.into() })
    }

    /// Sends the request and returns the body of the answer unchanged.
    pub async fn text(self) -> Result<String, Error> {
        let response = self.client.execute(self.builder.timeout(self.timeout)).await?;
        response.text().await.map_err(|error| self.client.transport_error(error))
    }

    /// Sends the request and returns the answer as a stream of server-sent events.
    pub async fn stream(self) -> Result<EventStream, Error> {
        match timeout(SILENCE_LIMIT, self.client.execute(self.builder)).await {
            Ok(response) => response.map(EventStream::new),
            Err(elapsed) => Err(self.client.unreachable(elapsed)),
        }
    }
}

impl Client {
    /// Prepares a call to an endpoint, such as `/api/v1/queues`, that has no method of its own.
    pub fn request(&self, method: Method, path: &str) -> ApiRequest<'_> {
        let builder = self.http.request(method, self.address.http(path));
        let builder = match self.address.token() {
            Some(token) => builder.bearer_auth(token),
            None => builder,
        };
        ApiRequest::new(self, builder, self.timeout)
    }

    /// Sends a request. An error status becomes an error.
    async fn execute(&self, request: RequestBuilder) -> Result<Response, Error> {
        let response = request.send().await.map_err(|error| self.transport_error(error))?;
        if response.status().is_success() {
            return Ok(response);
        }
        let status = response.status().as_u16();
        let retry_after = retry_after(response.headers());
        let body = response.bytes().await.map_err(|error| self.transport_error(error))?;
        Err(rejection(status, retry_after, &body))
    }

    fn transport_error(&self, error: reqwest::Error) -> Error {
        if error.is_builder() {
            return Error::Invalid(format!("cannot build the request: {}", error.without_url()));
        }
        self.unreachable(error.without_url())
    }

    fn unreachable(&self, source: impl std::error::Error + Send + Sync + 'static) -> Error {
        Error::Unreachable { url: self.address.shown(), source: source.into() }
    }
}

/// The body of an answer with an error status.
#[derive(Deserialize)]
struct ErrorBody {
    error: ErrorInfo,
}

#[derive(Deserialize)]
struct ErrorInfo {
    code: ErrorCode,
    message: String,
    #[serde(default)]
    details: Vec<FieldError>,
}

/// Reads an answer with an error status. A proxy between client and server may have written it.
pub(crate) fn rejection(status: u16, retry_after: Option<Duration>, body: &[u8]) -> Error {
    match serde_json::from_slice::<ErrorBody>(body) {
        Ok(ErrorBody { error }) => {
            Error::Response { status, code: error.code, message: error.message, details: error.details, retry_after }
        }
        Err(_) => {
            let message = format!("answered {status}; is that a Faena server?");
            let code = ErrorCode::from("UNKNOWN");
            Error::Response { status, code, message, details: Vec::new(), retry_after }
        }
    }
}

/// Returns the delay that a server asks for with `Retry-After` in seconds, up to a minute.
pub(crate) fn retry_after(headers: &HeaderMap) -> Option<Duration> {
    let seconds = headers.get("retry-after")?.to_str().ok()?.parse().ok()?;
    Some(Duration::from_secs(seconds).min(LONGEST_RETRY_AFTER))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_has_the_code_of_the_server() {
        let body = br#"{"error":{"code":"NOT_FOUND","message":"no such job","requestId":"1"}}"#;
        assert_eq!(rejection(404, None, body).to_string(), "no such job (NOT_FOUND)");
        let Error::Response { status: 502, code, .. } = rejection(502, None, b"<html>") else { panic!("rejected") };
        assert_eq!(code, ErrorCode::Unknown("UNKNOWN".into()));
    }

    #[test]
    fn the_delay_that_the_server_asks_for_is_kept_and_bounded() {
        let delay = |value: &str| {
            retry_after(&HeaderMap::from_iter([(reqwest::header::RETRY_AFTER, value.parse().expect("a value"))]))
        };
        assert_eq!(delay("7"), Some(Duration::from_secs(7)));
        assert_eq!(delay("86400"), Some(LONGEST_RETRY_AFTER));
        assert_eq!((delay("soon"), delay("-1"), retry_after(&HeaderMap::new())), (None, None, None));
        let error = rejection(429, delay("7"), br#"{"error":{"code":"RATE_LIMITED","message":"slow down"}}"#);
        assert!(crate::backoff::Backoff::new().delay_after(Some(&error)) >= Duration::from_secs(7));
    }

    #[test]
    fn an_unknown_code_is_kept() {
        let body = br#"{"error":{"code":"QUOTA_EXCEEDED","message":"too much","extra":true}}"#;
        let Error::Response { code, .. } = rejection(402, None, body) else { panic!("rejected") };
        assert_eq!(code, ErrorCode::Unknown("QUOTA_EXCEEDED".into()));
    }
}
