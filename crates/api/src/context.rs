//! Context of a request: its id, correlation id and caller. Every response has headers with the ids and the response time.

use std::{
    net::{IpAddr, SocketAddr},
    sync::Arc,
    time::Instant,
};

use axum::{
    extract::{ConnectInfo, Request, State},
    http::{HeaderMap, HeaderName, HeaderValue, header::AUTHORIZATION},
    middleware::Next,
    response::Response,
};
use faena_auth::{Access, AccessError, Credentials};
use faena_domain::{JobId, Timestamp};
use tracing::Instrument;
use uuid::Uuid;

use crate::{Api, access_log::AccessLog, request_trace::RequestTrace};

const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
const CORRELATION_ID: HeaderName = HeaderName::from_static("x-correlation-id");
const RESPONSE_TIME: HeaderName = HeaderName::from_static("x-response-time");
const API_KEY: HeaderName = HeaderName::from_static("x-api-key");
const FORWARDED_FOR: HeaderName = HeaderName::from_static("x-forwarded-for");

#[derive(Debug)]
pub struct RequestContext {
    pub request_id: String,
    pub correlation: Correlation,
    pub caller: Caller,
    has_wrong_key: bool,
    trace: RequestTrace,
}

impl RequestContext {
    /// Returns the identity of the caller, for logs and the audit log.
    pub fn actor(&self) -> &str {
        self.caller.access.as_ref().map_or("unknown", Access::actor)
    }
}

/// Who sent a request.
#[derive(Clone, Debug)]
pub struct Caller {
    /// Address of the client; behind trusted proxies, the address that they report. `None` if the request did not come
    /// over the network.
    pub address: Option<IpAddr>,
    /// What the caller may do, or why it is rejected.
    pub access: Result<Access, AccessError>,
}

/// Id shared by everything that one request causes.
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

/// Returns the trace context of a job that the current request submits.
pub fn traceparent_of(job: JobId) -> Option<String> {
    CONTEXT.try_with(|context| context.trace.traceparent_of(job)).ok().flatten()
}

/// Returns what the caller of the current request may do, or why it is rejected.
pub fn access() -> Result<Access, AccessError> {
    caller().access
}

/// Returns who sent the current request.
pub fn caller() -> Caller {
    let none = Caller { address: None, access: Err(AccessError::Unauthorized("there is no request")) };
    CONTEXT.try_with(|context| context.caller.clone()).unwrap_or(none)
}

/// Returns whether the current request presents a key that is not accepted. Such a request is rejected even on routes
/// that need no key.
pub fn has_wrong_key() -> bool {
    CONTEXT.try_with(|context| context.has_wrong_key).unwrap_or(false)
}

/// Returns the identity of the caller, for the audit log.
pub fn actor() -> String {
    CONTEXT.try_with(|context| context.actor().to_owned()).unwrap_or_else(|_| "unknown".into())
}

/// Returns the key that a request presents. An `Authorization` of another scheme is ignored, because it is for a proxy.
fn presented_key(headers: &HeaderMap) -> Option<&str> {
    let text = |name: &HeaderName| headers.get(name).map(|value| value.to_str().unwrap_or(""));
    let bearer = |value: &'_ str| value.get(..7).is_some_and(|scheme| scheme.eq_ignore_ascii_case("bearer "));
    text(&API_KEY).or(text(&AUTHORIZATION).filter(|value| bearer(value)).map(|value| value[7..].trim()))
}

/// Finds out who is calling. A header that names a caller or its address counts only from a trusted proxy.
fn identify(api: &Api, request: &Request) -> Caller {
    let headers = request.headers();
    let peer = request.extensions().get::<ConnectInfo<SocketAddr>>().map(|ConnectInfo(peer)| peer.ip());
    let header = |name: &Option<String>| name.as_ref().and_then(|name| headers.get(name)?.to_str().ok());
    let presented = Credentials {
        peer,
        key: presented_key(headers),
        person: header(&api.policy.trusted_header),
        groups: header(&api.policy.trusted_groups_header),
    };
    let forwarded = headers.get_all(FORWARDED_FOR).iter().map(|value| value.to_str().unwrap_or(""));
    Caller {
        address: api.policy.client_address(peer, forwarded),
        access: api.authenticate(presented, Timestamp::now()),
    }
}

/// Runs a request in its context and adds the standard headers to the response.
pub async fn with_context(State(api): State<Api>, request: Request, next: Next) -> Response {
    let started = Instant::now();
    let generated = Uuid::now_v7();
    let tracer = api.engine.tracer.as_deref();
    let caller = identify(&api, &request);
    let context = Arc::new(RequestContext {
        request_id: valid_id(request.headers(), &REQUEST_ID).unwrap_or_else(|| generated.to_string()),
        correlation: match valid_id(request.headers(), &CORRELATION_ID) {
            Some(text) => Correlation::Given(text),
            None => Correlation::Generated(generated),
        },
        has_wrong_key: caller.access.is_err() && presented_key(request.headers()).is_some(),
        caller,
        trace: RequestTrace::new(tracer, request.headers(), generated),
    });
    let span = tracing::debug_span!(
        "request",
        method = %request.method(),
        path = request.uri().path(),
        request_id = context.request_id,
        correlation_id = context.correlation.text(),
        trace_id = context.trace.id(),
    );
    let traced = context.trace.describe(tracer, &request);
    let log = AccessLog::new(&api, &request);
    let mut response = CONTEXT.scope(context.clone(), next.run(request)).instrument(span.clone()).await;
    // A caller without access cannot fill the queue of spans.
    if let (Some(tracer), Some(traced), Ok(_)) = (tracer, traced, &context.caller.access) {
        context.trace.finish(tracer, traced, &context.request_id, &response);
    }
    // Rounded to two decimals.
    let took_ms = (started.elapsed().as_secs_f64() * 100_000.0).round() / 100.0;
    let headers = response.headers_mut();
    let mut insert = |name: HeaderName, text: &str| {
        if let Ok(value) = HeaderValue::from_str(text) {
            headers.insert(name, value);
        }
    };
    insert(REQUEST_ID, &context.request_id);
    insert(RESPONSE_TIME, &format!("{took_ms:.2}ms"));
    insert(CORRELATION_ID, &context.correlation.text());
    match log {
        Some(log) => span.in_scope(|| log.attach(response, &context, started)),
        None => response,
    }
}

/// Returns the id that the caller sent in header `name`, if it can be stored and logged.
fn valid_id(headers: &HeaderMap, name: &HeaderName) -> Option<String> {
    let text = headers.get(name)?.to_str().ok()?;
    let is_valid = !text.is_empty() && text.len() <= 255 && !text.chars().any(char::is_control);
    is_valid.then(|| text.to_owned())
}
