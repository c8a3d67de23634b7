//! Turns errors into responses. This is the only place that maps errors to codes; a code determines its HTTP status.

use axum::{
    Json,
    http::{
        HeaderValue, StatusCode, Uri,
        header::{ACCEPT, ACCEPT_ENCODING, CONNECTION, RETRY_AFTER, WWW_AUTHENTICATE},
    },
    response::{IntoResponse, Response},
};
use faena_auth::AccessError;
use faena_domain::{ErrorCode, FieldError, JobId, parse::ParseError};
use faena_engine::{EngineError, workers::Rejection};
use faena_store::StoreError;
use faena_wire::{ErrorBody, ErrorInfo};

pub type ApiResult<T> = Result<T, ApiError>;

/// Error as the caller sees it, without internal details, which are only logged.
#[derive(Debug)]
pub struct ApiError {
    pub code: ErrorCode,
    pub message: String,
    /// Every bad field, or the id of the job or task that a conflict is about.
    pub details: Vec<FieldError>,
    /// When the caller should try again.
    pub retry_after_seconds: Option<u64>,
}

impl ApiError {
    pub fn new(code: ErrorCode, message: impl Into<String>) -> ApiError {
        // An outage may last longer, but the caller loses nothing by trying again early.
        let retry_after_seconds = (code == ErrorCode::Unavailable).then_some(1);
        ApiError { code, message: message.into(), details: Vec::new(), retry_after_seconds }
    }

    /// Reports fields that are not valid.
    pub fn invalid(details: Vec<FieldError>) -> ApiError {
        let message = match details.as_slice() {
            [error] => error.to_string(),
            errors => format!("{} fields are not valid", errors.len()),
        };
        ApiError { details, ..ApiError::new(ErrorCode::ValidationError, message) }
    }

    /// Reports one field that is not valid.
    pub fn invalid_field(path: &str, message: impl Into<String>) -> ApiError {
        ApiError::invalid(vec![FieldError::new(path, message)])
    }

    pub fn too_large(max_bytes: usize) -> ApiError {
        ApiError::new(ErrorCode::PayloadTooLarge, format!("the body is larger than {max_bytes} bytes"))
    }

    pub fn not_found(message: impl Into<String>) -> ApiError {
        ApiError::new(ErrorCode::NotFound, message)
    }

    /// Logs an error that the caller cannot act on, and returns one that hides its text.
    pub(crate) fn internal(error: &str) -> ApiError {
        tracing::error!(error, "request failed");
        ApiError::new(ErrorCode::InternalError, "internal error; search the server's log for this request id")
    }

    /// Names the existing job that the request conflicts with, if the caller may see it.
    pub fn with_existing_job(mut self, existing_job: Option<JobId>) -> ApiError {
        if let Some(id) = existing_job {
            self.message = format!("{}: job {id}", self.message);
            self.details.push(FieldError::new("id", id.to_string()));
        }
        self
    }

    pub fn status(&self) -> StatusCode {
        StatusCode::from_u16(self.code.http_status()).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR)
    }
}

impl From<ParseError> for ApiError {
    fn from(error: ParseError) -> ApiError {
        match error {
            ParseError::TooLarge { max_bytes } => ApiError::too_large(max_bytes),
            ParseError::Invalid(errors) => ApiError::invalid(errors),
        }
    }
}

impl From<AccessError> for ApiError {
    fn from(error: AccessError) -> ApiError {
        match error {
            AccessError::Unauthorized(message) => ApiError::new(ErrorCode::Unauthorized, message),
            AccessError::Forbidden(message) => ApiError::new(ErrorCode::Forbidden, message),
        }
    }
}

impl From<StoreError> for ApiError {
    fn from(error: StoreError) -> ApiError {
        let message = error.to_string();
        match error {
            StoreError::NotFound(_) => ApiError::not_found(message),
            StoreError::InvalidTransition { .. } => ApiError::new(ErrorCode::InvalidTransition, message),
            StoreError::Conflict { existing_job, .. } => {
                // The job may belong to a queue that a restricted caller may not see.
                let shown = existing_job.filter(|_| crate::access::is_unrestricted());
                ApiError::new(ErrorCode::Conflict, message).with_existing_job(shown)
            }
            StoreError::WorkerActive { .. } => ApiError::new(ErrorCode::Conflict, message),
            StoreError::Invalid(errors) => ApiError::invalid(errors),
            StoreError::Unavailable(cause) | StoreError::Contended(cause) => {
                let reason = cause.public_reason().unwrap_or("the database is not available; try again");
                ApiError::new(ErrorCode::Unavailable, reason)
            }
            StoreError::Setup(_) | StoreError::Internal(_) => ApiError::internal(&message),
        }
    }
}

impl From<EngineError> for ApiError {
    fn from(error: EngineError) -> ApiError {
        match error {
            EngineError::Store(error) => error.into(),
            EngineError::InvalidRegistration(errors) => ApiError::invalid(errors),
            error @ EngineError::WorkerActive { .. } => ApiError::new(ErrorCode::Conflict, error.to_string()),
            error @ EngineError::SessionTokenMissing(_) => ApiError::new(ErrorCode::Unauthorized, error.to_string()),
            error @ EngineError::WrongSessionToken(_) => ApiError::new(ErrorCode::Forbidden, error.to_string()),
            error @ (EngineError::Stopping | EngineError::LeaseLost) => {
                ApiError::new(ErrorCode::Unavailable, error.to_string())
            }
            EngineError::Queue(_) => {
                ApiError::new(ErrorCode::Unavailable, "the queue in Redis is not available; try again")
            }
            error @ EngineError::BulkNotFound(_) => ApiError::not_found(error.to_string()),
            error @ (EngineError::InvalidSource { .. } | EngineError::UnknownLoop(_) | EngineError::Panicked(_)) => {
                ApiError::internal(&error.to_string())
            }
        }
    }
}

impl From<Rejection> for ApiError {
    fn from(rejection: Rejection) -> ApiError {
        ApiError::new(rejection.code, rejection.message)
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let status = self.status();
        let body = ErrorBody {
            error: ErrorInfo {
                code: self.code.as_str().into(),
                message: self.message,
                details: self.details,
                request_id: crate::context::request_id(),
            },
        };
        let mut response = (status, Json(body)).into_response();
        if status == StatusCode::PAYLOAD_TOO_LARGE {
            // The rest of the body stays unread, so the connection cannot be used for another request.
            response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
        }
        if status == StatusCode::UNAUTHORIZED {
            response.headers_mut().insert(WWW_AUTHENTICATE, HeaderValue::from_static("Bearer realm=\"faena\""));
        }
        if status == StatusCode::UNSUPPORTED_MEDIA_TYPE {
            response.headers_mut().insert(ACCEPT, HeaderValue::from_static("application/json"));
            response.headers_mut().insert(ACCEPT_ENCODING, HeaderValue::from_static("gzip"));
        }
        if let Some(seconds) = self.retry_after_seconds {
            response.headers_mut().insert(RETRY_AFTER, HeaderValue::from(seconds));
        }
        response
    }
}

pub async fn not_found(uri: Uri) -> ApiError {
    ApiError::not_found(format!("no resource at \"{}\"", uri.path()))
}

pub async fn method_not_allowed() -> ApiError {
    ApiError::new(ErrorCode::MethodNotAllowed, "this resource does not accept this method")
}
