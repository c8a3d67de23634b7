//! Returns to the page an action came from, with a message about its result.

use axum::response::Response;
use serde_json::Value;

use crate::{
    error::Failure,
    session::{self, Notice},
    viewer::Viewer,
};

/// Redirects to a page that shows the result of an action. Fails if the viewer has to log in first.
pub fn show_result(
    viewer: &Viewer,
    page: &str,
    result: Result<Value, Failure>,
    done: &str,
) -> Result<Response, Failure> {
    let notice = match result {
        Ok(_) => Notice { is_error: false, text: done.to_owned() },
        Err(failure) if failure.needs_login() => return Err(failure),
        Err(failure) => Notice { is_error: true, text: failure.message },
    };
    Ok(session::redirect(viewer, page, Some(notice)))
}
