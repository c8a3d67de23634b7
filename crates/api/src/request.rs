//! Reads the parts of a request that several handlers share: body, path and query string.

use std::{collections::HashSet, error::Error, io, time::Duration};

use axum::{
    body::{Body, Bytes, HttpBody},
    extract::{FromRequestParts, Path},
    http::{HeaderMap, request::Parts},
};
use faena_domain::{ErrorCode, FieldError, JobId, parse::Fields};
use http_body_util::{BodyExt, LengthLimitError};

use crate::{Api, ApiError, ApiResult, RejectReason, traffic::Charge};

/// Longest time that a caller may take to send a body.
pub const BODY_TIMEOUT: Duration = Duration::from_secs(30);

/// Reads a body of at most `max_body_bytes`.
pub async fn read_body(api: &Api, body: Body) -> ApiResult<Bytes> {
    read_bytes(api, body, api.parser().limits.max_body_bytes).await
}

/// Reads a body of at most `max_bytes`. Fails if it is larger or incomplete, or takes too long.
///
/// The body counts against the budget of bytes in flight until the last clone of the returned `Bytes` is dropped.
pub async fn read_bytes(api: &Api, body: Body, max_bytes: usize) -> ApiResult<Bytes> {
    match tokio::time::timeout(BODY_TIMEOUT, collect(api, body, max_bytes)).await {
        Ok(read) => read,
        Err(_) => {
            let message = format!("the body did not arrive within {} s", BODY_TIMEOUT.as_secs());
            Err(ApiError::new(ErrorCode::RequestTimeout, message))
        }
    }
}

/// Returns the idempotency key of a request, which is in its header or in its body.
pub fn idempotency_key(headers: &HeaderMap, of_body: Option<String>, errors: &mut Vec<FieldError>) -> Option<String> {
    let Some(value) = headers.get("idempotency-key") else { return of_body };
    match value.to_str() {
        Ok(key) if of_body.as_ref().is_some_and(|known| known != key) => {
            let message = "differs from the header Idempotency-Key; set only one of them";
            errors.push(FieldError::new("idempotencyKey", message));
        }
        Ok(key) if (1..=255).contains(&key.len()) && !key.contains(char::is_control) => return Some(key.to_owned()),
        _ => errors.push(FieldError::new("Idempotency-Key", "must have 1 to 255 visible ASCII characters")),
    }
    of_body
}

/// Bytes that count against the budget until they are dropped.
struct Charged {
    bytes: Vec<u8>,
    _charge: Charge,
}

impl AsRef<[u8]> for Charged {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

async fn collect(api: &Api, mut body: Body, max_bytes: usize) -> ApiResult<Bytes> {
    let mut charge = Charge::new(api.traffic.budget());
    let mut bytes = Vec::new();
    while let Some(frame) = body.frame().await {
        let Ok(data) = frame.map_err(|error| unreadable(&error, max_bytes))?.into_data() else { continue };
        let total = bytes.len() + data.len();
        if total > max_bytes {
            return Err(ApiError::too_large(max_bytes));
        }
        charge.cover(total).await.inspect_err(|_| api.traffic.count(RejectReason::Memory))?;
        if bytes.is_empty() && body.is_end_stream() && !charge.is_held() {
            return Ok(data);
        }
        bytes.extend_from_slice(&data);
    }
    Ok(if charge.is_held() { Bytes::from_owner(Charged { bytes, _charge: charge }) } else { bytes.into() })
}

/// Explains why a body could not be read.
fn unreadable(error: &axum::Error, max_bytes: usize) -> ApiError {
    let mut cause = error.source();
    while let Some(current) = cause {
        if current.is::<LengthLimitError>() {
            return ApiError::too_large(max_bytes);
        }
        let io = current.downcast_ref::<io::Error>();
        if io.is_some_and(|error| matches!(error.kind(), io::ErrorKind::InvalidData | io::ErrorKind::InvalidInput)) {
            return ApiError::invalid_field("body", "is not valid gzip");
        }
        // An `io::Error` does not report the error inside it as its source.
        cause = match io.and_then(io::Error::get_ref) {
            Some(inner) => Some(inner as &(dyn Error + 'static)),
            None => current.source(),
        };
    }
    ApiError::invalid_field("body", "is incomplete")
}

/// Splits a body into its fields; an empty body counts as an empty object.
pub fn optional_fields<'a>(api: &Api, body: &'a [u8]) -> ApiResult<Fields<'a>> {
    Ok(api.parser().fields(if body.is_empty() { b"{}" } else { body })?)
}

/// Fails if any field could not be read or is unknown.
pub fn finish(fields: Fields) -> ApiResult<()> {
    check(fields.finish())
}

/// Fails if `errors` is not empty.
pub fn check(errors: Vec<FieldError>) -> ApiResult<()> {
    if errors.is_empty() { Ok(()) } else { Err(ApiError::invalid(errors)) }
}

/// Variable segment of a path. A segment that is not UTF-8 is rejected like any other invalid field.
pub struct Segment(pub String);

impl<S: Send + Sync> FromRequestParts<S> for Segment {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> ApiResult<Segment> {
        match Path::<String>::from_request_parts(parts, state).await {
            Ok(Path(text)) => Ok(Segment(text)),
            Err(_) => Err(ApiError::invalid_field("path", "must be UTF-8")),
        }
    }
}

pub fn parse_job_id(text: &str) -> ApiResult<JobId> {
    text.parse().map_err(|_| ApiError::invalid_field("id", "must be a UUID"))
}

/// Passes each parameter of a query string to `set`, and reports every parameter that `set` rejects.
///
/// A parameter may occur only once, unless it is in `repeatable`. Values with control characters are rejected: no name,
/// tag or key contains one, and PostgreSQL does not accept all of them.
pub fn read_query(
    query: Option<&str>,
    repeatable: &[&str],
    mut set: impl FnMut(&str, String) -> Result<(), String>,
) -> ApiResult<()> {
    let mut errors = Vec::new();
    let mut seen = HashSet::new();
    for (name, value) in query_pairs(query) {
        let result = if !seen.insert(name.clone()) && !repeatable.contains(&name.as_str()) {
            Err("must be given only once".into())
        } else if value.contains(char::is_control) {
            Err(CONTROL_CHARACTERS.into())
        } else {
            set(&name, value)
        };
        errors.extend(result.err().map(|message| FieldError::new(name, message)));
    }
    check(errors)
}

pub const UNKNOWN_PARAMETER: &str = "unknown parameter";
pub const CONTROL_CHARACTERS: &str = "must not contain control characters";

/// Splits a query string into its parameters.
pub fn query_pairs(query: Option<&str>) -> Vec<(String, String)> {
    url::form_urlencoded::parse(query.unwrap_or("").as_bytes()).into_owned().collect()
}

/// Parses a number from 1 to `max`.
pub fn parse_number(value: &str, max: usize) -> Result<usize, String> {
    let number = value.parse().ok().filter(|number| (1..=max).contains(number));
    number.ok_or_else(|| format!("must be a number from 1 to {max}"))
}
