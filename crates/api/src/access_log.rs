//! The access log: one line per request, when its response has been sent.
//!
//! The line is written when the body of the response is dropped, so that it has the bytes and the duration of a stream too.
//! It names the caller's key and never contains the key, a query string or a body.

use std::{
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
    time::Instant,
};

use axum::{
    body::{Body, Bytes, HttpBody},
    extract::{MatchedPath, Request},
    http::{HeaderMap, Method, StatusCode},
    response::Response,
};
use http_body::{Frame, SizeHint};

use crate::{Api, context::RequestContext};

const GRPC_STATUS: &str = "grpc-status";

/// What the line says about a request.
pub struct AccessLog {
    is_info: bool,
    method: Method,
    /// The path as it was declared, such as `/api/v1/jobs/{id}`.
    route: Option<MatchedPath>,
    path: String,
}

impl AccessLog {
    /// Returns `None` if the line would not be written.
    pub fn new(api: &Api, request: &Request) -> Option<AccessLog> {
        let path = request.uri().path();
        let is_info = api.access_log && !path.starts_with("/health") && path != "/metrics";
        (is_info || tracing::enabled!(tracing::Level::DEBUG)).then(|| AccessLog {
            is_info,
            method: request.method().clone(),
            route: request.extensions().get::<MatchedPath>().cloned(),
            path: path.to_owned(),
        })
    }

    /// Returns the response with a body that writes the line at its end.
    pub fn attach(self, response: Response, context: &Arc<RequestContext>, started: Instant) -> Response {
        let (parts, body) = response.into_parts();
        let line = Line {
            request: self,
            context: context.clone(),
            started,
            status: parts.status,
            grpc_status: grpc_status(&parts.headers),
            bytes: 0,
        };
        Response::from_parts(parts, Body::new(LoggedBody { body, line }))
    }
}

fn grpc_status(headers: &HeaderMap) -> Option<String> {
    headers.get(GRPC_STATUS)?.to_str().ok().map(str::to_owned)
}

/// The line of one request. Dropping it writes it.
struct Line {
    request: AccessLog,
    context: Arc<RequestContext>,
    started: Instant,
    status: StatusCode,
    grpc_status: Option<String>,
    bytes: u64,
}

impl Drop for Line {
    fn drop(&mut self) {
        let Line { request, context, .. } = self;
        // Rounded to two decimals.
        let duration_ms = (self.started.elapsed().as_secs_f64() * 100_000.0).round() / 100.0;
        macro_rules! write {
            ($level:ident) => {
                // Outside the span of the request, which has some of these fields too.
                tracing::$level!(
                    parent: None,
                    method = request.method.as_str(),
                    route = request.route.as_ref().map(MatchedPath::as_str),
                    path = request.path,
                    status = self.status.as_u16(),
                    grpc_status = self.grpc_status,
                    duration_ms,
                    bytes = self.bytes,
                    client = context.caller.address.map(|address| address.to_string()),
                    caller = context.actor(),
                    request_id = context.request_id,
                    correlation_id = context.correlation.text(),
                    "request handled"
                )
            };
        }
        if request.is_info {
            write!(info);
        } else {
            write!(debug);
        }
    }
}

/// A body that counts its bytes.
struct LoggedBody {
    body: Body,
    line: Line,
}

impl HttpBody for LoggedBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let frame = ready!(Pin::new(&mut self.body).poll_frame(cx));
        if let Some(Ok(frame)) = &frame {
            if let Some(data) = frame.data_ref() {
                self.line.bytes += data.len() as u64;
            } else if let Some(trailers) = frame.trailers_ref() {
                self.line.grpc_status = grpc_status(trailers);
            }
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
