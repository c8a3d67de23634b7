//! Trace context of a request: where its jobs belong in a distributed trace, and the span of the request itself.
//!
//! Without a collector, the jobs of a request continue the trace of the caller. With a collector, the span of the
//! request is their parent. A request that submits nothing has a span only if its caller sent a trace context.

use std::sync::atomic::{AtomicBool, Ordering};

use axum::{
    extract::{MatchedPath, Request},
    http::{HeaderMap, HeaderName, Method, header::CONTENT_TYPE},
    response::Response,
};
use faena_domain::JobId;
use faena_engine::traces::{Span, SpanKind, TraceContext, Tracer};
use uuid::Uuid;

const TRACEPARENT: HeaderName = HeaderName::from_static("traceparent");
const GRPC_STATUS: HeaderName = HeaderName::from_static("grpc-status");
/// Statuses of gRPC that are errors of the server: unknown, deadline exceeded, unimplemented, internal, unavailable, data loss.
const GRPC_SERVER_ERRORS: [i64; 6] = [2, 4, 12, 13, 14, 15];

#[derive(Debug)]
pub struct RequestTrace {
    /// Context that the caller sent, if it is valid.
    parent: Option<TraceContext>,
    /// Context of this request: the parent of the jobs that it submits.
    own: Option<TraceContext>,
    has_submitted: AtomicBool,
}

/// The attributes of the span of a request.
pub struct Description {
    method: Method,
    route: String,
    is_grpc: bool,
    started_at: u64,
}

impl RequestTrace {
    /// Reads the trace context of a request, or begins a trace with the id of the request.
    pub fn new(tracer: Option<&Tracer>, headers: &HeaderMap, id: Uuid) -> RequestTrace {
        let parent = parent(headers);
        let own = match (tracer, parent) {
            (None, parent) => parent,
            (Some(_), Some(parent)) => Some(parent.with_span(span_id(id))),
            (Some(tracer), None) => Some(tracer.begin(id)),
        };
        RequestTrace { parent, own, has_submitted: AtomicBool::new(false) }
    }

    /// Returns the trace id for the log.
    pub fn id(&self) -> Option<String> {
        self.own.map(|own| format!("{:032x}", u128::from_be_bytes(own.trace_id)))
    }

    /// Returns the trace context of a job that this request submits.
    pub fn traceparent_of(&self, job: JobId) -> Option<String> {
        self.has_submitted.store(true, Ordering::Relaxed);
        let own = self.own?;
        // A job without a stored context has its own id as trace id and is not recorded. If this context says the same,
        // it is not stored, which makes the row shorter.
        let is_implied_by_id = self.parent.is_none() && !own.is_sampled() && own.trace_id == *job.0.as_bytes();
        (!is_implied_by_id).then(|| own.to_string())
    }

    /// Returns the attributes of the span, if the trace is recorded.
    pub fn describe(&self, tracer: Option<&Tracer>, request: &Request) -> Option<Description> {
        tracer?;
        self.own.filter(|own| own.is_sampled())?;
        let content_type = request.headers().get(CONTENT_TYPE).map(|value| value.as_bytes());
        let is_grpc = content_type.is_some_and(|value| value.starts_with(b"application/grpc"));
        // The path of a gRPC call names its method. Other paths contain ids.
        let route = match request.extensions().get::<MatchedPath>() {
            Some(_) if is_grpc => request.uri().path(),
            Some(route) => route.as_str(),
            None => "",
        };
        Some(Description {
            method: request.method().clone(),
            route: route.to_owned(),
            is_grpc,
            started_at: nanoseconds_now(),
        })
    }

    /// Exports the span of the request.
    pub fn finish(&self, tracer: &Tracer, request: Description, request_id: &str, response: &Response) {
        let Some(own) = self.own else { return };
        if self.parent.is_none() && !self.has_submitted.load(Ordering::Relaxed) {
            return;
        }
        let name = format!("{} {}", request.method, request.route);
        let period = (request.started_at, nanoseconds_now());
        let status = response.status();
        let parent = self.parent.map(|parent| parent.span_id);
        let span = Span::new(own, parent, SpanKind::Server, name.trim_end(), period)
            .text("http.request.method", request.method.as_str())
            .text("http.route", &request.route)
            .number("http.response.status_code", i64::from(status.as_u16()))
            .text("faena.request.id", request_id);
        let span = if request.is_grpc { span.text("rpc.system", "grpc") } else { span };
        let grpc_status =
            response.headers().get(GRPC_STATUS).and_then(|value| value.to_str().ok()?.parse::<i64>().ok());
        tracer.record(match grpc_status {
            _ if status.is_server_error() => span.failed(status.as_str(), ""),
            Some(code) if GRPC_SERVER_ERRORS.contains(&code) => {
                span.number("rpc.grpc.status_code", code).failed(&code.to_string(), "")
            }
            Some(code) => span.number("rpc.grpc.status_code", code),
            None => span,
        });
    }
}

/// Returns the trace context that the caller sent. `None` if the header is invalid or occurs more than once.
fn parent(headers: &HeaderMap) -> Option<TraceContext> {
    let mut values = headers.get_all(TRACEPARENT).iter();
    let value = values.next()?;
    values.next().is_none().then(|| TraceContext::parse(value.to_str().ok()?)).flatten()
}

/// Returns the id of the request's span: the random half of the request's id.
fn span_id(id: Uuid) -> [u8; 8] {
    (id.as_u128() as u64).to_be_bytes()
}

fn nanoseconds_now() -> u64 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    const TRACE: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";

    fn headers(values: &[&str]) -> HeaderMap {
        values.iter().map(|value| (TRACEPARENT, value.parse().expect("a header"))).collect()
    }

    #[test]
    fn without_a_collector_a_job_continues_the_trace_of_the_caller() {
        let job = JobId::new();
        let trace = |values: &[&str]| RequestTrace::new(None, &headers(values), job.0).traceparent_of(job);
        assert_eq!(trace(&[TRACE]).as_deref(), Some(TRACE));
        assert_eq!(trace(&[]), None);
        assert_eq!(trace(&["00-not-valid"]), None);
        assert_eq!(trace(&[TRACE, TRACE]), None, "it is ambiguous which of them applies");
    }
}
