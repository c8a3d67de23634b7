//! An OpenTelemetry collector: an HTTP server that decodes exports with the types of the specification.

use std::{
    collections::BTreeMap,
    net::TcpListener,
    sync::{Arc, Mutex},
};

use axum::{
    Router,
    body::Bytes,
    extract::State,
    http::{HeaderMap, StatusCode},
    response::IntoResponse,
    routing::post,
};
use opentelemetry_proto::tonic::{
    collector::trace::v1::{ExportTraceServiceRequest, ExportTraceServiceResponse},
    common::v1::{KeyValue, any_value::Value},
    trace::v1::{Span as WireSpan, span::SpanKind, status::StatusCode as SpanStatus},
};
use prost::Message;

use crate::faena::eventually;

/// A received span, with ids in hexadecimal.
#[derive(Clone, Debug)]
pub struct Span {
    pub trace_id: String,
    pub id: String,
    /// Empty for the first span of a trace.
    pub parent: String,
    pub name: String,
    pub kind: SpanKind,
    pub attributes: BTreeMap<String, String>,
    /// Message of the error, if the span failed.
    pub error: Option<String>,
    pub start: u64,
    pub end: u64,
    /// Attributes of the resource.
    pub resource: BTreeMap<String, String>,
}

impl Span {
    pub fn attribute(&self, key: &str) -> &str {
        self.attributes.get(key).map_or("", String::as_str)
    }

    /// Returns the value of `traceparent` for the children of this span.
    pub fn traceparent(&self) -> String {
        format!("00-{}-{}-01", self.trace_id, self.id)
    }
}

#[derive(Default)]
struct Received {
    spans: Vec<Span>,
    headers: Vec<HeaderMap>,
}

pub struct Collector {
    pub url: String,
    received: Arc<Mutex<Received>>,
}

impl Collector {
    pub fn start() -> Collector {
        Collector::start_on(TcpListener::bind("127.0.0.1:0").unwrap())
    }

    pub fn start_on(listener: TcpListener) -> Collector {
        listener.set_nonblocking(true).unwrap();
        let listener = tokio::net::TcpListener::from_std(listener).unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let received: Arc<Mutex<Received>> = Arc::default();
        let router = Router::new().route("/v1/traces", post(receive)).with_state(received.clone());
        tokio::spawn(async move { axum::serve(listener, router).await.unwrap() });
        Collector { url, received }
    }

    pub fn spans(&self) -> Vec<Span> {
        self.received.lock().unwrap().spans.clone()
    }

    pub fn named(&self, name: &str) -> Vec<Span> {
        self.spans().into_iter().filter(|span| span.name == name).collect()
    }

    /// Waits for the only span with this name.
    pub async fn span(&self, name: &str) -> Span {
        let [span] = self.some_spans(name, 1).await.try_into().unwrap();
        span
    }

    /// Waits for spans with this name, oldest first.
    pub async fn some_spans(&self, name: &str, count: usize) -> Vec<Span> {
        let mut found = eventually(&format!("{count} spans {name:?}"), async || {
            Some(self.named(name)).filter(|spans| spans.len() >= count)
        })
        .await;
        assert_eq!(found.len(), count, "{found:#?}");
        found.sort_by_key(|span| span.start);
        found
    }

    pub fn headers(&self) -> Vec<HeaderMap> {
        self.received.lock().unwrap().headers.clone()
    }
}

async fn receive(State(received): State<Arc<Mutex<Received>>>, headers: HeaderMap, body: Bytes) -> impl IntoResponse {
    let content_type = [("content-type", "application/x-protobuf")];
    if headers["content-type"] != content_type[0].1 {
        return (StatusCode::UNSUPPORTED_MEDIA_TYPE, content_type, Vec::new());
    }
    let Ok(request) = ExportTraceServiceRequest::decode(body) else {
        return (StatusCode::BAD_REQUEST, content_type, Vec::new());
    };
    let mut received = received.lock().unwrap();
    received.headers.push(headers);
    for resource_spans in request.resource_spans {
        let resource = texts(resource_spans.resource.unwrap().attributes);
        for scope_spans in resource_spans.scope_spans {
            assert_eq!(scope_spans.scope.unwrap().name, "faena");
            received.spans.extend(scope_spans.spans.into_iter().map(|span| read(span, resource.clone())));
        }
    }
    (StatusCode::OK, content_type, ExportTraceServiceResponse::default().encode_to_vec())
}

fn read(span: WireSpan, resource: BTreeMap<String, String>) -> Span {
    let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    assert_eq!((span.trace_id.len(), span.span_id.len()), (16, 8));
    let kind = span.kind();
    let status = span.status.unwrap_or_default();
    let error = (status.code() == SpanStatus::Error).then_some(status.message);
    Span {
        trace_id: hex(&span.trace_id),
        id: hex(&span.span_id),
        parent: hex(&span.parent_span_id),
        name: span.name,
        kind,
        attributes: texts(span.attributes),
        error,
        start: span.start_time_unix_nano,
        end: span.end_time_unix_nano,
        resource,
    }
}

fn texts(attributes: Vec<KeyValue>) -> BTreeMap<String, String> {
    let text = |attribute: KeyValue| match attribute.value.unwrap().value.unwrap() {
        Value::StringValue(text) => (attribute.key, text),
        Value::IntValue(number) => (attribute.key, number.to_string()),
        other => panic!("{}: {other:?}", attribute.key),
    };
    attributes.into_iter().map(text).collect()
}
