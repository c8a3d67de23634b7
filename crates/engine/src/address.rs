//! Which addresses Faena may call on behalf of a job.
//!
//! Private, loopback, link-local and metadata addresses are refused, unless the operator has allowed their network: otherwise
//! whoever may submit a job could reach into the operator's network. The rule is applied to the address that is really
//! connected to: a name is resolved once, by `GuardedResolver`, and only what passes is handed to the connection.

use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    sync::Arc,
};

use ipnet::IpNet;
use reqwest::dns::{Addrs, Name, Resolve, Resolving};

#[derive(Clone, Debug, Default)]
pub struct AddressRule {
    allowed: Arc<[IpNet]>,
}

impl AddressRule {
    pub fn new(allowed: &[IpNet]) -> AddressRule {
        AddressRule { allowed: allowed.into() }
    }

    pub fn permits(&self, address: IpAddr) -> bool {
        let inner = unwrapped(address);
        is_public(inner) || self.allowed.iter().any(|net| net.contains(&inner) || net.contains(&address))
    }

    /// What is wrong with a URL, as far as it can be said without resolving its name.
    pub fn check_url(&self, url: &url::Url) -> Result<(), String> {
        if !matches!(url.scheme(), "http" | "https") {
            return Err("the URL must start with http:// or https://".into());
        }
        if !url.username().is_empty() || url.password().is_some() {
            return Err("the URL must not contain a user name or password".into());
        }
        let address = match url.host() {
            Some(url::Host::Ipv4(address)) => IpAddr::V4(address),
            Some(url::Host::Ipv6(address)) => IpAddr::V6(address),
            Some(url::Host::Domain(_)) => return Ok(()),
            None => return Err("the URL names no host".into()),
        };
        if self.permits(address) { Ok(()) } else { Err(refusal(&address.to_string())) }
    }
}

/// By these words a refusal is known again behind the connection's own.
pub const REFUSED: &str = "is a private or reserved address";

fn refusal(what: &str) -> String {
    format!("{what} {REFUSED}; FAENA_WEBHOOK_ALLOW can allow its network")
}

/// An IPv4 address in IPv6 clothes is judged as what it is.
fn unwrapped(address: IpAddr) -> IpAddr {
    let IpAddr::V6(v6) = address else { return address };
    let segments = v6.segments();
    let embedded = |high: u16, low: u16| {
        let [a, b] = high.to_be_bytes();
        let [c, d] = low.to_be_bytes();
        IpAddr::V4(Ipv4Addr::new(a, b, c, d))
    };
    if let Some(v4) = v6.to_ipv4_mapped() {
        return IpAddr::V4(v4);
    }
    match segments {
        // IPv4-compatible (long deprecated), but not :: and ::1.
        [0, 0, 0, 0, 0, 0, high, low] if high != 0 => embedded(high, low),
        // NAT64.
        [0x64, 0xff9b, 0, 0, 0, 0, high, low] => embedded(high, low),
        // 6to4.
        [0x2002, high, low, ..] => embedded(high, low),
        _ => address,
    }
}

fn is_public(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(v4) => is_public_v4(v4),
        IpAddr::V6(v6) => is_public_v6(v6),
    }
}

fn is_public_v4(address: Ipv4Addr) -> bool {
    let [a, b, c, _] = address.octets();
    !(address.is_private()
        || address.is_loopback()
        || address.is_link_local()
        || address.is_broadcast()
        || address.is_documentation()
        || address.is_multicast()
        || a == 0
        || a >= 240
        || (a == 100 && (64..128).contains(&b))
        || (a == 192 && b == 0 && c == 0)
        || (a == 198 && (b == 18 || b == 19)))
}

fn is_public_v6(address: Ipv6Addr) -> bool {
    let first = address.segments()[0];
    // Global unicast is 2000::/3; Teredo and documentation are cut out of it.
    (0x2000..0x4000).contains(&first)
        && !(first == 0x2001 && address.segments()[1] == 0)
        && !(first == 0x2001 && address.segments()[1] == 0xdb8)
        && !(first == 0x3fff && address.segments()[1] < 0x1000)
}

/// Resolves names and lets through only what the rule permits.
pub struct GuardedResolver(pub AddressRule);

impl Resolve for GuardedResolver {
    fn resolve(&self, name: Name) -> Resolving {
        let rule = self.0.clone();
        Box::pin(async move {
            let found: Vec<SocketAddr> = tokio::net::lookup_host((name.as_str(), 0)).await?.collect();
            let permitted: Vec<SocketAddr> = found.iter().copied().filter(|at| rule.permits(at.ip())).collect();
            match (permitted.is_empty(), found.first()) {
                (true, Some(first)) => Err(refusal(&format!("{} ({})", name.as_str(), first.ip())).into()),
                _ => Ok(Box::new(permitted.into_iter()) as Addrs),
            }
        })
    }
}

/// The error with its causes, without the URL: it may carry a token.
pub fn describe(error: reqwest::Error) -> String {
    let error = error.without_url();
    let mut text = error.to_string();
    let mut source = std::error::Error::source(&error);
    while let Some(cause) = source {
        let more = cause.to_string();
        if !text.contains(&more) {
            text.push_str(": ");
            text.push_str(&more);
        }
        source = cause.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rule(allowed: &[&str]) -> AddressRule {
        let nets: Vec<IpNet> = allowed.iter().map(|net| net.parse().expect("a network")).collect();
        AddressRule::new(&nets)
    }

    #[test]
    fn private_and_reserved_addresses_are_refused_in_every_disguise() {
        for address in [
            "127.0.0.1",
            "127.9.9.9",
            "0.0.0.0",
            "10.1.2.3",
            "172.16.0.1",
            "172.31.255.255",
            "192.168.1.1",
            "169.254.169.254",
            "100.64.0.1",
            "100.127.255.255",
            "192.0.0.8",
            "198.18.0.1",
            "198.19.255.255",
            "224.0.0.1",
            "240.0.0.1",
            "255.255.255.255",
            "192.0.2.1",
            "::",
            "::1",
            "::ffff:127.0.0.1",
            "::ffff:10.0.0.1",
            "::127.0.0.1",
            "fe80::1",
            "fc00::1",
            "fd00:ec2::254",
            "ff02::1",
            "64:ff9b::7f00:1",
            "64:ff9b::a9fe:a9fe",
            "2002:7f00:1::",
            "2001:0:1::1",
            "2001:db8::1",
            "fec0::1",
        ] {
            let address: IpAddr = address.parse().expect("an address");
            assert!(!rule(&[]).permits(address), "{address}");
        }
    }

    #[test]
    fn public_addresses_pass() {
        for address in
            ["1.1.1.1", "8.8.8.8", "100.128.0.1", "172.32.0.1", "2606:4700::1111", "::ffff:8.8.8.8", "2002:808:808::"]
        {
            let address: IpAddr = address.parse().expect("an address");
            assert!(rule(&[]).permits(address), "{address}");
        }
    }

    #[test]
    fn an_allowed_network_opens_only_itself() {
        let rule = rule(&["127.0.0.0/8", "fd12::/16"]);
        assert!(rule.permits("127.0.0.1".parse().expect("an address")));
        assert!(rule.permits("::ffff:127.0.0.1".parse().expect("an address")));
        assert!(rule.permits("fd12::1".parse().expect("an address")));
        assert!(!rule.permits("10.0.0.1".parse().expect("an address")));
        assert!(!rule.permits("::1".parse().expect("an address")));
    }

    #[test]
    fn a_url_is_refused_for_its_scheme_its_password_and_its_literal_address() {
        let refused = |url: &str| rule(&[]).check_url(&url.parse().expect("a URL")).is_err();
        assert!(refused("ftp://example.org/"));
        assert!(refused("http://user:secret@example.org/"));
        assert!(refused("http://127.0.0.1:8080/"));
        assert!(refused("http://[::1]/"));
        assert!(refused("http://0x7f.1/"), "the parser knows this for 127.0.0.1");
        assert!(refused("http://2130706433/"));
        assert!(!refused("https://example.org/path"));
    }
}
