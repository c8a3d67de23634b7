//! The header with which a worker on plain HTTP proves that it is the worker that registered.

use std::convert::Infallible;

use axum::{extract::FromRequestParts, http::request::Parts};
use faena_domain::SecretText;

pub const SESSION_TOKEN: &str = "x-session-token";

/// Session token of a call. `None`: the call has none, or one that is not text.
pub struct SessionToken(pub Option<SecretText>);

impl<S: Sync> FromRequestParts<S> for SessionToken {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<SessionToken, Infallible> {
        let value = parts.headers.get(SESSION_TOKEN).and_then(|value| value.to_str().ok());
        Ok(SessionToken(value.map(|text| SecretText::from(text.to_owned()))))
    }
}
