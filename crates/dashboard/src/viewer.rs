//! The viewer of a page: credentials, language, theme, and where the page is.

use std::{convert::Infallible, sync::Arc};

use axum::{
    extract::{FromRef, FromRequestParts},
    http::{Method, header, request::Parts},
};
use faena_domain::Timestamp;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use crate::{
    Dashboard,
    call::Sender,
    error::Failure,
    format::Formats,
    session::{self, Notice},
    texts::{Language, Texts},
};

/// The viewer of the current request. Cheap to clone.
#[derive(Clone)]
pub struct Viewer(Arc<Inner>);

struct Inner {
    dashboard: Dashboard,
    sender: Sender,
    language: Language,
    theme: &'static str,
    notice: Option<Notice>,
    /// Path and query of the page.
    location: String,
    is_fragment: bool,
    is_encrypted: bool,
    /// Name and port under which the browser reached the server.
    host: Option<String>,
    now: Timestamp,
}

impl Viewer {
    pub fn texts(&self) -> &'static Texts {
        self.0.language.texts()
    }

    pub fn language(&self) -> Language {
        self.0.language
    }

    pub fn theme(&self) -> &'static str {
        self.0.theme
    }

    pub fn base(&self) -> &str {
        &self.0.dashboard.config.base_path
    }

    pub fn location(&self) -> &str {
        &self.0.location
    }

    pub fn notice(&self) -> Option<&Notice> {
        self.0.notice.as_ref()
    }

    pub fn sender(&self) -> &Sender {
        &self.0.sender
    }

    /// Returns whether only the changing parts of the page are wanted.
    pub fn is_fragment(&self) -> bool {
        self.0.is_fragment
    }

    /// Returns whether the browser's connection is encrypted, here or at a proxy.
    pub fn is_encrypted(&self) -> bool {
        self.0.is_encrypted
    }

    /// Returns the address of the server as the browser sees it, for commands that a person copies.
    pub fn server_url(&self) -> String {
        let scheme = if self.is_encrypted() { "https" } else { "http" };
        format!("{scheme}://{}{}", self.0.host.as_deref().unwrap_or("127.0.0.1:3000"), self.base())
    }

    pub fn has_session(&self) -> bool {
        self.0.sender.has_key()
    }

    /// Returns the configuration of this server, if the viewer may administer it.
    pub async fn configuration(&self) -> Option<&[(String, String, String)]> {
        self.get::<Value>("/api/v1/api-keys?limit=1").await.ok()?;
        Some(&self.0.dashboard.config.configuration)
    }

    pub fn now(&self) -> Timestamp {
        self.0.now
    }

    /// Returns how times and numbers are written for this viewer.
    pub fn formats(&self) -> Formats {
        Formats { language: self.0.language, now: self.0.now, is_live: self.0.is_fragment }
    }

    /// Reads from the API.
    pub async fn get<T: DeserializeOwned>(&self, path: &str) -> Result<T, Failure> {
        self.0.dashboard.api.get(&self.0.sender, path).await
    }

    /// Changes something through the API.
    pub async fn post(&self, path: &str) -> Result<Value, Failure> {
        self.post_json(path, &json!({})).await
    }

    pub async fn post_json(&self, path: &str, body: &Value) -> Result<Value, Failure> {
        self.0.dashboard.api.send(&self.0.sender, Method::POST, path, body).await
    }

    pub async fn patch(&self, path: &str, body: &Value) -> Result<Value, Failure> {
        self.0.dashboard.api.send(&self.0.sender, Method::PATCH, path, body).await
    }

    pub async fn delete(&self, path: &str) -> Result<Value, Failure> {
        self.0.dashboard.api.send(&self.0.sender, Method::DELETE, path, &json!({})).await
    }
}

impl<S: Send + Sync> FromRequestParts<S> for Viewer
where
    Dashboard: FromRef<S>,
{
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Viewer, Infallible> {
        if let Some(viewer) = parts.extensions.get::<Viewer>() {
            return Ok(viewer.clone());
        }
        let dashboard = Dashboard::from_ref(state);
        let forwarded = parts.headers.get("x-forwarded-proto").is_some_and(|proto| proto == "https");
        let viewer = Viewer(Arc::new(Inner {
            sender: Sender::of(parts),
            language: session::language(&parts.headers),
            theme: session::theme(&parts.headers),
            notice: Notice::of(&parts.headers),
            location: parts.uri.path_and_query().map_or("/", |path| path.as_str()).to_owned(),
            is_fragment: session::is_watching(&parts.headers),
            is_encrypted: forwarded || dashboard.config.has_tls,
            host: host(parts),
            now: Timestamp::now(),
            dashboard,
        }));
        parts.extensions.insert(viewer.clone());
        Ok(viewer)
    }
}

/// Returns the host of a request, unless it has characters that a shell could interpret.
fn host(parts: &Parts) -> Option<String> {
    let header = parts.headers.get(header::HOST).and_then(|host| host.to_str().ok());
    let host = header.or(parts.uri.authority().map(|authority| authority.as_str()))?;
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b".-:[]".contains(&byte);
    (!host.is_empty() && host.bytes().all(is_plain)).then(|| host.to_owned())
}
