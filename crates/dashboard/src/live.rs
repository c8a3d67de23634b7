//! Keeps open pages up to date.
//!
//! A page opens one stream. The server renders the page again every two seconds, with the viewer's own credentials, and
//! sends it when it differs from what was sent last. Streams of the same page for the same viewer share what was rendered
//! within a second, and different pages share the answers of the API, so many open pages cost little more than one.

use std::{
    collections::HashMap,
    convert::Infallible,
    net::SocketAddr,
    sync::Arc,
    time::{Duration, Instant},
};

use axum::{
    Extension, Router,
    body::Body,
    extract::{ConnectInfo, Query, State},
    http::{HeaderMap, HeaderName, HeaderValue, Request, StatusCode, header, request::Parts},
    response::{
        IntoResponse, Response,
        sse::{Event, KeepAlive, Sse},
    },
};
use futures_util::stream;
use http_body_util::BodyExt;
use parking_lot::Mutex;
use serde::Deserialize;
use sha2::{Digest, Sha256};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio_util::sync::CancellationToken;
use tower::ServiceExt;

use crate::{Dashboard, call::FRESH, session::FRAGMENT};

/// Time between two renderings of an open page.
const PERIOD: Duration = Duration::from_secs(2);
/// Maximum number of open pages that are kept up to date at the same time.
const MAX_VIEWERS: usize = 1_000;

/// The open pages: limits their number, and keeps what was rendered for streams of the same page.
pub struct Viewers {
    permits: Arc<Semaphore>,
    rendered: Mutex<HashMap<[u8; 32], Arc<Rendered>>>,
}

/// When a page was rendered last, and the result. A lock, so that streams that wait for the same page render it once.
type Rendered = tokio::sync::Mutex<Option<(Instant, StatusCode, Arc<str>)>>;

impl Default for Viewers {
    fn default() -> Viewers {
        Viewers { permits: Arc::new(Semaphore::new(MAX_VIEWERS)), rendered: Mutex::default() }
    }
}

impl Viewers {
    /// Returns the place for the page of a viewer. It is kept as long as a stream uses it.
    fn rendered(&self, fingerprint: [u8; 32]) -> Arc<Rendered> {
        let mut rendered = self.rendered.lock();
        rendered.retain(|_, page| Arc::strong_count(page) > 1);
        rendered.entry(fingerprint).or_default().clone()
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
    rendered: Arc<Rendered>,
    last: Option<Arc<str>>,
    _permit: OwnedSemaphorePermit,
}

/// Streams a page: an event `page` whenever it has changed, `login` when its key is no longer valid.
pub async fn stream(
    State(dashboard): State<Dashboard>,
    Extension(Renderer(renderer)): Extension<Renderer>,
    Query(query): Query<LiveQuery>,
    request: Request<Body>,
) -> Response {
    let Ok(permit) = dashboard.viewers.permits.clone().try_acquire_owned() else {
        return (StatusCode::SERVICE_UNAVAILABLE, "too many open pages").into_response();
    };
    if !query.path.starts_with('/') || query.path.starts_with("//") || query.path.starts_with("/live") {
        return (StatusCode::BAD_REQUEST, "path: must be a page of this server").into_response();
    }
    let (parts, _) = request.into_parts();
    let page = PageStream {
        closing: dashboard.closing.clone(),
        renderer,
        rendered: dashboard.viewers.rendered(fingerprint(&parts, &query.path)),
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
                let is_known = self.last.replace("".into()).is_some_and(|last| last.is_empty());
                return (!is_known).then(|| Event::default().event("login").data(""));
            }
            if !body.starts_with('{') || self.last.as_ref() == Some(&body) {
                continue;
            }
            self.last = Some(body.clone());
            return Some(Event::default().event("page").data(&*body));
        }
    }

    /// Returns the page as it was rendered within the last second.
    async fn render(&self) -> Option<(StatusCode, Arc<str>)> {
        let mut rendered = self.rendered.lock().await;
        if let Some((at, status, body)) = &*rendered
            && at.elapsed() < FRESH
        {
            return Some((*status, body.clone()));
        }
        let (status, body) = self.render_now().await?;
        *rendered = Some((Instant::now(), status, body.clone()));
        Some((status, body))
    }

    async fn render_now(&self) -> Option<(StatusCode, Arc<str>)> {
        let mut request = Request::builder().uri(&self.path).body(Body::empty()).ok()?;
        *request.headers_mut() = self.headers();
        if let Some(peer) = self.parts.extensions.get::<ConnectInfo<SocketAddr>>() {
            request.extensions_mut().insert(*peer);
        }
        let Ok(response) = self.renderer.clone().oneshot(request).await;
        let status = response.status();
        let bytes = response.into_body().collect().await.ok()?.to_bytes();
        Some((status, String::from_utf8_lossy(&bytes).into()))
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

/// Headers that differ between the browsers of a viewer, and that no page depends on.
const BROWSER_HEADERS: [HeaderName; 4] =
    [header::USER_AGENT, header::REFERER, header::CACHE_CONTROL, HeaderName::from_static("last-event-id")];

/// Returns what a page depends on: its path, and everything by which the server recognises a viewer.
fn fingerprint(parts: &Parts, path: &str) -> [u8; 32] {
    let mut hash = Sha256::new();
    hash.update(path);
    for (name, value) in parts.headers.iter().filter(|(name, _)| !BROWSER_HEADERS.contains(name)) {
        hash.update([0]);
        hash.update(name.as_str());
        hash.update([1]);
        hash.update(value.as_bytes());
    }
    hash.update([0]);
    hash.update(parts.uri.authority().map(|authority| authority.as_str()).unwrap_or_default());
    let peer = parts.extensions.get::<ConnectInfo<SocketAddr>>();
    hash.update(peer.map(|ConnectInfo(peer)| peer.ip().to_string()).unwrap_or_default());
    hash.finalize().into()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(headers: &[(&str, &str)], path: &str) -> [u8; 32] {
        let mut request = Request::builder().uri("/live");
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        fingerprint(&request.body(()).expect("a request").into_parts().0, path)
    }

    #[test]
    fn only_the_same_viewer_shares_a_page() {
        let ana = [("cookie", "faena_key=ana; faena_language=en"), ("user-agent", "one")];
        assert_eq!(of(&ana, "/"), of(&[ana[0], ("user-agent", "two")], "/"), "another browser of the same viewer");
        for (headers, path) in [
            (vec![("cookie", "faena_key=eva; faena_language=en")], "/"),
            (vec![("cookie", "faena_key=ana; faena_language=es")], "/"),
            (vec![ana[0], ("accept-language", "es")], "/"),
            (vec![ana[0], ("x-forwarded-user", "eva")], "/"),
            (vec![ana[0]], "/jobs"),
        ] {
            assert_ne!(of(&ana, "/"), of(&headers, path), "{headers:?} {path}");
        }
    }

    #[test]
    fn a_page_is_kept_while_a_stream_uses_it() {
        let viewers = Viewers::default();
        let first = viewers.rendered([1; 32]);
        assert!(Arc::ptr_eq(&first, &viewers.rendered([1; 32])));
        let _second = viewers.rendered([2; 32]);
        drop(first);
        let _third = viewers.rendered([3; 32]);
        assert_eq!(viewers.rendered.lock().len(), 2, "a page without a stream is dropped");
    }
}
