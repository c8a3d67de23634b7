//! What every request and answer carries: request id, correlation id, the time it took.

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
pub struct Frame {
    pub request_id: String,
    pub correlation: Correlation,
    /// Who calls, for the audit log.
    actor: String,
}

/// The id that ties everything together which follows from one request.
#[derive(Clone, PartialEq, Debug)]
pub enum Correlation {
    Given(String),
    /// Made here; a single job takes it for its own id.
    Made(Uuid),
}

impl Correlation {
    pub fn text(&self) -> String {
        match self {
            Correlation::Given(text) => text.clone(),
            Correlation::Made(id) => id.to_string(),
        }
    }
}

tokio::task_local! {
    static FRAME: Arc<Frame>;
}

/// The id of the request that is being answered.
pub fn request_id() -> String {
    FRAME.try_with(|frame| frame.request_id.clone()).unwrap_or_default()
}

pub fn correlation() -> Correlation {
    FRAME.try_with(|frame| frame.correlation.clone()).unwrap_or_else(|_| Correlation::Made(Uuid::now_v7()))
}

/// Who calls, for the audit log. While there are no keys, only the address is known for certain: what a caller says of itself
/// is not believed.
pub fn actor() -> String {
    FRAME.try_with(|frame| frame.actor.clone()).unwrap_or_else(|_| LOOPBACK.into())
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

pub async fn frame(request: Request, next: Next) -> Response {
    let started = Instant::now();
    let made = Uuid::now_v7();
    let frame = Arc::new(Frame {
        request_id: sound(request.headers(), &REQUEST_ID).unwrap_or_else(|| made.to_string()),
        correlation: match sound(request.headers(), &CORRELATION_ID) {
            Some(text) => Correlation::Given(text),
            None => Correlation::Made(made),
        },
        actor: actor_of(&request),
    });
    let span = tracing::debug_span!(
        "request",
        method = %request.method(),
        path = request.uri().path(),
        request_id = frame.request_id,
        correlation_id = frame.correlation.text(),
    );
    let mut response = FRAME.scope(frame.clone(), next.run(request)).instrument(span.clone()).await;
    let took_ms = started.elapsed().as_secs_f64() * 1_000.0;
    let headers = response.headers_mut();
    let mut put = |name: HeaderName, text: &str| {
        if let Ok(value) = HeaderValue::from_str(text) {
            headers.insert(name, value);
        }
    };
    put(REQUEST_ID, &frame.request_id);
    put(RESPONSE_TIME, &format!("{took_ms:.2}ms"));
    put(CORRELATION_ID, &frame.correlation.text());
    span.in_scope(|| tracing::debug!(status = response.status().as_u16(), took_ms, "answered"));
    response
}

/// A caller's id, if it is fit to be stored and logged.
fn sound(headers: &HeaderMap, name: &HeaderName) -> Option<String> {
    let text = headers.get(name)?.to_str().ok()?;
    let fit = !text.is_empty() && text.len() <= 255 && !text.chars().any(char::is_control);
    fit.then(|| text.to_owned())
}
