//! The web dashboard: server-rendered HTML at `/`, kept up to date by server-sent events.
//!
//! A page gets its data from the REST API of the same process, with the credentials of its viewer (`call.rs`). So a page can
//! show and do exactly what the API allows its viewer, and there is no second place that decides about access.
//!
//! Every page works without script. The script only keeps a page up to date and adds shortcuts.

mod action;
mod assets;
mod call;
mod charts;
mod content;
mod counts;
mod details;
mod error;
mod findings;
mod form;
mod format;
mod inputs;
mod layout;
mod live;
mod markup;
mod pages;
mod prose;
mod query;
mod reasons;
mod session;
mod table;
mod texts;
mod viewer;
mod visible;
mod words;

use std::sync::Arc;

use axum::{
    Extension, Router,
    body::Body,
    extract::Request,
    http::{HeaderName, HeaderValue, Method, StatusCode, Uri, header},
    middleware::{self, Next},
    response::{IntoResponse, Response},
    routing::get,
};
use tokio_util::sync::CancellationToken;
use tower::{Layer, ServiceExt, util::MapRequestLayer};

use call::InProcess;
use error::Failure;
use viewer::Viewer;

/// Settings of the pages.
#[derive(Clone, Debug, Default)]
pub struct DashboardConfig {
    /// Path below which a reverse proxy serves Faena, such as `/faena`. Empty: none.
    pub base_path: String,
    /// The effective configuration: keys, values without secrets, and where each value comes from.
    pub configuration: Vec<(String, String, String)>,
    /// Whether this server listens with TLS, so that its cookies are never sent in the clear.
    pub has_tls: bool,
}

/// State of the handlers.
#[derive(Clone)]
pub(crate) struct Dashboard(Arc<Shared>);

pub(crate) struct Shared {
    pub config: DashboardConfig,
    pub api: InProcess,
    /// Cancelled when the server stops; ends all streams.
    pub closing: CancellationToken,
    pub viewers: live::Viewers,
}

impl std::ops::Deref for Dashboard {
    type Target = Shared;

    fn deref(&self) -> &Shared {
        &self.0
    }
}

/// Adds the pages to the service of the API, and strips the base path from every request.
pub fn router(config: DashboardConfig, api: Router, closing: CancellationToken) -> Router {
    let base_path = config.base_path.clone();
    let shared = Shared { config, api: InProcess::new(api.clone()), closing, viewers: live::Viewers::default() };
    let dashboard = Dashboard(Arc::new(shared));
    let framed = pages::routes()
        .merge(session::routes())
        .layer(middleware::from_fn_with_state(dashboard.clone(), layout::frame))
        .layer(middleware::from_fn(protect));
    let missing = Router::new()
        .fallback(async |viewer: Viewer| Failure::not_found(viewer.texts().no_such_page))
        .layer(middleware::from_fn_with_state(dashboard.clone(), layout::frame))
        .layer(middleware::from_fn(protect))
        .with_state(dashboard.clone());
    let renderer = live::Renderer(framed.clone().with_state(dashboard.clone()));
    let pages = framed
        .layer(tower_http::compression::CompressionLayer::new())
        .merge(assets::routes())
        .route("/live", get(live::stream).layer(Extension(renderer)))
        .with_state(dashboard)
        .fallback(move |request| api_or_missing_page(api, missing, request));
    if base_path.is_empty() {
        return pages;
    }
    // A layer of a router runs after the route is chosen, so the path is changed before the router sees it.
    let strip = move |request| without_base_path(request, &base_path);
    Router::new().fallback_service(MapRequestLayer::new(strip).layer(pages))
}

/// Passes a request that matches no page to the API. If the API returns 404, a browser gets an error page instead.
async fn api_or_missing_page(api: Router, missing: Router, request: Request) -> Response {
    let accepts_html = |value: &HeaderValue| value.to_str().is_ok_and(|value| value.contains("text/html"));
    let is_browser = request.method() == Method::GET
        && !request.uri().path().starts_with("/api/")
        && request.headers().get(header::ACCEPT).is_some_and(accepts_html);
    let again = is_browser.then(|| {
        let mut again = Request::new(Body::empty());
        *again.uri_mut() = request.uri().clone();
        *again.headers_mut() = request.headers().clone();
        *again.extensions_mut() = request.extensions().clone();
        again
    });
    let Ok(response) = api.oneshot(request).await;
    match again {
        Some(again) if response.status() == StatusCode::NOT_FOUND => missing.oneshot(again).await.into_response(),
        _ => response,
    }
}

/// Removes the base path. A proxy that has removed it already sends requests without it.
fn without_base_path(mut request: Request, base_path: &str) -> Request {
    let uri = request.uri();
    let rest = uri.path().strip_prefix(base_path).filter(|rest| rest.is_empty() || rest.starts_with('/'));
    if let Some(rest) = rest {
        let path = if rest.is_empty() { "/" } else { rest };
        let query = uri.query().map(|query| format!("?{query}")).unwrap_or_default();
        let mut parts = uri.clone().into_parts();
        parts.path_and_query = format!("{path}{query}").parse().ok();
        if let Ok(uri) = Uri::from_parts(parts) {
            *request.uri_mut() = uri;
        }
    }
    request
}

const POLICY: HeaderValue = HeaderValue::from_static(
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; form-action 'self'; \
     base-uri 'none'; frame-ancestors 'none'",
);

/// Adds the security headers: content security policy, no framing, no caching, no referrer to other origins.
async fn protect(request: Request, next: Next) -> Response {
    let mut response = next.run(request).await;
    let headers = response.headers_mut();
    headers.entry(header::CONTENT_SECURITY_POLICY).or_insert(POLICY);
    headers.insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    headers.insert(header::X_FRAME_OPTIONS, HeaderValue::from_static("DENY"));
    headers.insert(header::REFERRER_POLICY, HeaderValue::from_static("same-origin"));
    headers.insert(HeaderName::from_static("cross-origin-opener-policy"), HeaderValue::from_static("same-origin"));
    headers.entry(header::CACHE_CONTROL).or_insert(HeaderValue::from_static("no-store"));
    response
}
