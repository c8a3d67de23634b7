//! The error that a viewer sees instead of a page.

use axum::http::StatusCode;

/// The failure of a page or an action.
#[derive(Debug)]
pub struct Failure {
    pub status: StatusCode,
    pub message: String,
    /// Fields that the API rejects: their paths, and what is wrong with them. The message says the same.
    pub fields: Vec<(String, String)>,
}

impl Failure {
    pub fn new(status: StatusCode, message: String) -> Failure {
        Failure { status, message, fields: Vec::new() }
    }

    pub fn not_found(message: &str) -> Failure {
        Failure::new(StatusCode::NOT_FOUND, message.to_owned())
    }

    pub fn bad_request(message: impl Into<String>) -> Failure {
        Failure::new(StatusCode::BAD_REQUEST, message.into())
    }

    /// Returns the failure of a form with invalid fields.
    pub fn invalid(fields: Vec<(String, String)>) -> Failure {
        let message: Vec<String> = fields.iter().map(|(path, message)| format!("{path}: {message}")).collect();
        Failure { fields, ..Failure::bad_request(message.join("; ")) }
    }

    /// Returns a failure of this program.
    pub fn internal(error: impl std::fmt::Display) -> Failure {
        Failure::new(StatusCode::INTERNAL_SERVER_ERROR, format!("cannot render the page: {error}"))
    }

    /// Returns whether the viewer has to log in.
    pub fn needs_login(&self) -> bool {
        self.status == StatusCode::UNAUTHORIZED
    }
}
