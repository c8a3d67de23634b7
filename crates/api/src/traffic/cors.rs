//! Lets web pages from other origins call the API, if the operator lists these origins in `cors.origins`.
//!
//! `*` means every page, so it gives no access by itself: a page from an origin that is not listed must send an API key. A page
//! could otherwise use the rights of the browser it runs in, such as access from loopback or the login at a reverse proxy.

use axum::{
    body::Body,
    extract::Request,
    http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, header},
    response::Response,
};

/// Which web pages from other origins may call the API.
#[derive(Clone, Default, Debug)]
pub struct Cors {
    /// Origins like `https://app.example.com`, or `*`. Empty: no other origin may call the API.
    pub origins: Vec<String>,
    /// Whether a browser may send cookies, which a reverse proxy needs.
    pub credentials: bool,
}

/// What an allowed origin may do.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Allowed {
    /// The operator has listed the origin.
    Listed,
    /// Only `*` includes the origin, so its pages must send an API key.
    ByKey,
}

const METHODS: HeaderValue = HeaderValue::from_static("GET, POST, PATCH, DELETE");
const REQUEST_HEADERS: HeaderValue = HeaderValue::from_static(
    "Authorization, Content-Encoding, Content-Type, Idempotency-Key, Last-Event-ID, Traceparent, Tracestate, X-Api-Key, \
     X-Correlation-Id, X-Request-Id, X-Session-Token",
);
const EXPOSED_HEADERS: HeaderValue = HeaderValue::from_static(
    "Location, RateLimit, RateLimit-Policy, Retry-After, X-Correlation-Id, X-Request-Id, X-Response-Time",
);
/// Seconds for which a browser may remember the answer to a preflight request.
const MAX_AGE: HeaderValue = HeaderValue::from_static("3600");

impl Cors {
    /// Returns what an origin may do, or `None` if it may not call the API.
    pub fn allows(&self, origin: &HeaderValue) -> Option<Allowed> {
        let listed = |name: &str| self.origins.iter().any(|origin| origin == name);
        match origin.to_str() {
            Ok(origin) if listed(origin) => Some(Allowed::Listed),
            _ if listed("*") => Some(Allowed::ByKey),
            _ => None,
        }
    }

    /// Returns the answer to a preflight request from an allowed origin. It needs no key, because a browser sends none.
    pub fn preflight(&self, request: &Request) -> Option<Response> {
        let headers = request.headers();
        let is_preflight =
            request.method() == Method::OPTIONS && headers.contains_key(header::ACCESS_CONTROL_REQUEST_METHOD);
        self.allows(headers.get(header::ORIGIN).filter(|_| is_preflight)?)?;
        let mut response = Response::new(Body::empty());
        *response.status_mut() = StatusCode::NO_CONTENT;
        let answer = response.headers_mut();
        answer.insert(header::ACCESS_CONTROL_ALLOW_METHODS, METHODS);
        answer.insert(header::ACCESS_CONTROL_ALLOW_HEADERS, REQUEST_HEADERS);
        answer.insert(header::ACCESS_CONTROL_MAX_AGE, MAX_AGE);
        Some(response)
    }

    /// Adds the headers that let a page from this origin read the response.
    pub fn decorate(&self, origin: Option<&HeaderValue>, response: &mut HeaderMap) {
        if self.origins.is_empty() {
            return;
        }
        response.append(header::VARY, HeaderValue::from_name(HeaderName::from_static("origin")));
        let Some(origin) = origin.filter(|origin| self.allows(origin).is_some()) else { return };
        response.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, origin.clone());
        response.insert(header::ACCESS_CONTROL_EXPOSE_HEADERS, EXPOSED_HEADERS);
        if self.credentials {
            response.insert(header::ACCESS_CONTROL_ALLOW_CREDENTIALS, HeaderValue::from_static("true"));
        }
    }
}
