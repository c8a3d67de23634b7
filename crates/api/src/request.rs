//! Reads the parts of a request that several handlers share: body, path and query string.

use std::{error::Error, time::Duration};

use axum::{
    body::{Body, Bytes, to_bytes},
    extract::{FromRequestParts, Path},
    http::request::Parts,
};
use faena_domain::{ErrorCode, JobId};
use http_body_util::LengthLimitError;

use crate::{Api, ApiError, ApiResult};

/// Longest time that a caller may take to send a body.
const BODY_TIMEOUT: Duration = Duration::from_secs(30);

/// Reads a body of the usual size.
pub async fn read_body(api: &Api, body: Body) -> ApiResult<Bytes> {
    read_bytes(body, api.parser().limits.max_body_bytes).await
}

/// Reads a body of at most `max_bytes`. Fails if it is larger, breaks off, or takes too long.
pub async fn read_bytes(body: Body, max_bytes: usize) -> ApiResult<Bytes> {
    match tokio::time::timeout(BODY_TIMEOUT, to_bytes(body, max_bytes)).await {
        Ok(Ok(bytes)) => Ok(bytes),
        Ok(Err(error)) if error.source().is_some_and(|cause| cause.is::<LengthLimitError>()) => {
            Err(ApiError::too_large(max_bytes))
        }
        Ok(Err(_)) => Err(ApiError::invalid_field("body", "is incomplete")),
        Err(_) => {
            let message = format!("the body did not arrive within {} s", BODY_TIMEOUT.as_secs());
            Err(ApiError::new(ErrorCode::RequestTimeout, message))
        }
    }
}

/// Splits a body into its fields; an empty body counts as an empty object.
/// Variable part of a path. One that is not UTF-8 is answered like every other invalid field.
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
