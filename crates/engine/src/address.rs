//! Restricts outgoing HTTP calls to the addresses that Faena may call.
//!
//! `faena_domain::AddressRule` decides. The rule applies to the address of the connection itself: `GuardedResolver`
//! resolves a host name once and returns only the addresses that the rule permits, so a name cannot resolve to another
//! address between the check and the connection.

use std::{error::Error, net::SocketAddr};

use faena_domain::{AddressError, AddressRule, error_chain, outage};
use reqwest::dns::{Addrs, Name, Resolve, Resolving};

/// DNS resolver that returns only the addresses that the rule permits.
pub struct GuardedResolver(pub AddressRule);

impl Resolve for GuardedResolver {
    fn resolve(&self, name: Name) -> Resolving {
        let rule = self.0.clone();
        Box::pin(async move {
            let found: Vec<SocketAddr> = tokio::net::lookup_host((name.as_str(), 0)).await?.collect();
            let permitted: Vec<SocketAddr> = found.iter().copied().filter(|at| rule.permits(at.ip())).collect();
            match (permitted.is_empty(), found.first()) {
                (true, Some(first)) => {
                    Err(AddressError::Forbidden { host: name.as_str().to_owned(), address: first.ip() }.into())
                }
                _ => Ok(Box::new(permitted.into_iter()) as Addrs),
            }
        })
    }
}

/// Returns whether a call failed because the rule forbids the address that its host name resolved to.
pub fn is_forbidden(error: &reqwest::Error) -> bool {
    let mut cause = error.source();
    while let Some(error) = cause {
        if error.is::<AddressError>() {
            return true;
        }
        cause = error.source();
    }
    false
}

/// Describes an error with its causes, without the URL, which may contain a token.
pub fn describe(error: reqwest::Error) -> String {
    let error = error.without_url();
    if error.is_connect() && !is_forbidden(&error) {
        return format!("cannot connect: {}", outage(&error));
    }
    error_chain(&error)
}
