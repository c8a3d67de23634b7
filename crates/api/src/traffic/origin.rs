//! Rejects requests that a browser sends for a web page of another origin, unless `cors.origins` allows it.
//!
//! While there are no API keys, every program that can connect may do everything, and a browser connects on behalf of
//! any page. The `Origin` header reveals a page of another origin. The `Host` header reveals a page whose own host name
//! resolves to this machine (DNS rebinding); it is checked only if `loopback_only` is set.

use std::net::IpAddr;

use axum::http::{HeaderMap, header};

use faena_domain::ErrorCode;

use super::cors::Allowed;
use crate::{Api, ApiError, ApiResult, context};

/// Fails if a browser may not send this request.
pub fn check(api: &Api, headers: &HeaderMap) -> ApiResult<()> {
    // With keys, a page that reaches this machine under another name has no key to send.
    let loopback_only = api.loopback_only && api.engine.store.api_keys().is_empty();
    match rejection(headers, loopback_only, is_allowed(api, headers)) {
        None => Ok(()),
        Some(message) => Err(ApiError::new(ErrorCode::Forbidden, message)),
    }
}

/// Returns whether a page of another origin may send this request. The route rejects a caller without access itself.
fn is_allowed(api: &Api, headers: &HeaderMap) -> bool {
    match headers.get(header::ORIGIN).and_then(|origin| api.traffic.cors.allows(origin)) {
        None => false,
        Some(Allowed::Listed) => true,
        Some(Allowed::ByKey) => context::access().map_or(true, |access| access.key().is_some()),
    }
}

/// Returns why a request is rejected, or `None` if it is accepted.
fn rejection(headers: &HeaderMap, loopback_only: bool, is_origin_allowed: bool) -> Option<&'static str> {
    let text = |name| headers.get(name).map(|value| value.to_str().unwrap_or(""));
    let host = text(header::HOST);
    if let Some(origin) = text(header::ORIGIN).filter(|_| !is_origin_allowed) {
        let authority = origin.split_once("://").map_or("", |(_, authority)| authority);
        if authority.is_empty() || Some(authority) != host {
            return Some("a web page of another origin must not call this server");
        }
    }
    match host {
        Some(host) if loopback_only && !is_loopback(host) => Some(
            "this server accepts only requests to localhost; use that name, create an API key with \"faena keys create\", or start the server with --insecure-no-auth",
        ),
        _ => None,
    }
}

/// Returns whether the value of a `Host` header, with or without a port, names this machine.
fn is_loopback(host: &str) -> bool {
    let name = match host.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
        Some((address, _)) => address,
        None => host.split(':').next().unwrap_or(""),
    };
    name.eq_ignore_ascii_case("localhost")
        || name.parse::<IpAddr>().is_ok_and(|address| address.to_canonical().is_loopback())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn is_rejected(host: &str, origin: Option<&str>) -> bool {
        let mut headers = HeaderMap::new();
        headers.insert(header::HOST, host.parse().expect("a value"));
        if let Some(origin) = origin {
            headers.insert(header::ORIGIN, origin.parse().expect("a value"));
        }
        rejection(&headers, true, false).is_some()
    }

    #[test]
    fn programs_and_pages_of_this_server_are_accepted() {
        for host in ["localhost:3000", "127.0.0.1:3000", "[::1]:3000", "LOCALHOST", "127.1.2.3"] {
            assert!(!is_rejected(host, None), "{host}");
        }
        assert!(!is_rejected("localhost:3000", Some("http://localhost:3000")));
    }

    #[test]
    fn pages_of_other_origins_are_rejected() {
        assert!(is_rejected("localhost:3000", Some("http://evil.example")));
        assert!(is_rejected("localhost:3000", Some("http://localhost:4000")), "another port is another origin");
        assert!(is_rejected("localhost:3000", Some("null")));
        assert!(is_rejected("evil.example", None), "a name pointed at this machine");
        assert!(is_rejected("evil.example", Some("http://evil.example")));
        assert!(is_rejected("localhost.evil.example", None));
    }
}
