//! Finds the address of the client behind reverse proxies.

use std::net::{IpAddr, SocketAddr};

use crate::Policy;

impl Policy {
    /// Returns the address of the client: the peer, or what trusted proxies say about it.
    ///
    /// `forwarded` has the values of `X-Forwarded-For`. Every proxy appends the address that it sees, so the list is read from
    /// its end, up to the first address that is not a trusted proxy. The client may have invented the addresses before it.
    pub fn client_address<'a>(
        &self,
        peer: Option<IpAddr>,
        forwarded: impl DoubleEndedIterator<Item = &'a str>,
    ) -> Option<IpAddr> {
        let mut client = peer?.to_canonical();
        let mut hops = forwarded.flat_map(|value| value.split(',')).rev();
        while self.is_trusted_proxy(Some(client)) {
            let Some(address) = hops.next().and_then(parse) else { break };
            client = address;
        }
        Some(client)
    }
}

/// Parses an address that may have a port and brackets.
fn parse(text: &str) -> Option<IpAddr> {
    let text = text.trim();
    let plain = text.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')).unwrap_or(text);
    let address = plain.parse().ok().or_else(|| Some(text.parse::<SocketAddr>().ok()?.ip()));
    address.map(|address: IpAddr| address.to_canonical())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn client(peer: &str, forwarded: &[&str]) -> String {
        let trusted_proxies = ["10.0.0.0/24", "fd00::/8"].map(|network| network.parse().expect("a network")).to_vec();
        let policy = Policy { trusted_proxies, ..Policy::default() };
        let peer = Some(peer.parse().expect("an address"));
        policy.client_address(peer, forwarded.iter().copied()).expect("there is a peer").to_string()
    }

    #[test]
    fn only_trusted_proxies_name_the_client() {
        assert_eq!(client("203.0.113.9", &["198.51.100.1"]), "203.0.113.9", "any client can send the header");
        assert_eq!(client("10.0.0.7", &["198.51.100.1"]), "198.51.100.1");
        assert_eq!(client("::ffff:10.0.0.7", &["::ffff:198.51.100.1"]), "198.51.100.1");
        assert_eq!(client("10.0.0.7", &["192.0.2.1, 198.51.100.1"]), "198.51.100.1", "the client invented the first");
        assert_eq!(client("10.0.0.7", &["192.0.2.1", "198.51.100.1, 10.0.0.8"]), "198.51.100.1", "two proxies");
    }

    #[test]
    fn without_a_valid_header_the_address_of_the_proxy_is_used() {
        for invalid in ["", "unknown", "198.51.100.1, _hidden", "1.2.3.4.5", "\u{7f}"] {
            assert_eq!(client("10.0.0.7", &[invalid]), "10.0.0.7", "{invalid}");
        }
        assert_eq!(client("10.0.0.7", &[]), "10.0.0.7");
        assert_eq!(Policy::default().client_address(None, ["198.51.100.1"].into_iter()), None);
    }

    #[test]
    fn ports_and_brackets_are_ignored() {
        for text in ["2001:db8::1", "[2001:db8::1]", "[2001:db8::1]:443"] {
            assert_eq!(client("fd00::1", &[text]), "2001:db8::1");
        }
        assert_eq!(client("10.0.0.7", &["198.51.100.1:5000"]), "198.51.100.1");
    }
}
