//! The only table from errors to status and code.

use axum::{
    Json,
    http::{
        HeaderValue, StatusCode, Uri,
        header::{CONNECTION, RETRY_AFTER},
    },
    response::{IntoResponse, Response},
};
use faena_domain::FieldError;
use faena_engine::workers::Refusal;
use faena_store::StoreError;
use faena_wire::{ErrorBody, ErrorInfo};

#[derive(Debug)]
pub struct ApiError {
    pub status: StatusCode,
    pub code: &'static str,
    pub message: String,
    pub details: Vec<FieldError>,
}

impl ApiError {
    pub fn invalid(details: Vec<FieldError>) -> ApiError {
        let message = match details.as_slice() {
            [one] => format!("{}: {}", one.path, one.message),
            many => format!("{} fields are not valid", many.len()),
        };
        ApiError { status: StatusCode::BAD_REQUEST, code: "VALIDATION_ERROR", message, details }
    }

    pub fn too_large(limit: usize) -> ApiError {
        ApiError {
            status: StatusCode::PAYLOAD_TOO_LARGE,
            code: "PAYLOAD_TOO_LARGE",
            message: format!("the body is larger than {limit} bytes"),
            details: Vec::new(),
        }
    }

    pub fn not_found(message: impl Into<String>) -> ApiError {
        ApiError { status: StatusCode::NOT_FOUND, code: "NOT_FOUND", message: message.into(), details: Vec::new() }
    }
}

impl From<StoreError> for ApiError {
    fn from(error: StoreError) -> ApiError {
        let message = error.to_string();
        let plain = |status, code| ApiError { status, code, message: message.clone(), details: Vec::new() };
        match error {
            StoreError::NotFound(_) => plain(StatusCode::NOT_FOUND, "NOT_FOUND"),
            StoreError::InvalidTransition { .. } => plain(StatusCode::CONFLICT, "INVALID_TRANSITION"),
            StoreError::Conflict { holder, .. } => {
                let details = holder.map(|id| FieldError::new("id", id.to_string())).into_iter().collect();
                ApiError { details, ..plain(StatusCode::CONFLICT, "CONFLICT") }
            }
            StoreError::Invalid(faults) => ApiError::invalid(faults),
            StoreError::Unavailable(_) | StoreError::Contended(_) => ApiError {
                status: StatusCode::SERVICE_UNAVAILABLE,
                code: "UNAVAILABLE",
                message: "the database is not available at the moment; try again".into(),
                details: Vec::new(),
            },
            StoreError::Setup(_) | StoreError::Broken(_) => {
                tracing::error!(error = message, "a request failed");
                ApiError {
                    status: StatusCode::INTERNAL_SERVER_ERROR,
                    code: "INTERNAL_ERROR",
                    message: "something went wrong; the server's log says what, under this request id".into(),
                    details: Vec::new(),
                }
            }
        }
    }
}

impl From<Refusal> for ApiError {
    fn from(refusal: Refusal) -> ApiError {
        let status = match refusal.code {
            "NOT_FOUND" => StatusCode::NOT_FOUND,
            "VALIDATION_ERROR" => StatusCode::BAD_REQUEST,
            "PAYLOAD_TOO_LARGE" => StatusCode::PAYLOAD_TOO_LARGE,
            "UNAVAILABLE" => StatusCode::SERVICE_UNAVAILABLE,
            _ => StatusCode::CONFLICT,
        };
        ApiError { status, code: refusal.code, message: refusal.message, details: Vec::new() }
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let body = ErrorBody {
            error: ErrorInfo {
                code: self.code.into(),
                message: self.message,
                details: self.details,
                request_id: crate::frame::request_id(),
            },
        };
        let mut response = (self.status, Json(body)).into_response();
        if self.status == StatusCode::PAYLOAD_TOO_LARGE {
            // The rest of the body is not read, so nothing can follow it on this connection.
            response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
        }
        if self.status == StatusCode::SERVICE_UNAVAILABLE {
            response.headers_mut().insert(RETRY_AFTER, HeaderValue::from_static("1"));
        }
        response
    }
}

pub async fn not_found(uri: Uri) -> ApiError {
    ApiError::not_found(format!("there is nothing at {}", uri.path()))
}

pub async fn method_not_allowed() -> ApiError {
    ApiError {
        status: StatusCode::METHOD_NOT_ALLOWED,
        code: "METHOD_NOT_ALLOWED",
        message: "this method is not known here".into(),
        details: Vec::new(),
    }
}
