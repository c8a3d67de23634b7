//! Checks the type of a request body and decompresses it.
//!
//! A compressed body is decompressed while the handler reads it, so the handler's limit counts decompressed bytes, and
//! a small body that expands to gigabytes is rejected before it fills the memory.

use std::io;

use async_compression::tokio::bufread::GzipDecoder;
use axum::{
    body::{Body, HttpBody},
    extract::Request,
    http::{HeaderMap, HeaderName, header},
};
use futures_util::TryStreamExt;
use http_body_util::{BodyExt, Limited};
use tokio_util::io::{ReaderStream, StreamReader};

use faena_domain::ErrorCode;

use crate::{ApiError, ApiResult};

/// Returns whether a request is a gRPC call, which has its own framing and compression.
pub fn is_grpc(request: &Request) -> bool {
    let path = request.uri().path();
    path.starts_with("/faena.v1.") || path.starts_with("/grpc.")
}

/// Returns the request with a decompressed body. Fails if the body is of a type or encoding that is not accepted.
///
/// `max_bytes` limits the compressed body.
pub fn accept(request: Request, max_bytes: usize) -> ApiResult<Request> {
    if request.body().is_end_stream() || is_grpc(&request) {
        return Ok(request);
    }
    check_type(request.headers())?;
    match text(request.headers(), &header::CONTENT_ENCODING).as_deref() {
        None | Some("identity") => Ok(request),
        Some("gzip" | "x-gzip") => Ok(decompressed(request, max_bytes)),
        Some(other) => {
            let message = format!("Content-Encoding: must be gzip or identity, is {other:?}");
            Err(ApiError::new(ErrorCode::UnsupportedMediaType, message))
        }
    }
}

/// Rejects a type other than JSON. A body without a type counts as JSON, and so does the type of HTML forms, which
/// `curl -d` sends by default.
fn check_type(headers: &HeaderMap) -> ApiResult<()> {
    let Some(value) = text(headers, &header::CONTENT_TYPE) else { return Ok(()) };
    let kind = value.split(';').next().unwrap_or("").trim_end();
    let is_json = kind == "application/json" || (kind.starts_with("application/") && kind.ends_with("+json"));
    if is_json || kind == "application/x-www-form-urlencoded" {
        return Ok(());
    }
    let message = format!("Content-Type: must be application/json, is {kind:?}");
    Err(ApiError::new(ErrorCode::UnsupportedMediaType, message))
}

/// Returns the values of a header in lower case, with non-ASCII bytes escaped.
fn text(headers: &HeaderMap, name: &HeaderName) -> Option<String> {
    let values: Vec<String> = headers
        .get_all(name)
        .iter()
        .map(|value| value.as_bytes().escape_ascii().to_string().trim().to_ascii_lowercase())
        .collect();
    (!values.is_empty()).then(|| values.join(", "))
}

fn decompressed(request: Request, max_bytes: usize) -> Request {
    let (mut parts, body) = request.into_parts();
    parts.headers.remove(header::CONTENT_ENCODING);
    parts.headers.remove(header::CONTENT_LENGTH);
    let compressed = Limited::new(body, max_bytes).into_data_stream().map_err(io::Error::other);
    let mut decoder = GzipDecoder::new(StreamReader::new(compressed));
    decoder.multiple_members(true);
    Request::from_parts(parts, Body::from_stream(ReaderStream::new(decoder)))
}
