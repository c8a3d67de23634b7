//! Codes by which callers and workers distinguish errors.

use std::{borrow::Cow, fmt};

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};

/// Code of an error in a response, in an error frame, or in a gRPC status.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum ErrorCode {
    ValidationError,
    Unauthorized,
    Forbidden,
    NotFound,
    MethodNotAllowed,
    RequestTimeout,
    Conflict,
    StaleRun,
    InvalidTransition,
    PayloadTooLarge,
    UnsupportedMediaType,
    HeadersTooLarge,
    RateLimited,
    InternalError,
    Unavailable,
}

impl ErrorCode {
    pub const ALL: [ErrorCode; 15] = [
        ErrorCode::ValidationError,
        ErrorCode::Unauthorized,
        ErrorCode::Forbidden,
        ErrorCode::NotFound,
        ErrorCode::MethodNotAllowed,
        ErrorCode::RequestTimeout,
        ErrorCode::Conflict,
        ErrorCode::StaleRun,
        ErrorCode::InvalidTransition,
        ErrorCode::PayloadTooLarge,
        ErrorCode::UnsupportedMediaType,
        ErrorCode::HeadersTooLarge,
        ErrorCode::RateLimited,
        ErrorCode::InternalError,
        ErrorCode::Unavailable,
    ];

    pub fn as_str(self) -> &'static str {
        match self {
            ErrorCode::ValidationError => "VALIDATION_ERROR",
            ErrorCode::Unauthorized => "UNAUTHORIZED",
            ErrorCode::Forbidden => "FORBIDDEN",
            ErrorCode::NotFound => "NOT_FOUND",
            ErrorCode::MethodNotAllowed => "METHOD_NOT_ALLOWED",
            ErrorCode::RequestTimeout => "REQUEST_TIMEOUT",
            ErrorCode::Conflict => "CONFLICT",
            ErrorCode::StaleRun => "STALE_RUN",
            ErrorCode::InvalidTransition => "INVALID_TRANSITION",
            ErrorCode::PayloadTooLarge => "PAYLOAD_TOO_LARGE",
            ErrorCode::UnsupportedMediaType => "UNSUPPORTED_MEDIA_TYPE",
            ErrorCode::HeadersTooLarge => "HEADERS_TOO_LARGE",
            ErrorCode::RateLimited => "RATE_LIMITED",
            ErrorCode::InternalError => "INTERNAL_ERROR",
            ErrorCode::Unavailable => "UNAVAILABLE",
        }
    }

    /// Returns the HTTP status that a response with this code has.
    pub fn http_status(self) -> u16 {
        match self {
            ErrorCode::ValidationError => 400,
            ErrorCode::Unauthorized => 401,
            ErrorCode::Forbidden => 403,
            ErrorCode::NotFound => 404,
            ErrorCode::MethodNotAllowed => 405,
            ErrorCode::RequestTimeout => 408,
            ErrorCode::Conflict | ErrorCode::StaleRun | ErrorCode::InvalidTransition => 409,
            ErrorCode::PayloadTooLarge => 413,
            ErrorCode::UnsupportedMediaType => 415,
            ErrorCode::RateLimited => 429,
            ErrorCode::HeadersTooLarge => 431,
            ErrorCode::InternalError => 500,
            ErrorCode::Unavailable => 503,
        }
    }

    /// Explains the code in one sentence, for the reference.
    pub fn description(self) -> &'static str {
        match self {
            ErrorCode::ValidationError => {
                "The request is not valid; `details` lists every bad field with its path and message."
            }
            ErrorCode::Unauthorized => "The request carries no valid credentials.",
            ErrorCode::Forbidden => "The caller may not do this, or a web page of another origin sent the request.",
            ErrorCode::NotFound => "The job, worker, schedule or path does not exist, or it has expired.",
            ErrorCode::MethodNotAllowed => "The path exists, but does not accept this method.",
            ErrorCode::RequestTimeout => "The body did not arrive in time.",
            ErrorCode::Conflict => {
                "Another job or task has the unique or idempotency key, another worker has the job, or the worker's id is in use."
            }
            ErrorCode::StaleRun => {
                "The worker reported about a run that has ended: another run has the job, or the job has finished. The report is ignored."
            }
            ErrorCode::InvalidTransition => "The job or message is in a state that does not allow this action.",
            ErrorCode::PayloadTooLarge => "The body or frame is larger than the server accepts.",
            ErrorCode::UnsupportedMediaType => {
                "The body has a type or compression that is not accepted; `Accept` and `Accept-Encoding` of the answer name the accepted ones."
            }
            ErrorCode::HeadersTooLarge => "The path, query and headers of the request are too large or too many.",
            ErrorCode::RateLimited => "The caller sends too many requests; wait for the seconds in `Retry-After`.",
            ErrorCode::InternalError => "The server failed; its log has the reason under the request id.",
            ErrorCode::Unavailable => "The database cannot be reached, or the server is full or stopping; try again.",
        }
    }
}

impl fmt::Display for ErrorCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl JsonSchema for ErrorCode {
    fn schema_name() -> Cow<'static, str> {
        "ErrorCode".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        let lines = ErrorCode::ALL.map(|code| format!("- `{code}` ({}): {}", code.http_status(), code.description()));
        json_schema!({
            "type": "string",
            "enum": ErrorCode::ALL.map(ErrorCode::as_str),
            "description": lines.join("\n"),
        })
    }
}

/// The text is not a code that this version knows.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct UnknownErrorCode;

impl std::str::FromStr for ErrorCode {
    type Err = UnknownErrorCode;

    fn from_str(text: &str) -> Result<ErrorCode, UnknownErrorCode> {
        ErrorCode::ALL.into_iter().find(|code| code.as_str() == text).ok_or(UnknownErrorCode)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_code_is_listed_once_and_read_back_from_its_text() {
        for code in ErrorCode::ALL {
            assert_eq!(code.as_str().parse(), Ok(code));
            assert_eq!(ErrorCode::ALL.iter().filter(|other| **other == code).count(), 1);
        }
        assert_eq!("NO_SUCH_CODE".parse::<ErrorCode>(), Err(UnknownErrorCode));
    }
}
