//! The OpenAPI document, generated from the declared routes.
//!
//! Each route declares its documentation ([`Operation`]) next to its handler and scope, so a route without
//! documentation does not compile. Schemas of answers derive from the types that the handlers return. Schemas of bodies
//! are written by hand, in `requests` and, for jobs, in `faena_domain::parse::schema`. The tests check every request
//! that they send and its answer against the document.

mod document;
mod example;
pub mod operation;
pub mod operations;
pub mod page;
mod requests;

use std::sync::OnceLock;

use axum::{
    body::Bytes,
    extract::State,
    http::{HeaderName, HeaderValue, header},
    response::{IntoResponse, Response},
};
use faena_domain::JobLimits;
use serde_json::Value;

use crate::Api;

/// Returns the OpenAPI document of this version, with these limits.
pub fn document(limits: &JobLimits) -> Value {
    document::build(&crate::declared_routes().declared(), limits)
}

/// The document and its page, built on the first request: the limits do not change while a server runs.
#[derive(Default)]
pub struct Rendered {
    document: OnceLock<Value>,
    json: OnceLock<Bytes>,
    html: OnceLock<Bytes>,
}

impl Rendered {
    /// Returns the document. It is built once, so `limits` must always be the limits of this server.
    pub fn document(&self, limits: &JobLimits) -> &Value {
        self.document.get_or_init(|| document(limits))
    }
}

pub async fn serve_document(State(api): State<Api>) -> Response {
    let document = || api.documentation().document(&api.parser().limits);
    let render = || serde_json::to_string(document()).expect("a value is JSON").into();
    let json = api.documentation().json.get_or_init(render).clone();
    ([(header::CONTENT_TYPE, "application/json")], json).into_response()
}

/// Headers of the page: it loads its own stylesheet and nothing else, and no page may frame it.
const PAGE_HEADERS: [(HeaderName, HeaderValue); 4] = [
    (header::CONTENT_TYPE, HeaderValue::from_static("text/html; charset=utf-8")),
    (
        header::CONTENT_SECURITY_POLICY,
        HeaderValue::from_static(
            "default-src 'none'; style-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
        ),
    ),
    (header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff")),
    (header::REFERRER_POLICY, HeaderValue::from_static("no-referrer")),
];

pub async fn serve_page(State(api): State<Api>) -> Response {
    let render = || {
        let routes = crate::declared_routes().declared();
        page::render(&routes, api.documentation().document(&api.parser().limits)).into()
    };
    (PAGE_HEADERS, api.documentation().html.get_or_init(render).clone()).into_response()
}

pub async fn serve_style() -> Response {
    let headers = [(header::CONTENT_TYPE, "text/css; charset=utf-8"), (header::CACHE_CONTROL, "max-age=3600")];
    (headers, page::STYLE).into_response()
}
