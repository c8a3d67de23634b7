//! Serves the style sheet, the script and the icon. Their URLs contain a hash of the content, so that browsers may
//! cache them forever.

use std::sync::LazyLock;

use axum::{
    Router,
    extract::Path,
    http::{HeaderValue, StatusCode, header},
    response::{IntoResponse, Response},
    routing::get,
};
use sha2::{Digest, Sha256};

use crate::Dashboard;

/// A file that the pages load.
pub struct Asset {
    name: &'static str,
    kind: &'static str,
    content: &'static str,
    hash: LazyLock<String, fn() -> String>,
}

const fn asset(name: &'static str, kind: &'static str, content: &'static str, hash: fn() -> String) -> Asset {
    Asset { name, kind, content, hash: LazyLock::new(hash) }
}

const STYLE_TEXT: &str = include_str!("../assets/style.css");
const SCRIPT_TEXT: &str = include_str!("../assets/script.js");
const ICON_TEXT: &str = include_str!("../assets/icon.svg");

pub static STYLE: Asset = asset("style.css", "text/css; charset=utf-8", STYLE_TEXT, || hash(STYLE_TEXT));
pub static SCRIPT: Asset = asset("script.js", "text/javascript; charset=utf-8", SCRIPT_TEXT, || hash(SCRIPT_TEXT));
pub static ICON: Asset = asset("icon.svg", "image/svg+xml", ICON_TEXT, || hash(ICON_TEXT));

fn hash(content: &str) -> String {
    Sha256::digest(content).iter().take(6).map(|byte| format!("{byte:02x}")).collect()
}

impl Asset {
    /// Returns the path below the base path.
    pub fn path(&self) -> String {
        format!("/assets/{}/{}", *self.hash, self.name)
    }
}

pub fn routes() -> Router<Dashboard> {
    Router::new().route("/assets/{hash}/{name}", get(serve)).layer(tower_http::compression::CompressionLayer::new())
}

async fn serve(Path((hash, name)): Path<(String, String)>) -> Response {
    let found = [&STYLE, &SCRIPT, &ICON].into_iter().find(|asset| asset.name == name && *asset.hash == hash);
    let Some(asset) = found else { return StatusCode::NOT_FOUND.into_response() };
    let headers = [
        (header::CONTENT_TYPE, HeaderValue::from_static(asset.kind)),
        (header::CACHE_CONTROL, HeaderValue::from_static("public, max-age=31536000, immutable")),
        (header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff")),
    ];
    (headers, asset.content).into_response()
}
