//! Decides which addresses Faena may call on behalf of a job.
//!
//! Private, loopback, link-local and metadata addresses are rejected unless the operator has allowed their network: otherwise
//! every caller that may submit a job could reach into the operator's network. The engine applies the rule again to the
//! address that a host name resolves to, right before it connects.

use std::{
    fmt,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    sync::Arc,
};

use ipnet::IpNet;

/// Networks that may be called although they are private.
#[derive(Clone, Debug, Default)]
pub struct AddressRule {
    allowed: Arc<[IpNet]>,
}

/// Reason why a URL must not be called. A later call fails in the same way.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum AddressError {
    Scheme,
    Credentials,
    NoHost,
    /// The address is private or reserved, and its network is not allowed.
    Forbidden {
        host: String,
        address: IpAddr,
    },
}

impl fmt::Display for AddressError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            AddressError::Scheme => f.write_str("the URL must start with http:// or https://"),
            AddressError::Credentials => f.write_str("the URL must not contain a user name or password"),
            AddressError::NoHost => f.write_str("the URL has no host"),
            AddressError::Forbidden { host, address } => {
                write!(f, "\"{host}\"")?;
                if *host != address.to_string() {
                    write!(f, " ({address})")?;
                }
                f.write_str(" is a private or reserved address; allow its network with FAENA_WEBHOOK_ALLOW")
            }
        }
    }
}

impl std::error::Error for AddressError {}

impl AddressRule {
    pub fn new(allowed: &[IpNet]) -> AddressRule {
        AddressRule { allowed: allowed.into() }
    }

    /// Returns whether Faena may connect to `address`.
    pub fn permits(&self, address: IpAddr) -> bool {
        let inner = embedded_v4(address);
        is_public(inner) || self.allowed.iter().any(|net| net.contains(&inner) || net.contains(&address))
    }

    /// Checks a URL as far as possible without resolving its host name.
    pub fn check_url(&self, url: &url::Url) -> Result<(), AddressError> {
        if !matches!(url.scheme(), "http" | "https") {
            return Err(AddressError::Scheme);
        }
        if !url.username().is_empty() || url.password().is_some() {
            return Err(AddressError::Credentials);
        }
        let address = match url.host() {
            Some(url::Host::Ipv4(address)) => IpAddr::V4(address),
            Some(url::Host::Ipv6(address)) => IpAddr::V6(address),
            Some(url::Host::Domain(_)) => return Ok(()),
            None => return Err(AddressError::NoHost),
        };
        if self.permits(address) { Ok(()) } else { Err(AddressError::Forbidden { host: address.to_string(), address }) }
    }
}

/// Returns the IPv4 address that an IPv6 address embeds, so that the rule sees where a connection would go.
fn embedded_v4(address: IpAddr) -> IpAddr {
    let IpAddr::V6(v6) = address else { return address };
    let segments = v6.segments();
    let from_halves = |high: u16, low: u16| {
        let [a, b] = high.to_be_bytes();
        let [c, d] = low.to_be_bytes();
        IpAddr::V4(Ipv4Addr::new(a, b, c, d))
    };
    if let Some(v4) = v6.to_ipv4_mapped() {
        return IpAddr::V4(v4);
    }
    match segments {
        // IPv4-compatible (deprecated), but not :: and ::1.
        [0, 0, 0, 0, 0, 0, high, low] if high != 0 => from_halves(high, low),
        // NAT64.
        [0x64, 0xff9b, 0, 0, 0, 0, high, low] => from_halves(high, low),
        // 6to4.
        [0x2002, high, low, ..] => from_halves(high, low),
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
    // Global unicast is 2000::/3, without Teredo and the documentation ranges.
    (0x2000..0x4000).contains(&first)
        && !(first == 0x2001 && address.segments()[1] == 0)
        && !(first == 0x2001 && address.segments()[1] == 0xdb8)
        && !(first == 0x3fff && address.segments()[1] < 0x1000)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rule(allowed: &[&str]) -> AddressRule {
        let nets: Vec<IpNet> = allowed.iter().map(|net| net.parse().expect("a network")).collect();
        AddressRule::new(&nets)
    }

    #[test]
    fn private_and_reserved_addresses_are_rejected_in_every_notation() {
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
    fn public_addresses_are_permitted() {
        for address in
            ["1.1.1.1", "8.8.8.8", "100.128.0.1", "172.32.0.1", "2606:4700::1111", "::ffff:8.8.8.8", "2002:808:808::"]
        {
            let address: IpAddr = address.parse().expect("an address");
            assert!(rule(&[]).permits(address), "{address}");
        }
    }

    #[test]
    fn an_allowed_network_permits_only_its_own_addresses() {
        let rule = rule(&["127.0.0.0/8", "fd12::/16"]);
        assert!(rule.permits("127.0.0.1".parse().expect("an address")));
        assert!(rule.permits("::ffff:127.0.0.1".parse().expect("an address")));
        assert!(rule.permits("fd12::1".parse().expect("an address")));
        assert!(!rule.permits("10.0.0.1".parse().expect("an address")));
        assert!(!rule.permits("::1".parse().expect("an address")));
    }

    #[test]
    fn a_url_is_rejected_for_its_scheme_its_password_and_its_literal_address() {
        let rejected = |url: &str| rule(&[]).check_url(&url.parse().expect("a URL")).is_err();
        assert!(rejected("ftp://example.org/"));
        assert!(rejected("http://user:secret@example.org/"));
        assert!(rejected("http://127.0.0.1:8080/"));
        assert!(rejected("http://[::1]/"));
        assert!(rejected("http://0x7f.1/"), "the URL parser reads this as 127.0.0.1");
        assert!(rejected("http://2130706433/"));
        assert!(!rejected("https://example.org/path"));
    }
}
