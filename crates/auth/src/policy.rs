//! Determines the access of a request from its credentials.

use std::{collections::HashMap, net::IpAddr};

use faena_domain::{ApiKeyText, StoredApiKey, Timestamp, parse_groups};
use ipnet::IpNet;

use crate::{Access, AccessError, new_key_text};

/// Settings of the server that decide on callers without a key.
#[derive(Clone, Debug, Default)]
pub struct Policy {
    /// Whether callers without a key have full access (`--insecure-no-auth`). A wrong key is rejected all the same.
    pub allow_anonymous: bool,
    /// Header in which a reverse proxy names the person it has authenticated.
    pub trusted_header: Option<String>,
    /// Header in which a reverse proxy names the groups of that person, separated by commas.
    pub trusted_groups_header: Option<String>,
    /// Addresses of reverse proxies whose headers are trusted.
    pub trusted_proxies: Vec<IpNet>,
    /// Token of the worker processes that this server starts. It is created on startup and never stored.
    pub own_token: Option<OwnToken>,
}

/// A secret that only this process and its worker processes know.
#[derive(Clone)]
pub struct OwnToken(ApiKeyText);

impl OwnToken {
    pub fn new() -> OwnToken {
        OwnToken(new_key_text())
    }

    pub fn reveal(&self) -> &str {
        self.0.reveal()
    }
}

impl Default for OwnToken {
    fn default() -> OwnToken {
        OwnToken::new()
    }
}

impl std::fmt::Debug for OwnToken {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("OwnToken(…)")
    }
}

/// What a request presents.
#[derive(Clone, Copy, Debug)]
pub struct Credentials<'a> {
    /// `None`: the request did not come over the network, as in tests of the router.
    pub peer: Option<IpAddr>,
    /// Value of `Authorization: Bearer …`, `X-Api-Key` or the `token` of a worker's registration.
    pub key: Option<&'a str>,
    /// Value of the trusted header.
    pub person: Option<&'a str>,
    /// Value of the trusted header of groups.
    pub groups: Option<&'a str>,
}

const NO_KEY: &str = "an API key is required; send it as \"Authorization: Bearer fna_…\"";
const WRONG_KEY: &str = "this API key is not valid";

impl Policy {
    pub fn is_trusted_proxy(&self, peer: Option<IpAddr>) -> bool {
        peer.is_some_and(|peer| self.trusted_proxies.iter().any(|network| network.contains(&peer.to_canonical())))
    }

    /// Returns the access of a request, or why it has none.
    ///
    /// If the request has a key, nothing else counts. A wrong key is rejected even where no key is required, so that a typing
    /// error in a client's configuration is noticed.
    pub fn access(
        &self,
        presented: Credentials<'_>,
        keys: &HashMap<String, StoredApiKey>,
        now: Timestamp,
    ) -> Result<Access, AccessError> {
        if let Some(text) = presented.key {
            return self.key_access(text, keys, now);
        }
        if let Some(name) = presented.person.filter(|name| !name.is_empty())
            && self.trusted_header.is_some()
            && self.is_trusted_proxy(presented.peer)
        {
            let groups = presented.groups.filter(|_| self.trusted_groups_header.is_some());
            return Ok(Access::of_person(name, parse_groups(groups.unwrap_or_default())));
        }
        let is_local = presented.peer.is_none_or(|peer| peer.to_canonical().is_loopback());
        match presented.peer {
            Some(peer) if self.allow_anonymous && !is_local => Ok(Access::full(&format!("ip {}", peer.to_canonical()))),
            _ if self.allow_anonymous || (keys.is_empty() && is_local) => Ok(Access::full("loopback")),
            _ => Err(AccessError::Unauthorized(NO_KEY)),
        }
    }

    fn key_access(
        &self,
        text: &str,
        keys: &HashMap<String, StoredApiKey>,
        now: Timestamp,
    ) -> Result<Access, AccessError> {
        let text = ApiKeyText::parse(text).ok_or(AccessError::Unauthorized(WRONG_KEY))?;
        if self.own_token.as_ref().is_some_and(|own| own.0.hash().matches(&text.hash())) {
            return Ok(Access::of_own_worker());
        }
        let stored = keys.get(text.lookup()).filter(|stored| stored.matches(&text.hash(), now));
        let stored = stored.ok_or(AccessError::Unauthorized(WRONG_KEY))?;
        match stored.key.rejection(now) {
            None => Ok(Access::of_key(&stored.key)),
            Some(reason) => Err(AccessError::Unauthorized(reason)),
        }
    }
}

#[cfg(test)]
mod tests {
    use faena_domain::{KeyScope, NewApiKey};

    use super::*;

    const NOW: Timestamp = Timestamp::from_ms(1_000);

    fn text() -> ApiKeyText {
        ApiKeyText::from_random([1; 12], [2; 43])
    }

    fn keys() -> HashMap<String, StoredApiKey> {
        let text = text();
        let expires_at = Some(Timestamp::from_ms(2_000));
        let new = NewApiKey {
            name: "ci".into(),
            scopes: vec![KeyScope::Read],
            queues: None,
            groups: vec![],
            without_payloads: true,
            expires_at,
        };
        let stored = StoredApiKey::new(new, &text, "ana", Timestamp::from_ms(0));
        HashMap::from([(text.lookup().to_owned(), stored)])
    }

    fn from(peer: &str) -> Credentials<'static> {
        Credentials { peer: Some(peer.parse().expect("an address")), key: None, person: None, groups: None }
    }

    fn actor(result: Result<Access, AccessError>) -> String {
        match result {
            Ok(access) => access.actor().to_owned(),
            Err(AccessError::Unauthorized(message)) => format!("401 {message}"),
            Err(AccessError::Forbidden(message)) => format!("403 {message}"),
        }
    }

    #[test]
    fn without_any_key_only_this_machine_may_call() {
        let policy = Policy::default();
        assert_eq!(actor(policy.access(from("127.0.0.1"), &HashMap::new(), NOW)), "loopback");
        assert_eq!(actor(policy.access(from("::ffff:127.0.0.1"), &HashMap::new(), NOW)), "loopback");
        assert!(actor(policy.access(from("203.0.113.9"), &HashMap::new(), NOW)).starts_with("401 an API key"));
    }

    #[test]
    fn once_a_key_exists_this_machine_needs_one_too() {
        assert!(actor(Policy::default().access(from("127.0.0.1"), &keys(), NOW)).starts_with("401 an API key"));
    }

    #[test]
    fn a_wrong_key_is_rejected_even_where_none_is_required() {
        let policy = Policy { allow_anonymous: true, ..Policy::default() };
        for wrong in ["", "fna_x", "secret", ApiKeyText::from_random([1; 12], [9; 43]).reveal()] {
            let presented = Credentials { key: Some(wrong), ..from("127.0.0.1") };
            assert_eq!(actor(policy.access(presented, &keys(), NOW)), "401 this API key is not valid", "{wrong}");
        }
        assert_eq!(actor(policy.access(from("203.0.113.9"), &keys(), NOW)), "ip 203.0.113.9");
    }

    #[test]
    fn the_own_token_is_for_workers_only() {
        let own = OwnToken::new();
        let policy = Policy { own_token: Some(own.clone()), ..Policy::default() };
        let access = policy.access(Credentials { key: Some(own.reveal()), ..from("127.0.0.1") }, &keys(), NOW);
        let access = access.expect("the token of this server");
        assert!(access.require(KeyScope::Worker).is_ok() && access.require(KeyScope::Read).is_err());
        assert_eq!(format!("{own:?}"), "OwnToken(…)");
    }

    #[test]
    fn a_key_is_accepted_until_it_expires() {
        let text = text();
        let presented = Credentials { key: Some(text.reveal()), ..from("203.0.113.9") };
        let policy = Policy::default();
        assert_eq!(actor(policy.access(presented, &keys(), NOW)), format!("key ci ({})", text.lookup()));
        assert!(
            !policy.access(presented, &keys(), NOW).expect("access").sees_payloads(),
            "the key has without_payloads"
        );
        let later = Timestamp::from_ms(2_000);
        assert_eq!(actor(policy.access(presented, &keys(), later)), "401 this API key has expired");
    }

    #[test]
    fn a_person_is_accepted_from_a_trusted_proxy_only() {
        let mut policy = Policy { trusted_header: Some("x-user".into()), ..Policy::default() };
        let presented = Credentials { person: Some("ana"), ..from("10.0.0.7") };
        assert!(actor(policy.access(presented, &keys(), NOW)).starts_with("401"), "no proxy is trusted");
        policy.trusted_proxies = vec!["10.0.0.0/24".parse().expect("a network")];
        assert_eq!(actor(policy.access(presented, &keys(), NOW)), "user ana");
        assert!(
            actor(policy.access(Credentials { person: Some("ana"), ..from("10.0.1.7") }, &keys(), NOW))
                .starts_with("401")
        );
        policy.trusted_header = None;
        assert!(actor(policy.access(presented, &keys(), NOW)).starts_with("401"), "the header is off by default");
    }

    #[test]
    fn the_groups_of_a_person_count_from_a_trusted_proxy_only() {
        let mut policy = Policy {
            allow_anonymous: true,
            trusted_header: Some("x-user".into()),
            trusted_proxies: vec!["10.0.0.0/24".parse().expect("a network")],
            ..Policy::default()
        };
        let presented = |peer, person| Credentials { person, groups: Some("reviewers, staff"), ..from(peer) };
        let groups = |policy: &Policy, peer, person| {
            let access = policy.access(presented(peer, person), &keys(), NOW).expect("access");
            access.groups().to_vec()
        };
        assert_eq!(groups(&policy, "10.0.0.7", Some("ana")), [""; 0], "the header is off by default");
        policy.trusted_groups_header = Some("x-groups".into());
        assert_eq!(groups(&policy, "10.0.0.7", Some("ana")), ["reviewers", "staff"]);
        assert_eq!(groups(&policy, "10.0.0.7", None), [""; 0], "without a person");
        assert_eq!(groups(&policy, "10.0.1.7", Some("ana")), [""; 0], "not a trusted proxy");
        let text = text();
        let with_key = Credentials { key: Some(text.reveal()), ..presented("10.0.0.7", Some("ana")) };
        let access = policy.access(with_key, &keys(), NOW).expect("only the key counts");
        assert_eq!(access.groups(), [""; 0], "a key has its own groups");
    }
}
