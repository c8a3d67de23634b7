//! `[auth]`: who may call without an API key.

use faena_auth::Policy;

use super::Config;

impl Config {
    /// Returns how callers without an API key are treated.
    pub fn policy(&self, allow_anonymous: bool) -> Policy {
        let header = |key: &str| Some(self.text(key).to_lowercase()).filter(|header| !header.is_empty());
        Policy {
            allow_anonymous,
            trusted_header: header("auth.trusted_header"),
            trusted_groups_header: header("auth.trusted_groups_header"),
            trusted_proxies: self.networks("server.trusted_proxies"),
            own_token: None,
        }
    }
}
