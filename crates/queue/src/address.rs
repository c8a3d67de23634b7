//! The address of Redis, including a password that is never shown.

use std::{fmt, str::FromStr};

const DEFAULT_PORT: u16 = 6379;
const SENTINEL_PORT: u16 = 26379;

/// Address of Redis: `redis://user:password@host:6379/0`, `rediss://…` for TLS, several hosts of a cluster separated by
/// commas, or `redis+sentinel://host:26379,host:26379/master-name`.
///
/// `Display` and `Debug` omit user names and passwords.
#[derive(Clone, PartialEq, Eq)]
pub struct RedisAddress {
    pub(crate) hosts: Vec<(String, u16)>,
    pub(crate) is_tls: bool,
    pub(crate) login: Login,
    pub(crate) database: i64,
    /// Name of the master and login to the sentinels.
    pub(crate) sentinel: Option<(String, Login)>,
}

#[derive(Clone, PartialEq, Eq, Default)]
pub(crate) struct Login {
    pub user: Option<String>,
    pub password: Option<String>,
}

/// Why a text is not the address of Redis. Never contains that text, which may hold a password.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AddressError {
    #[error(
        "not a Redis URL; write redis://user:password@host:6379/0, rediss:// for TLS, or redis+sentinel://host:26379/master-name"
    )]
    Scheme,
    #[error("no host; write redis://host:6379")]
    NoHost,
    #[error("not a valid port; write redis://host:6379")]
    Port,
    #[error("the database after the host must be a number, like redis://host:6379/0")]
    Database,
    #[error("no master name; write redis+sentinel://host:26379/master-name")]
    NoMaster,
    #[error("unknown parameter; a sentinel URL may have sentinel_username and sentinel_password, other URLs have none")]
    Parameter,
}

impl RedisAddress {
    /// Returns the passwords.
    pub(crate) fn secrets(&self) -> impl Iterator<Item = &str> {
        let sentinel = self.sentinel.as_ref().and_then(|(_, login)| login.password.as_deref());
        self.login.password.as_deref().into_iter().chain(sentinel).filter(|secret| !secret.is_empty())
    }

    /// Removes the passwords from a message of the client library or of Redis.
    pub(crate) fn redact(&self, text: &str) -> String {
        self.secrets().fold(text.to_owned(), |text, secret| text.replace(secret, "***"))
    }
}

impl FromStr for RedisAddress {
    type Err = AddressError;

    fn from_str(text: &str) -> Result<RedisAddress, AddressError> {
        let (scheme, rest) = text.trim().split_once("://").ok_or(AddressError::Scheme)?;
        let (is_tls, is_sentinel) = match scheme {
            "redis" | "valkey" => (false, false),
            "rediss" | "valkeys" => (true, false),
            "redis+sentinel" | "valkey+sentinel" => (false, true),
            "rediss+sentinel" | "valkeys+sentinel" => (true, true),
            _ => return Err(AddressError::Scheme),
        };
        let (rest, query) = rest.split_once('?').unwrap_or((rest, ""));
        let (authority, path) = rest.split_once('/').unwrap_or((rest, ""));
        let (login, hosts) = authority
            .rsplit_once('@')
            .map_or((Login::default(), authority), |(login, hosts)| (parse_login(login), hosts));
        let default_port = if is_sentinel { SENTINEL_PORT } else { DEFAULT_PORT };
        let hosts =
            hosts.split(',').map(|host| parse_host(host.trim(), default_port)).collect::<Result<Vec<_>, _>>()?;
        let sentinel_login = parse_parameters(query, is_sentinel)?;
        let (master, database) = if is_sentinel { path.split_once('/').unwrap_or((path, "")) } else { ("", path) };
        if is_sentinel && master.is_empty() {
            return Err(AddressError::NoMaster);
        }
        let database = if database.is_empty() { 0 } else { database.parse().map_err(|_| AddressError::Database)? };
        if database < 0 {
            return Err(AddressError::Database);
        }
        let sentinel = is_sentinel.then(|| (decode(master), sentinel_login));
        Ok(RedisAddress { hosts, is_tls, login, database, sentinel })
    }
}

fn parse_login(text: &str) -> Login {
    let (user, password) = text.split_once(':').map_or((text, None), |(user, password)| (user, Some(password)));
    let user = Some(decode(user)).filter(|user| !user.is_empty());
    Login { user, password: password.map(decode).filter(|password| !password.is_empty()) }
}

fn parse_host(text: &str, default_port: u16) -> Result<(String, u16), AddressError> {
    let (host, port) = match text.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
        Some((host, rest)) => (host, rest.strip_prefix(':')),
        None => text.rsplit_once(':').map_or((text, None), |(host, port)| (host, Some(port))),
    };
    if host.is_empty() {
        return Err(AddressError::NoHost);
    }
    let port = port.map_or(Ok(default_port), |port| port.parse().map_err(|_| AddressError::Port))?;
    Ok((host.to_owned(), port))
}

fn parse_parameters(query: &str, is_sentinel: bool) -> Result<Login, AddressError> {
    let mut login = Login::default();
    for (name, value) in url::form_urlencoded::parse(query.as_bytes()) {
        match &*name {
            "sentinel_username" if is_sentinel => login.user = Some(value.into_owned()),
            "sentinel_password" if is_sentinel => login.password = Some(value.into_owned()),
            _ => return Err(AddressError::Parameter),
        }
    }
    Ok(login)
}

fn decode(text: &str) -> String {
    // The crate `url` decodes only form data, where `+` means a space; in a user name or password it is a plus sign.
    let form = format!("x={}", text.replace('+', "%2B").replace('&', "%26"));
    url::form_urlencoded::parse(form.as_bytes()).next().map(|(_, value)| value.into_owned()).unwrap_or_default()
}

impl fmt::Display for RedisAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let scheme = if self.is_tls { "rediss" } else { "redis" };
        let suffix = if self.sentinel.is_some() { "+sentinel" } else { "" };
        write!(f, "{scheme}{suffix}://")?;
        for (at, (host, port)) in self.hosts.iter().enumerate() {
            let comma = if at > 0 { "," } else { "" };
            if host.contains(':') { write!(f, "{comma}[{host}]:{port}")? } else { write!(f, "{comma}{host}:{port}")? }
        }
        if let Some((master, _)) = &self.sentinel {
            write!(f, "/{master}")?;
        }
        if self.database > 0 { write!(f, "/{}", self.database) } else { Ok(()) }
    }
}

impl fmt::Debug for RedisAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RedisAddress({self})")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(text: &str) -> RedisAddress {
        text.parse().expect("it is an address")
    }

    #[test]
    fn an_address_is_shown_without_its_secrets() {
        let address = parsed("rediss://me:s%2Bcret@h1,[::1]:7000/2");
        assert_eq!(address.login.password.as_deref(), Some("s+cret"));
        assert_eq!(
            format!("{address} {address:?}"),
            "rediss://h1:6379,[::1]:7000/2 RedisAddress(rediss://h1:6379,[::1]:7000/2)"
        );
        assert_eq!(address.redact("wrong s+cret"), "wrong ***");
    }

    #[test]
    fn a_sentinel_address_names_its_master() {
        let address = parsed("redis+sentinel://:pw@a:1,b/main/3?sentinel_password=x");
        assert_eq!(address.hosts, [("a".to_owned(), 1), ("b".to_owned(), SENTINEL_PORT)]);
        let (master, login) = address.sentinel.clone().expect("it has sentinels");
        assert_eq!((master.as_str(), login.password.as_deref(), address.database), ("main", Some("x"), 3));
    }

    #[test]
    fn a_wrong_address_is_rejected() {
        for (text, error) in [
            ("localhost:6379", AddressError::Scheme),
            ("http://localhost", AddressError::Scheme),
            ("redis://", AddressError::NoHost),
            ("redis://h:x", AddressError::Port),
            ("redis://h/x", AddressError::Database),
            ("redis+sentinel://h", AddressError::NoMaster),
            ("redis://h?db=1", AddressError::Parameter),
        ] {
            assert_eq!(text.parse::<RedisAddress>(), Err(error), "{text}");
        }
    }
}
