//! Rejects requests that a browser sends for a web page from another origin, unless `cors.origins` allows it.
//!
//! While there are no API keys, every program that can connect may do everything, and a browser connects on behalf of
//! any page. `Origin` and `Sec-Fetch-Site` reveal a page from another origin. The authority of the request reveals a page
//! whose own host name resolves to this machine (DNS rebinding); it is checked only if `loopback_only` is set.

use axum::{
    extract::Request,
    http::{HeaderMap, HeaderName, HeaderValue, Method, header},
};
use faena_domain::ErrorCode;

use super::{
    authority::{self, Authority},
    cors::Allowed,
};
use crate::{Api, ApiError, ApiResult, context};

const SEC_FETCH_SITE: HeaderName = HeaderName::from_static("sec-fetch-site");
const SEC_FETCH_MODE: HeaderName = HeaderName::from_static("sec-fetch-mode");

const OTHER_ORIGIN: &str = "a web page from another origin may not call this server; allow it with cors.origins";
const NOT_LOCAL: &str = "this server accepts only requests to localhost; use that name, create an API key with \"faena keys create\", or start the server with --insecure-no-auth";

/// Fails if the request names no valid host, or a browser may not send it.
pub fn check(api: &Api, request: &Request) -> ApiResult<()> {
    let forbidden = |message: &str| Err(ApiError::new(ErrorCode::Forbidden, message));
    let authority = match authority::of_request(request.uri(), request.version(), request.headers()) {
        Ok(authority) => authority,
        // A request inside this process is sent to no host.
        Err(_) if context::caller().address.is_none() && !has_authority(request) => None,
        Err(message) => return Err(ApiError::new(ErrorCode::ValidationError, message)),
    };
    if comes_from_another_page(api, request, authority.as_ref()) {
        return forbidden(OTHER_ORIGIN);
    }
    // With keys, a page that reaches this machine under another name has no key to send.
    let loopback_only = api.loopback_only && api.engine.store.api_keys().is_empty();
    let is_local = match &authority {
        Some(authority) => authority.is_loopback(),
        None => context::caller().address.is_none(),
    };
    if loopback_only && !is_local { forbidden(NOT_LOCAL) } else { Ok(()) }
}

fn has_authority(request: &Request) -> bool {
    request.uri().authority().is_some() || request.headers().contains_key(header::HOST)
}

/// Returns whether a browser sends the request for a page that may not call this server.
fn comes_from_another_page(api: &Api, request: &Request, authority: Option<&Authority>) -> bool {
    let headers = request.headers();
    match only(headers, &header::ORIGIN) {
        Err(Several) => return true,
        Ok(Some(origin)) if is_allowed(api, origin) => return false,
        Ok(Some(origin)) => {
            let origin = origin.to_str().ok().and_then(Authority::parse_origin);
            let is_own =
                origin.is_some_and(|origin| authority.is_some_and(|authority| authority.is_of_origin(&origin)));
            if !is_own {
                return true;
            }
        }
        Ok(None) => {}
    }
    match only(headers, &SEC_FETCH_SITE) {
        Err(Several) => true,
        Ok(None) => false,
        Ok(Some(site)) => site != "same-origin" && site != "none" && !is_navigation(request),
    }
}

/// Returns whether a person follows a link to this server. The page with the link cannot read the answer.
fn is_navigation(request: &Request) -> bool {
    let mode = only(request.headers(), &SEC_FETCH_MODE);
    matches!(*request.method(), Method::GET | Method::HEAD)
        && mode.is_ok_and(|mode| mode.is_some_and(|mode| mode == "navigate"))
}

/// Returns whether a page from another origin may send this request. The route itself rejects a caller without access.
fn is_allowed(api: &Api, origin: &HeaderValue) -> bool {
    match api.traffic.cors.allows(origin) {
        None => false,
        Some(Allowed::Listed) => true,
        Some(Allowed::ByKey) => context::access().map_or(true, |access| access.key().is_some()),
    }
}

/// A header that may occur once occurs several times.
struct Several;

/// Returns the value of a header that may occur only once.
fn only<'a>(headers: &'a HeaderMap, name: &HeaderName) -> Result<Option<&'a HeaderValue>, Several> {
    let mut values = headers.get_all(name).iter();
    match (values.next(), values.next()) {
        (_, Some(_)) => Err(Several),
        (value, None) => Ok(value),
    }
}
