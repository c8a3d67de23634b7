//! Context of a request: its id, correlation id and caller. Every response names the ids and the time it took.

use std::{net::SocketAddr, sync::Arc, time::Instant};

use axum::{
    extract::{ConnectInfo, Request},
    http::{HeaderMap, HeaderName, HeaderValue},
    middleware::Next,
    response::Response,
};
use tracing::Instrument;
use uuid::Uuid;

const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
const CORRELATION_ID: HeaderName = HeaderName::from_static("x-correlation-id");
const RESPONSE_TIME: HeaderName = HeaderName::from_static("x-response-time");

#[derive(Clone, Debug)]
struct RequestContext {
    request_id: String,
    correlation: Correlation,
    actor: String,
}

/// Id that ties together everything that follows from one request.
#[derive(Clone, PartialEq, Debug)]
pub enum Correlation {
    /// Sent by the caller.
    Given(String),
    /// Generated here; a single job uses it as its own id.
    Generated(Uuid),
}

impl Correlation {
    pub fn text(&self) -> String {
        match self {
            Correlation::Given(text) => text.clone(),
            Correlation::Generated(id) => id.to_string(),
        }
    }
}

tokio::task_local! {
    static CONTEXT: Arc<RequestContext>;
}

/// Returns the id of the current request.
pub fn request_id() -> String {
    CONTEXT.try_with(|context| context.request_id.clone()).unwrap_or_default()
}

pub fn correlation() -> Correlation {
    CONTEXT.try_with(|context| context.correlation.clone()).unwrap_or_else(|_| Correlation::Generated(Uuid::now_v7()))
}

/// Returns who calls, for the audit log.
///
/// Without API keys only the address is certain; a name that the caller sends is not trusted.
pub fn actor() -> String {
    CONTEXT.try_with(|context| context.actor.clone()).unwrap_or_else(|_| LOOPBACK.into())
}

const LOOPBACK: &str = "loopback";

fn actor_of(request: &Request) -> String {
    match request.extensions().get::<ConnectInfo<SocketAddr>>() {
        Some(ConnectInfo(peer)) if !peer.ip().to_canonical().is_loopback() => {
            format!("ip {}", peer.ip().to_canonical())
        }
        _ => LOOPBACK.into(),
    }
}

/// Runs a request in its context and adds the headers of every response.
pub async fn with_context(request: Request, next: Next) -> Response {
    let started = Instant::now();
    let generated = Uuid::now_v7();
    let context = Arc::new(RequestContext {
        request_id: valid_id(request.headers(), &REQUEST_ID).unwrap_or_else(|| generated.to_string()),
        correlation: match valid_id(request.headers(), &CORRELATION_ID) {
            Some(text) => Correlation::Given(text),
            None => Correlation::Generated(generated),
        },
        actor: actor_of(&request),
    });
    let span = tracing::debug_span!(
        "request",
        method = %request.method(),
        path = request.uri().path(),
        request_id = context.request_id,
        correlation_id = context.correlation.text(),
    );
    let mut response = CONTEXT.scope(context.clone(), next.run(request)).instrument(span.clone()).await;
    let took_ms = started.elapsed().as_secs_f64() * 1_000.0;
    let headers = response.headers_mut();
    let mut insert = |name: HeaderName, text: &str| {
        if let Ok(value) = HeaderValue::from_str(text) {
            headers.insert(name, value);
        }
    };
    insert(REQUEST_ID, &context.request_id);
    insert(RESPONSE_TIME, &format!("{took_ms:.2}ms"));
    insert(CORRELATION_ID, &context.correlation.text());
    span.in_scope(|| tracing::debug!(status = response.status().as_u16(), took_ms, "request handled"));
    response
}

/// Returns the caller's id if it can be stored and logged.
fn valid_id(headers: &HeaderMap, name: &HeaderName) -> Option<String> {
    let text = headers.get(name)?.to_str().ok()?;
    let is_valid = !text.is_empty() && text.len() <= 255 && !text.chars().any(char::is_control);
    is_valid.then(|| text.to_owned())
}
