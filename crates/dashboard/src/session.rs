//! Sessions of the dashboard: login with an API key, and the preferences of the browser.
//!
//! The cookie holds the key itself, so a session works on every node, and ends when the key is revoked or expires. Scripts and
//! other sites cannot read it (`HttpOnly`, `SameSite=Strict`).

use askama::Template;
use axum::{
    Router,
    extract::{Query, State},
    http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header},
    response::{IntoResponse, Redirect, Response},
    routing::{get, post},
};
use base64::{Engine, engine::general_purpose::URL_SAFE_NO_PAD as BASE64};
use serde::Deserialize;
use serde_json::Value;

use crate::{
    Dashboard,
    error::Failure,
    form::Form,
    layout::Page,
    texts::{Language, Texts},
    viewer::Viewer,
};

const KEY: &str = "faena_key";
const LANGUAGE: &str = "faena_lang";
const THEME: &str = "faena_theme";
const NOTICE: &str = "faena_notice";
/// Marks the requests with which a live page is rendered again.
pub const FRAGMENT: HeaderName = HeaderName::from_static("x-faena-fragment");

pub fn routes() -> Router<Dashboard> {
    Router::new()
        .route("/login", get(show_login).post(log_in))
        .route("/logout", post(log_out))
        .route("/preferences", post(set_preferences))
}

/// Returns the key of the session.
pub fn key(headers: &HeaderMap) -> Option<&str> {
    cookie(headers, KEY)
}

/// Returns whether the request renders a live page again.
pub fn is_watching(headers: &HeaderMap) -> bool {
    headers.contains_key(FRAGMENT)
}

/// Returns the value of a cookie.
fn cookie<'a>(headers: &'a HeaderMap, name: &str) -> Option<&'a str> {
    let values = headers.get_all(header::COOKIE).iter().filter_map(|value| value.to_str().ok());
    let mut pairs = values.flat_map(|value| value.split(';')).filter_map(|pair| pair.trim().split_once('='));
    pairs.find(|(found, value)| *found == name && !value.is_empty()).map(|(_, value)| value)
}

/// Returns the language of the cookie, or the first language of the browser that Faena supports.
pub fn language(headers: &HeaderMap) -> Language {
    if let Some(language) = cookie(headers, LANGUAGE).and_then(Language::from_code) {
        return language;
    }
    let accepted = headers.get(header::ACCEPT_LANGUAGE).and_then(|value| value.to_str().ok()).unwrap_or("");
    let codes = accepted.split(',').filter_map(|part| part.split([';', '-']).next());
    codes.map(str::trim).find_map(Language::from_code).unwrap_or(Language::English)
}

/// Returns the theme that the viewer chose: `light`, `dark`, or nothing for that of the system.
pub fn theme(headers: &HeaderMap) -> &'static str {
    match cookie(headers, THEME) {
        Some("light") => "light",
        Some("dark") => "dark",
        _ => "",
    }
}

/// What happened to the last action of a viewer, shown once on the next page.
#[derive(Clone, Debug)]
pub struct Notice {
    pub is_error: bool,
    pub text: String,
}

/// Longest notice that fits into a cookie.
const MAX_NOTICE_CHARS: usize = 600;

impl Notice {
    pub fn of(headers: &HeaderMap) -> Option<Notice> {
        let bytes = BASE64.decode(cookie(headers, NOTICE)?).ok()?;
        let text = String::from_utf8(bytes).ok()?;
        let (kind, text) = text.split_at_checked(1)?;
        Some(Notice { is_error: kind == "!", text: text.to_owned() })
    }

    fn encode(&self) -> String {
        let text: String = self.text.chars().take(MAX_NOTICE_CHARS).collect();
        BASE64.encode(format!("{}{text}", if self.is_error { '!' } else { '.' }))
    }
}

/// Returns a redirection that shows a notice on the page it leads to.
pub fn redirect(viewer: &Viewer, to: &str, notice: Option<Notice>) -> Response {
    let mut response = Redirect::to(&format!("{}{}", viewer.base(), local_path(to))).into_response();
    if let Some(notice) = notice {
        set_cookie(viewer, &mut response, NOTICE, &notice.encode(), "HttpOnly; Max-Age=20");
    }
    response
}

/// Deletes the cookie of a notice, in the response that shows the notice.
pub fn forget_notice(viewer: &Viewer, response: &mut Response) {
    set_cookie(viewer, response, NOTICE, "", "HttpOnly; Max-Age=0");
}

/// Returns the path if it leads to a page of this server, otherwise `/`.
fn local_path(path: &str) -> &str {
    let is_local = path.starts_with('/') && !path.starts_with("//") && !path.contains(['\\', '\r', '\n']);
    if is_local { path } else { "/" }
}

fn set_cookie(viewer: &Viewer, response: &mut Response, name: &str, value: &str, attributes: &str) {
    let path = if viewer.base().is_empty() { "/" } else { viewer.base() };
    let secure = if viewer.is_encrypted() { "; Secure" } else { "" };
    let text = format!("{name}={value}; Path={path}; SameSite=Strict; {attributes}{secure}");
    if let Ok(value) = HeaderValue::from_str(&text) {
        response.headers_mut().append(header::SET_COOKIE, value);
    }
}

#[derive(Template)]
#[template(path = "login.html")]
struct LoginPage<'a> {
    t: &'static Texts,
    base: &'a str,
    next: &'a str,
    error: Option<String>,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct LoginQuery {
    next: String,
}

async fn show_login(viewer: Viewer, Query(query): Query<LoginQuery>) -> Result<Page, Failure> {
    login_page(&viewer, &query.next, None)
}

fn login_page(viewer: &Viewer, next: &str, error: Option<String>) -> Result<Page, Failure> {
    let t = viewer.texts();
    let page = Page::new(t.log_in, "", &LoginPage { t, base: viewer.base(), next: local_path(next), error })?;
    Ok(page.without_navigation())
}

#[derive(Deserialize)]
struct LoginForm {
    key: String,
    #[serde(default)]
    next: String,
}

/// Checks a key by reading with it. The API counts wrong keys per address.
async fn log_in(
    State(dashboard): State<Dashboard>,
    viewer: Viewer,
    Form(form): Form<LoginForm>,
) -> Result<Response, Failure> {
    let key = form.key.trim();
    let checked = match viewer.sender().with_key(key) {
        None => Err(Failure::new(StatusCode::UNAUTHORIZED, viewer.texts().key_not_valid.to_owned())),
        Some(sender) => dashboard.api.get::<Value>(&sender, "/api/v1/metrics/overview").await,
    };
    match checked {
        Ok(_) => {
            let mut response = redirect(&viewer, &form.next, None);
            set_cookie(&viewer, &mut response, KEY, key, "HttpOnly");
            Ok(response)
        }
        Err(failure) => {
            let page = login_page(&viewer, &form.next, Some(failure.message))?;
            Ok(page.with_status(failure.status).into_response())
        }
    }
}

async fn log_out(viewer: Viewer) -> Response {
    let mut response = redirect(&viewer, "/login", None);
    set_cookie(&viewer, &mut response, KEY, "", "HttpOnly; Max-Age=0");
    response
}

#[derive(Deserialize)]
struct Preferences {
    language: Option<String>,
    theme: Option<String>,
    #[serde(default)]
    next: String,
}

async fn set_preferences(viewer: Viewer, Form(form): Form<Preferences>) -> Response {
    const YEAR: &str = "Max-Age=31536000";
    let mut response = redirect(&viewer, &form.next, None);
    if let Some(language) = form.language.as_deref().and_then(Language::from_code) {
        set_cookie(&viewer, &mut response, LANGUAGE, language.code(), YEAR);
    }
    match form.theme.as_deref() {
        Some(theme @ ("light" | "dark")) => set_cookie(&viewer, &mut response, THEME, theme, YEAR),
        Some(_) => set_cookie(&viewer, &mut response, THEME, "", "Max-Age=0"),
        None => {}
    }
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(name: HeaderName, value: &str) -> HeaderMap {
        HeaderMap::from_iter([(name, HeaderValue::from_str(value).expect("a value"))])
    }

    #[test]
    fn the_cookie_decides_the_language_before_the_browser() {
        let browser = |value| language(&headers(header::ACCEPT_LANGUAGE, value));
        assert_eq!(browser("es-ES,es;q=0.9,en;q=0.8"), Language::Spanish);
        assert_eq!(browser("fr-FR, es;q=0.5"), Language::Spanish, "the first that Faena supports");
        assert_eq!(browser("de"), Language::English);
        assert_eq!(language(&headers(header::COOKIE, "a=b; faena_lang=es")), Language::Spanish);
    }

    #[test]
    fn a_redirection_never_leaves_this_server() {
        for path in ["//evil.example", "https://evil.example", "/\\evil.example", "", "javascript:alert(1)"] {
            assert_eq!(local_path(path), "/", "{path}");
        }
        assert_eq!(local_path("/jobs?status=FAILED"), "/jobs?status=FAILED");
    }

    #[test]
    fn a_notice_is_read_back_from_its_cookie() {
        let notice = Notice { is_error: true, text: "cola «correo» en pausa; ñ".into() };
        let read =
            Notice::of(&headers(header::COOKIE, &format!("faena_notice={}", notice.encode()))).expect("a notice");
        assert!(read.is_error && read.text == notice.text);
        assert!(Notice::of(&headers(header::COOKIE, "faena_notice=%%%")).is_none());
    }
}
