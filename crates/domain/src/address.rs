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

use ipnet::{IpNet, Ipv4Net, Ipv6Net};

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

/// Checks a URL before it is known which addresses may be called: its scheme, its host, and that it contains no password.
pub fn check_url_form(text: &str) -> Result<(), String> {
    let url: url::Url = text.parse().map_err(|error| format!("is not a URL: {error}"))?;
    match AddressRule::default().check_url(&url) {
        Ok(()) | Err(AddressError::Forbidden { .. }) => Ok(()),
        Err(error) => Err(error.to_string()),
    }
}

/// Returns the IPv4 address that an IPv6 address embeds, so that the rule sees where a connection would go.
fn embedded_v4(address: IpAddr) -> IpAddr {
    let IpAddr::V6(v6) = address else { return address };
    let from_halves = |high: u16, low: u16| {
        let [a, b] = high.to_be_bytes();
        let [c, d] = low.to_be_bytes();
        IpAddr::V4(Ipv4Addr::new(a, b, c, d))
    };
    if let Some(v4) = v6.to_ipv4_mapped() {
        return IpAddr::V4(v4);
    }
    match v6.segments() {
        // NAT64: on a network without IPv4, public hosts are reached this way.
        [0x64, 0xff9b, 0, 0, 0, 0, high, low] => from_halves(high, low),
        _ => address,
    }
}

fn is_public(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(v4) => !RESERVED_V4.iter().any(|net| net.contains(&v4)),
        IpAddr::V6(v6) => GLOBAL_UNICAST.contains(&v6) && !RESERVED_V6.iter().any(|net| net.contains(&v6)),
    }
}

const fn v4(a: u8, b: u8, c: u8, d: u8, prefix: u8) -> Ipv4Net {
    Ipv4Net::new_assert(Ipv4Addr::new(a, b, c, d), prefix)
}

const fn v6(a: u16, b: u16, c: u16, prefix: u8) -> Ipv6Net {
    Ipv6Net::new_assert(Ipv6Addr::new(a, b, c, 0, 0, 0, 0, 0), prefix)
}

/// IANA's special-purpose registry, including the entries that are globally reachable, because no webhook receiver has one of those
/// addresses. Also multicast, and a public address under which a cloud offers metadata to its hosts.
const RESERVED_V4: [Ipv4Net; 19] = [
    v4(0, 0, 0, 0, 8),
    v4(10, 0, 0, 0, 8),
    v4(100, 64, 0, 0, 10),
    v4(127, 0, 0, 0, 8),
    v4(168, 63, 129, 16, 32),
    v4(169, 254, 0, 0, 16),
    v4(172, 16, 0, 0, 12),
    v4(192, 0, 0, 0, 24),
    v4(192, 0, 2, 0, 24),
    v4(192, 31, 196, 0, 24),
    v4(192, 52, 193, 0, 24),
    v4(192, 88, 99, 0, 24),
    v4(192, 168, 0, 0, 16),
    v4(192, 175, 48, 0, 24),
    v4(198, 18, 0, 0, 15),
    v4(198, 51, 100, 0, 24),
    v4(203, 0, 113, 0, 24),
    v4(224, 0, 0, 0, 4),
    v4(240, 0, 0, 0, 4),
];

/// Everything else is reserved, local, multicast or not assigned.
const GLOBAL_UNICAST: Ipv6Net = v6(0x2000, 0, 0, 3);

/// The entries of IANA's special-purpose registry within global unicast. Teredo (in `2001::/23`) and 6to4 (`2002::/16`) embed IPv4
/// addresses; both are obsolete, so their addresses are rejected whatever they embed.
const RESERVED_V6: [Ipv6Net; 5] = [
    v6(0x2001, 0, 0, 23),
    v6(0x2001, 0xdb8, 0, 32),
    v6(0x2002, 0, 0, 16),
    v6(0x2620, 0x4f, 0x8000, 48),
    v6(0x3fff, 0, 0, 20),
];

#[cfg(test)]
mod tests {
    use super::*;

    fn rule(allowed: &[&str]) -> AddressRule {
        let nets: Vec<IpNet> = allowed.iter().map(|net| net.parse().expect("a network")).collect();
        AddressRule::new(&nets)
    }

    fn address(text: &str) -> IpAddr {
        text.parse().unwrap_or_else(|error| panic!("{text}: {error}"))
    }

    /// The special-purpose registries of IANA, entry by entry, and other addresses that must not be called.
    const RESERVED: [(&str, &str); 63] = [
        ("0.0.0.0/8", "this network"),
        ("0.0.0.0/32", "this host on this network"),
        ("10.0.0.0/8", "private use"),
        ("100.64.0.0/10", "shared address space"),
        ("100.100.100.200/32", "metadata of a cloud, in the shared address space"),
        ("127.0.0.0/8", "loopback"),
        ("168.63.129.16/32", "metadata of a cloud, in a public network"),
        ("169.254.0.0/16", "link local"),
        ("169.254.169.254/32", "metadata of most clouds"),
        ("172.16.0.0/12", "private use"),
        ("192.0.0.0/24", "IETF protocol assignments"),
        ("192.0.0.0/29", "IPv4 service continuity prefix"),
        ("192.0.0.8/32", "IPv4 dummy address"),
        ("192.0.0.9/32", "port control protocol anycast"),
        ("192.0.0.10/32", "TURN anycast"),
        ("192.0.0.170/32", "NAT64 discovery"),
        ("192.0.0.171/32", "DNS64 discovery"),
        ("192.0.0.192/32", "metadata of a cloud, in the protocol assignments"),
        ("192.0.2.0/24", "documentation"),
        ("192.31.196.0/24", "AS112-v4"),
        ("192.52.193.0/24", "AMT"),
        ("192.88.99.0/24", "6to4 relay anycast"),
        ("192.88.99.2/32", "6a44 relay anycast"),
        ("192.168.0.0/16", "private use"),
        ("192.175.48.0/24", "direct delegation AS112 service"),
        ("198.18.0.0/15", "benchmarking"),
        ("198.51.100.0/24", "documentation"),
        ("203.0.113.0/24", "documentation"),
        ("224.0.0.0/4", "multicast"),
        ("240.0.0.0/4", "reserved"),
        ("255.255.255.255/32", "limited broadcast"),
        ("::/128", "unspecified"),
        ("::1/128", "loopback"),
        ("::/96", "IPv4-compatible"),
        ("64:ff9b:1::/48", "local use of NAT64"),
        ("100::/64", "discard only"),
        ("100:0:0:1::/64", "dummy prefix"),
        ("2001::/23", "IETF protocol assignments"),
        ("2001::/32", "Teredo"),
        ("2001:1::1/128", "port control protocol anycast"),
        ("2001:1::2/128", "TURN anycast"),
        ("2001:1::3/128", "DNS-SD service registration anycast"),
        ("2001:2::/48", "benchmarking"),
        ("2001:3::/32", "AMT"),
        ("2001:4:112::/48", "AS112-v6"),
        ("2001:10::/28", "ORCHID"),
        ("2001:20::/28", "ORCHIDv2"),
        ("2001:30::/28", "remote identification of drones"),
        ("2001:db8::/32", "documentation"),
        ("2002::/16", "6to4"),
        ("2620:4f:8000::/48", "direct delegation AS112 service"),
        ("3fff::/20", "documentation"),
        ("4000::/3", "not assigned"),
        ("5f00::/16", "segment routing identifiers"),
        ("6000::/3", "not assigned"),
        ("8000::/1", "not assigned, local and multicast"),
        ("fc00::/7", "unique local"),
        ("fd00:ec2::254/128", "metadata of a cloud, unique local"),
        ("fd20:ce::254/128", "metadata of a cloud, unique local"),
        ("fe80::/10", "link local"),
        ("fec0::/10", "site local"),
        ("ff00::/8", "multicast"),
        ("ff02::1/128", "all nodes"),
    ];

    /// Returns the first, the last and some other addresses of a network.
    fn samples(net: IpNet) -> Vec<IpAddr> {
        match net {
            IpNet::V4(net) => {
                let (first, last) = (u32::from(net.network()), u32::from(net.broadcast()));
                let middle = first + (last - first) / 2;
                [first, first.saturating_add(1).min(last), middle, last].map(|bits| Ipv4Addr::from(bits).into()).into()
            }
            IpNet::V6(net) => {
                let (first, last) = (u128::from(net.network()), u128::from(net.broadcast()));
                let middle = first + (last - first) / 2;
                [first, first.saturating_add(1).min(last), middle, last].map(|bits| Ipv6Addr::from(bits).into()).into()
            }
        }
    }

    #[test]
    fn every_entry_of_the_special_purpose_registries_is_rejected() {
        for (net, name) in RESERVED {
            for address in samples(net.parse().expect("a network")) {
                assert!(!rule(&[]).permits(address), "{address} of {net} ({name})");
            }
        }
    }

    #[test]
    fn a_reserved_address_is_rejected_within_an_ipv6_address() {
        for (net, name) in RESERVED {
            for address in samples(net.parse().expect("a network")) {
                let IpAddr::V4(v4) = address else { continue };
                let [a, b, c, d] = v4.octets().map(u16::from);
                let (high, low) = (a << 8 | b, c << 8 | d);
                for outer in [
                    v4.to_ipv6_mapped(),
                    Ipv6Addr::new(0, 0, 0, 0, 0, 0, high, low),
                    Ipv6Addr::new(0x64, 0xff9b, 0, 0, 0, 0, high, low),
                    Ipv6Addr::new(0x64, 0xff9b, 1, 0, 0, 0, high, low),
                    Ipv6Addr::new(0x2002, high, low, 0, 0, 0, 0, 1),
                    // Teredo has the server's address, and the client's with its bits inverted.
                    Ipv6Addr::new(0x2001, 0, high, low, 0, 0, 0, 0),
                    Ipv6Addr::new(0x2001, 0, 0x808, 0x808, 0, 0, !high, !low),
                ] {
                    assert!(!rule(&[]).permits(outer.into()), "{outer} with {v4} ({name})");
                }
            }
        }
    }

    #[test]
    fn public_addresses_are_permitted_even_next_to_reserved_networks() {
        for text in [
            "1.0.0.0",
            "1.1.1.1",
            "8.8.8.8",
            "9.255.255.255",
            "11.0.0.0",
            "100.63.255.255",
            "100.128.0.0",
            "126.255.255.255",
            "128.0.0.0",
            "168.63.129.15",
            "168.63.129.17",
            "169.253.255.255",
            "169.255.0.0",
            "172.15.255.255",
            "172.32.0.0",
            "191.255.255.255",
            "192.0.1.0",
            "192.0.3.0",
            "192.31.195.255",
            "192.31.197.0",
            "192.52.192.255",
            "192.52.194.0",
            "192.88.98.255",
            "192.88.100.0",
            "192.167.255.255",
            "192.169.0.0",
            "192.175.47.255",
            "192.175.49.0",
            "198.17.255.255",
            "198.20.0.0",
            "198.51.99.255",
            "198.51.101.0",
            "203.0.112.255",
            "203.0.114.0",
            "223.255.255.255",
            "2000::1",
            "2001:200::1",
            "2001:4860:4860::8888",
            "2001:db7::1",
            "2001:db9::1",
            "2003::1",
            "2606:4700::1111",
            "2620:4f:7fff::1",
            "2620:4f:8001::1",
            "3ffe::1",
            "3fff:1000::1",
            "::ffff:8.8.8.8",
            "64:ff9b::8.8.8.8",
        ] {
            assert!(rule(&[]).permits(address(text)), "{text}");
        }
    }

    #[test]
    fn an_allowed_network_permits_only_its_own_addresses() {
        let rule = rule(&["127.0.0.0/8", "fd12::/16", "2002:7f00::/24"]);
        for permitted in ["127.0.0.1", "::ffff:127.0.0.1", "64:ff9b::127.0.0.1", "fd12::1", "2002:7f00:1::"] {
            assert!(rule.permits(address(permitted)), "{permitted}");
        }
        for rejected in ["10.0.0.1", "::1", "fd13::1", "::127.0.0.1", "64:ff9b:1::127.0.0.1", "2002:a00:1::"] {
            assert!(!rule.permits(address(rejected)), "{rejected}");
        }
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
