//! Rejects requests that a browser sends for a web page of another origin.
//!
//! While there are no API keys, every program that can connect may do everything, and a browser connects on behalf of
//! any page. The `Origin` header reveals a page of another origin. The `Host` header reveals a page whose own host name
//! resolves to this machine (DNS rebinding); it is checked only if `loopback_only` is set.

use std::net::IpAddr;

use axum::{
    extract::{Request, State},
    http::{HeaderMap, header},
    middleware::Next,
    response::{IntoResponse, Response},
};

use faena_domain::ErrorCode;

use crate::{Api, ApiError};

pub async fn guard(State(api): State<Api>, request: Request, next: Next) -> Response {
    match refusal(request.headers(), api.loopback_only) {
        None => next.run(request).await,
        Some(message) => ApiError::new(ErrorCode::Forbidden, message).into_response(),
    }
}

/// Returns why a request is rejected, or `None` if it is accepted.
fn refusal(headers: &HeaderMap, loopback_only: bool) -> Option<&'static str> {
    let text = |name| headers.get(name).map(|value| value.to_str().unwrap_or(""));
    let host = text(header::HOST);
    if let Some(origin) = text(header::ORIGIN) {
        let authority = origin.split_once("://").map_or("", |(_, authority)| authority);
        if authority.is_empty() || Some(authority) != host {
            return Some("a web page of another origin must not call this server");
        }
    }
    match host {
        Some(host) if loopback_only && !is_loopback(host) => Some(
            "this server accepts only requests to localhost; use that name, or start the server with --insecure-no-auth",
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
        refusal(&headers, true).is_some()
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
