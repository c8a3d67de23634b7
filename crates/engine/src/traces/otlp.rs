//! The OTLP messages that export spans.
//!
//! They are written by hand instead of taken from a library: Faena creates the span of a job afterwards, from stored
//! times, so the tracers, processors and exporters of the OpenTelemetry SDK would have nothing to do, and a dozen
//! messages replace five crates. A test decodes them with the types of `opentelemetry-proto`. Fields that Faena never
//! sets are left out.

use faena_domain::TraceContext;

#[derive(Clone, PartialEq, prost::Message)]
pub struct ExportRequest {
    #[prost(message, repeated, tag = "1")]
    pub resource_spans: Vec<ResourceSpans>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct ResourceSpans {
    #[prost(message, optional, tag = "1")]
    pub resource: Option<Resource>,
    #[prost(message, repeated, tag = "2")]
    pub scope_spans: Vec<ScopeSpans>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct Resource {
    #[prost(message, repeated, tag = "1")]
    pub attributes: Vec<Attribute>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct ScopeSpans {
    #[prost(message, optional, tag = "1")]
    pub scope: Option<Scope>,
    #[prost(message, repeated, tag = "2")]
    pub spans: Vec<Span>,
}

/// The program that created the spans.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Scope {
    #[prost(string, tag = "1")]
    pub name: String,
    #[prost(string, tag = "2")]
    pub version: String,
}

/// An operation with a start and an end. Created with [`Span::new`].
#[derive(Clone, PartialEq, prost::Message)]
pub struct Span {
    #[prost(bytes = "vec", tag = "1")]
    trace_id: Vec<u8>,
    #[prost(bytes = "vec", tag = "2")]
    span_id: Vec<u8>,
    /// Empty for the first span of a trace.
    #[prost(bytes = "vec", tag = "4")]
    parent_span_id: Vec<u8>,
    #[prost(string, tag = "5")]
    name: String,
    #[prost(enumeration = "SpanKind", tag = "6")]
    kind: i32,
    #[prost(fixed64, tag = "7")]
    start_time_unix_nano: u64,
    #[prost(fixed64, tag = "8")]
    end_time_unix_nano: u64,
    #[prost(message, repeated, tag = "9")]
    attributes: Vec<Attribute>,
    #[prost(message, optional, tag = "15")]
    status: Option<Status>,
    /// The flags of the trace context.
    #[prost(fixed32, tag = "16")]
    flags: u32,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, prost::Enumeration)]
#[repr(i32)]
pub enum SpanKind {
    Unspecified = 0,
    Internal = 1,
    Server = 2,
    Client = 3,
    Producer = 4,
    Consumer = 5,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct Status {
    #[prost(string, tag = "2")]
    message: String,
    /// 2: error.
    #[prost(int32, tag = "3")]
    code: i32,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct Attribute {
    #[prost(string, tag = "1")]
    key: String,
    #[prost(message, optional, tag = "2")]
    value: Option<Value>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct Value {
    #[prost(oneof = "OneValue", tags = "1, 3")]
    value: Option<OneValue>,
}

#[derive(Clone, PartialEq, prost::Oneof)]
pub enum OneValue {
    #[prost(string, tag = "1")]
    Text(String),
    #[prost(int64, tag = "3")]
    Number(i64),
}

/// The answer to an [`ExportRequest`].
#[derive(Clone, PartialEq, prost::Message)]
pub struct ExportResponse {
    #[prost(message, optional, tag = "1")]
    pub partial_success: Option<PartialSuccess>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct PartialSuccess {
    #[prost(int64, tag = "1")]
    pub rejected_spans: i64,
    #[prost(string, tag = "2")]
    pub error_message: String,
}

const ERROR: i32 = 2;
/// Longest text of an attribute or error, in characters.
const MAX_TEXT: usize = 1_024;

impl Attribute {
    pub fn text(key: impl Into<String>, value: &str) -> Attribute {
        let text = match value.char_indices().nth(MAX_TEXT) {
            Some((end, _)) => &value[..end],
            None => value,
        };
        Attribute { key: key.into(), value: Some(Value { value: Some(OneValue::Text(text.to_owned())) }) }
    }

    fn number(key: &str, value: i64) -> Attribute {
        Attribute { key: key.to_owned(), value: Some(Value { value: Some(OneValue::Number(value)) }) }
    }
}

impl Span {
    /// Creates the span that `context` identifies. `period` is its start and end in nanoseconds since 1970.
    pub fn new(
        context: TraceContext,
        parent: Option<[u8; 8]>,
        kind: SpanKind,
        name: impl Into<String>,
        (start, end): (u64, u64),
    ) -> Span {
        Span {
            trace_id: context.trace_id.into(),
            span_id: context.span_id.into(),
            parent_span_id: parent.map(Vec::from).unwrap_or_default(),
            name: name.into(),
            kind: kind.into(),
            start_time_unix_nano: start,
            end_time_unix_nano: end.max(start),
            attributes: Vec::new(),
            status: None,
            flags: context.flags.into(),
        }
    }

    /// Adds an attribute, unless its value is empty.
    pub fn text(mut self, key: &str, value: &str) -> Span {
        if !value.is_empty() {
            self.attributes.push(Attribute::text(key, value));
        }
        self
    }

    pub fn number(mut self, key: &str, value: i64) -> Span {
        self.attributes.push(Attribute::number(key, value));
        self
    }

    /// Marks the span as failed.
    pub fn failed(self, error_type: &str, message: &str) -> Span {
        let message = message.chars().take(MAX_TEXT).collect();
        Span { status: Some(Status { message, code: ERROR }), ..self.text("error.type", error_type) }
    }
}
