//! Parses the host and port that a request is sent to. Every check of a host name uses this parser.

use std::net::{IpAddr, Ipv6Addr};

use axum::http::{HeaderMap, HeaderValue, Uri, Version, header};

/// A host with an optional port, normalized: names are in lower case.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Authority {
    host: Host,
    port: Option<u16>,
}

#[derive(Clone, PartialEq, Eq, Debug)]
enum Host {
    Address(IpAddr),
    Name(String),
}

impl Authority {
    /// Parses `host`, `host:port` or `[v6]:port`. Returns `None` for anything else, such as user information.
    pub fn parse(text: &str) -> Option<Authority> {
        let (host, port) = match text.strip_prefix('[') {
            Some(rest) => {
                let (address, port) = rest.split_once(']')?;
                (Host::Address(address.parse::<Ipv6Addr>().ok()?.into()), port)
            }
            None => {
                let end = text.find(':').unwrap_or(text.len());
                (Host::parse_name(&text[..end])?, &text[end..])
            }
        };
        let port = match port.strip_prefix(':') {
            Some(digits) => Some(parse_port(digits)?),
            None if port.is_empty() => None,
            None => return None,
        };
        Some(Authority { host, port })
    }

    /// Parses the value of an `Origin` header: `scheme://authority`, nothing after it. The port of the scheme is filled in.
    pub fn parse_origin(text: &str) -> Option<Authority> {
        let (scheme, authority) = text.split_once("://")?;
        let default_port = default_port(scheme)?;
        Some(Authority::parse(authority)?.with_port(default_port))
    }

    /// Returns whether both are the same host and port. A missing port counts as `default_port`.
    pub fn is_same(&self, other: &Authority, default_port: u16) -> bool {
        self.clone().with_port(default_port) == other.clone().with_port(default_port)
    }

    /// Returns whether this is the same host and port as that of an origin, which always has a port.
    pub fn is_of_origin(&self, origin: &Authority) -> bool {
        match self.port {
            Some(_) => self == origin,
            // The scheme of the request is not known behind a proxy that ends TLS.
            None => self.host == origin.host && matches!(origin.port, Some(80 | 443)),
        }
    }

    /// Returns whether the host is this machine: `localhost` or a loopback address.
    pub fn is_loopback(&self) -> bool {
        match &self.host {
            Host::Address(address) => address.to_canonical().is_loopback(),
            Host::Name(name) => name == "localhost",
        }
    }

    fn with_port(mut self, port: u16) -> Authority {
        self.port.get_or_insert(port);
        self
    }
}

impl Host {
    fn parse_name(text: &str) -> Option<Host> {
        if let Ok(address) = text.parse::<IpAddr>() {
            return Some(Host::Address(address));
        }
        // The underscore is not valid in a host name, but container platforms use it.
        let is_valid = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'.' | b'_');
        let is_name = !text.is_empty() && text.len() <= 255 && text.bytes().all(is_valid);
        is_name.then(|| Host::Name(text.to_ascii_lowercase()))
    }
}

fn parse_port(digits: &str) -> Option<u16> {
    let is_number = (1..=5).contains(&digits.len()) && digits.bytes().all(|byte| byte.is_ascii_digit());
    if is_number { digits.parse().ok() } else { None }
}

fn default_port(scheme: &str) -> Option<u16> {
    match scheme {
        "http" => Some(80),
        "https" => Some(443),
        _ => None,
    }
}

/// Returns the authority that a request names in its target or its `Host` header, or `None` if it names none.
///
/// # Errors
/// Returns what is wrong if the request names several hosts or an invalid one, or none although HTTP/1.1 requires one.
pub fn of_request(uri: &Uri, version: Version, headers: &HeaderMap) -> Result<Option<Authority>, &'static str> {
    let in_target = match uri.authority() {
        Some(authority) => Some(Authority::parse(authority.as_str()).ok_or("the target must have a valid host")?),
        None => None,
    };
    let mut hosts = headers.get_all(header::HOST).iter();
    let in_header = match (hosts.next(), hosts.next()) {
        (None, _) => None,
        (Some(host), None) => Some(parse_value(host).ok_or("Host: must be a host with an optional port")?),
        (Some(_), Some(_)) => return Err("Host: must be sent only once"),
    };
    let default_port = uri.scheme_str().and_then(default_port).unwrap_or(80);
    match (in_target, in_header) {
        (Some(target), Some(host)) if !target.is_same(&host, default_port) => {
            Err("Host: must be the host of the target")
        }
        (None, None) if version == Version::HTTP_11 => Err("Host: is required"),
        (target, host) => Ok(target.or(host)),
    }
}

fn parse_value(value: &HeaderValue) -> Option<Authority> {
    Authority::parse(value.to_str().ok()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_host_with_an_optional_port_is_an_authority() {
        for valid in
            ["localhost", "LOCALHOST:1", "a_b.c-d:65535", "127.0.0.1:80", "[::1]", "[::1]:3000", "evil.example."]
        {
            assert!(Authority::parse(valid).is_some(), "{valid}");
        }
        for invalid in [
            "",
            ":80",
            "localhost:",
            "localhost:evil.com",
            "localhost:80:80",
            "localhost:65536",
            "localhost:+80",
            "localhost:080000",
            "[::1",
            "::1",
            "[::1].evil.com:80",
            "[::1]evil.com",
            "[::1%25lo]",
            "[127.0.0.1]",
            "[]",
            "user@localhost",
            "localhost@evil.com",
            "localhost/",
            "localhost#",
            "localhost?",
            "local host",
            "localhost,evil.com",
            "localhost\\evil.com",
            "localh\u{f6}st",
            "%6cocalhost",
        ] {
            assert!(Authority::parse(invalid).is_none(), "{invalid}");
        }
    }

    #[test]
    fn loopback_is_a_name_or_an_address_of_this_machine() {
        let is_loopback = |text: &str| Authority::parse(text).is_some_and(|authority| authority.is_loopback());
        for local in ["localhost", "LocalHost:3000", "127.0.0.1", "127.9.8.7:1", "[::1]:3000", "[::ffff:127.0.0.1]"] {
            assert!(is_loopback(local), "{local}");
        }
        for other in ["localhost.", "localhost.evil.com", "127.1", "0.0.0.0", "[::]", "10.0.0.1", "127.0.0.1.evil.com"]
        {
            assert!(!is_loopback(other), "{other}");
        }
    }

    #[test]
    fn an_origin_is_a_scheme_and_an_authority() {
        let is_same = |host: &str, origin: &str| {
            let host = Authority::parse(host).expect("valid");
            Authority::parse_origin(origin).is_some_and(|origin| host.is_of_origin(&origin))
        };
        assert!(
            is_same("localhost:3000", "http://localhost:3000") && is_same("LOCALHOST:3000", "http://localhost:3000")
        );
        assert!(
            is_same("faena.example", "https://faena.example") && is_same("faena.example:443", "https://faena.example")
        );
        for origin in [
            "null",
            "",
            "http://",
            "http://localhost:4000",
            "http://localhost",
            "http://localhost:3000/",
            "ftp://localhost:3000",
            "http://user@localhost:3000",
            "http://localhost.:3000",
            "http://localhost:3000 http://evil.com",
        ] {
            assert!(!is_same("localhost:3000", origin), "{origin}");
        }
    }
}
