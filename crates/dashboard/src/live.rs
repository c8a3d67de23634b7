//! Keeps open pages up to date.
//!
//! A page opens one stream. The server renders the page again every two seconds, with the viewer's own credentials, and
//! sends it when it differs from what was sent last. Pages of the same viewer share the answers of the API within a
//! second, so many open pages cost little more than one.

use std::{convert::Infallible, sync::Arc, time::Duration};

use axum::{
    Extension, Router,
    body::Body,
    extract::{Query, State},
    http::{HeaderMap, HeaderValue, Request, StatusCode, header, request::Parts},
    response::{
        IntoResponse, Response,
        sse::{Event, KeepAlive, Sse},
    },
};
use futures_util::stream;
use http_body_util::BodyExt;
use serde::Deserialize;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio_util::sync::CancellationToken;
use tower::ServiceExt;

use crate::{Dashboard, session::FRAGMENT};

/// Time between two renderings of an open page.
const PERIOD: Duration = Duration::from_secs(2);
/// Maximum number of open pages that are kept up to date at the same time.
const MAX_VIEWERS: usize = 1_000;

/// Limits the number of open pages.
pub struct Viewers(Arc<Semaphore>);

impl Default for Viewers {
    fn default() -> Viewers {
        Viewers(Arc::new(Semaphore::new(MAX_VIEWERS)))
    }
}

/// The service that renders pages.
#[derive(Clone)]
pub struct Renderer(pub Router);

#[derive(Deserialize)]
pub struct LiveQuery {
    path: String,
}

/// State of one stream.
struct PageStream {
    closing: CancellationToken,
    renderer: Router,
    parts: Parts,
    path: String,
    last: Option<String>,
    _permit: OwnedSemaphorePermit,
}

/// Streams a page: an event `page` whenever it has changed, `login` when its key is no longer valid.
pub async fn stream(
    State(dashboard): State<Dashboard>,
    Extension(Renderer(renderer)): Extension<Renderer>,
    Query(query): Query<LiveQuery>,
    request: Request<Body>,
) -> Response {
    let Ok(permit) = dashboard.viewers.0.clone().try_acquire_owned() else {
        return (StatusCode::SERVICE_UNAVAILABLE, "too many open pages").into_response();
    };
    if !query.path.starts_with('/') || query.path.starts_with("//") || query.path.starts_with("/live") {
        return (StatusCode::BAD_REQUEST, "path: must be a page of this server").into_response();
    }
    let (parts, _) = request.into_parts();
    let page = PageStream {
        closing: dashboard.closing.clone(),
        renderer,
        parts,
        path: query.path,
        last: None,
        _permit: permit,
    };
    let events = stream::unfold(page, |mut page| async move {
        let event = page.next().await?;
        Some((Ok::<Event, Infallible>(event), page))
    });
    Sse::new(events).keep_alive(KeepAlive::new().interval(Duration::from_secs(15))).into_response()
}

impl PageStream {
    /// Waits until the page differs from what was sent last. Returns `None` when the stream ends, for example because
    /// the server stops.
    async fn next(&mut self) -> Option<Event> {
        loop {
            tokio::select! {
                () = tokio::time::sleep(PERIOD) => {}
                () = self.closing.cancelled() => return None,
            }
            let (status, body) = self.render().await?;
            if status == StatusCode::UNAUTHORIZED {
                return (self.last.replace(String::new()) != Some(String::new()))
                    .then(|| Event::default().event("login").data(""));
            }
            if !body.starts_with('{') || self.last.as_ref() == Some(&body) {
                continue;
            }
            self.last = Some(body.clone());
            return Some(Event::default().event("page").data(body));
        }
    }

    async fn render(&self) -> Option<(StatusCode, String)> {
        let mut request = Request::builder().uri(&self.path).body(Body::empty()).ok()?;
        *request.headers_mut() = self.headers();
        if let Some(peer) = self.parts.extensions.get::<axum::extract::ConnectInfo<std::net::SocketAddr>>() {
            request.extensions_mut().insert(*peer);
        }
        let Ok(response) = self.renderer.clone().oneshot(request).await;
        let status = response.status();
        let bytes = response.into_body().collect().await.ok()?.to_bytes();
        Some((status, String::from_utf8_lossy(&bytes).into_owned()))
    }

    fn headers(&self) -> HeaderMap {
        let mut headers = self.parts.headers.clone();
        headers.remove(header::ACCEPT_ENCODING);
        headers.insert(FRAGMENT, HeaderValue::from_static("1"));
        if let Some(authority) = self.parts.uri.authority()
            && let Ok(host) = HeaderValue::from_str(authority.as_str())
        {
            headers.entry(header::HOST).or_insert(host);
        }
        headers
    }
}
