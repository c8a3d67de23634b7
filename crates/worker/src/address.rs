//! The address of the server and the API key of the caller.

use std::fmt;

use crate::Error;

const DEFAULT_URL: &str = "http://127.0.0.1:3000";

#[derive(Clone)]
pub(crate) struct Address {
    /// Without a trailing slash.
    base: String,
    token: Option<String>,
}

/// Never shows the token, nor a user name or password.
impl fmt::Debug for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.shown())
    }
}

impl Address {
    /// Checks the URL and the token. Without a URL, `FAENA_URL` is used, else the default address.
    pub fn new(url: Option<String>, token: Option<String>) -> Result<Address, Error> {
        let url = url.or_else(|| std::env::var("FAENA_URL").ok()).filter(|url| !url.is_empty());
        let base = url.unwrap_or_else(|| DEFAULT_URL.into()).trim_end_matches('/').to_owned();
        let parsed = reqwest::Url::parse(&base).ok();
        let is_valid = |url: &reqwest::Url| {
            let has_parameters = url.query().is_some() || url.fragment().is_some();
            ["http", "https"].contains(&url.scheme()) && url.has_host() && !has_parameters
        };
        if !parsed.as_ref().is_some_and(is_valid) {
            // What looks like a password or a parameter is not repeated.
            let shown = if base.contains(['@', '?', '#', '=']) { "***" } else { &base };
            return Err(Error::Invalid(format!("not a valid server URL: \"{shown}\"; write it like http://host:port")));
        }
        let token = token.filter(|token| !token.is_empty());
        if token.as_ref().is_some_and(|token| !token.bytes().all(|byte| byte.is_ascii_graphic())) {
            return Err(Error::Invalid("the token must consist of visible ASCII characters".into()));
        }
        Ok(Address { base, token })
    }

    /// Returns the URL to show: without user name and password.
    pub fn shown(&self) -> String {
        match (self.base.split_once("://"), self.base.rsplit_once('@')) {
            (Some((scheme, _)), Some((_, host))) => format!("{scheme}://***@{host}"),
            _ => self.base.clone(),
        }
    }

    pub fn http(&self, path: &str) -> String {
        format!("{}{path}", self.base)
    }

    /// `http://…` → `ws://…`, `https://…` → `wss://…`.
    pub fn websocket(&self, path: &str) -> String {
        format!("ws{}{path}", self.base.strip_prefix("http").unwrap_or(&self.base))
    }

    pub fn token(&self) -> Option<&str> {
        self.token.as_deref()
    }

    pub fn is_loopback(&self) -> bool {
        let host = self.base.split("://").nth(1).unwrap_or("");
        ["127.", "localhost", "[::1]"].iter().any(|local| host.starts_with(local))
    }
}

/// Installs a TLS provider, unless the program has installed its own.
pub(crate) fn ensure_crypto() {
    if rustls::crypto::CryptoProvider::get_default().is_none() {
        let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_address_serves_both_protocols() {
        let address =
            Address::new(Some("https://jobs.example.org/".into()), Some("secret".into())).expect("an address");
        assert_eq!(address.http("/x"), "https://jobs.example.org/x");
        assert_eq!(address.websocket("/x"), "wss://jobs.example.org/x");
        assert!(!format!("{address:?}").contains("secret"));
    }

    #[test]
    fn an_invalid_url_is_rejected() {
        for url in ["localhost:3000", "ftp://host", "http://", "nonsense"] {
            assert!(Address::new(Some(url.into()), None).is_err(), "{url}");
        }
        for url in ["http://host?token=secret", "http://host#secret", "ftp://me:secret@host"] {
            let error = Address::new(Some(url.into()), None).expect_err("not valid");
            assert!(!format!("{error} {error:?}").contains("secret"), "{error}");
        }
        let address = Address::new(Some("http://me:secret@host:3000".into()), None).expect("an address");
        assert_eq!(format!("{address:?}"), "http://***@host:3000");
    }
}
