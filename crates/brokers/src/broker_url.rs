//! The address of a broker, including a password that is never shown.

use std::{fmt, str::FromStr};

use url::Url;

const REDACTED: &str = "***";

/// URL of a broker: `amqp://user:password@host:5672/vhost`, and similar for NATS and Redis.
///
/// `Display` and `Debug` omit the password.
#[derive(Clone, PartialEq, Eq)]
pub struct BrokerUrl {
    url: Url,
    /// Texts to redact, longest first: the password, as written in the URL and decoded, and long parameter values.
    secrets: Vec<String>,
}

/// Reason why a text is not the URL of a broker. Never contains that text, which may hold a password.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BrokerUrlError {
    #[error(
        "not a valid URL ({0}); write amqp://user:password@host:5672/vhost, with special characters in the password as %XX"
    )]
    Unreadable(#[source] url::ParseError),
    #[error("unknown scheme {0:?}; use amqp, amqps, nats, tls, redis or rediss")]
    Scheme(String),
    #[error("no host; write amqp://user:password@host:5672/vhost")]
    NoHost,
    #[error("the database after the host must be a number, like redis://host:6379/0")]
    RedisDatabase,
    #[error("the virtual host after the host contains a slash; write it as %2f")]
    VirtualHost,
    #[error("a NATS URL has nothing after the host and port, like nats://host:4222")]
    NatsPath,
}

impl BrokerUrl {
    /// Parses a URL with one of the schemes `amqp`, `amqps`, `nats`, `tls`, `redis` and `rediss`.
    pub fn parse(text: &str) -> Result<Self, BrokerUrlError> {
        let url = Url::parse(text.trim()).map_err(BrokerUrlError::Unreadable)?;
        if !matches!(url.scheme(), "amqp" | "amqps" | "nats" | "tls" | "redis" | "rediss") {
            return Err(BrokerUrlError::Scheme(url.scheme().to_owned()));
        }
        if url.host_str().unwrap_or_default().is_empty() {
            return Err(BrokerUrlError::NoHost);
        }
        check_path(&url)?;
        let mut secrets = Vec::new();
        if let Some(raw) = secret_part(&url) {
            secrets.push(raw.to_owned());
            secrets.push(percent_decode(raw));
        }
        // Short values of parameters are settings, not secrets, and could occur in any text by chance.
        secrets.extend(url.query_pairs().map(|(_, value)| value.into_owned()).filter(|value| value.len() >= 6));
        secrets.retain(|secret| !secret.is_empty());
        secrets.sort_by_key(|secret| std::cmp::Reverse(secret.len()));
        secrets.dedup();
        Ok(BrokerUrl { url, secrets })
    }

    /// Returns the URL with its password, for the client library that connects.
    pub(crate) fn expose(&self) -> &str {
        self.url.as_str()
    }

    /// Returns the user name and the password, decoded. NATS: a user name without a password is a token.
    pub(crate) fn credentials(&self) -> (Option<String>, Option<String>) {
        let user = Some(self.url.username()).filter(|user| !user.is_empty()).map(percent_decode);
        (user, self.url.password().map(percent_decode))
    }

    /// Returns the URL without user name and password.
    pub(crate) fn without_credentials(&self) -> String {
        let mut url = self.url.clone();
        // Both fail only for URLs without a host, which `parse` rejects.
        let _ = url.set_username("");
        let _ = url.set_password(None);
        url.into()
    }

    /// Redacts the secrets of this URL in a text from a client library or a broker.
    ///
    /// The displayed form of this URL stays readable, even if the password equals the user name or the host.
    pub(crate) fn redact(&self, text: &str) -> String {
        let shown = self.to_string();
        let parts: Vec<String> = text.split(&shown).map(|part| self.without_secrets(part)).collect();
        parts.join(&shown)
    }

    fn without_secrets(&self, text: &str) -> String {
        self.secrets.iter().fold(text.to_owned(), |text, secret| text.replace(secret.as_str(), REDACTED))
    }
}

/// Checks the part after the host, which each kind of broker understands in its own way.
fn check_path(url: &Url) -> Result<(), BrokerUrlError> {
    let path = url.path().strip_prefix('/').unwrap_or(url.path());
    match url.scheme() {
        _ if path.is_empty() => Ok(()),
        "redis" | "rediss" => path.parse::<u32>().map(|_| ()).map_err(|_| BrokerUrlError::RedisDatabase),
        "amqp" | "amqps" if path.contains('/') => Err(BrokerUrlError::VirtualHost),
        "nats" | "tls" => Err(BrokerUrlError::NatsPath),
        _ => Ok(()),
    }
}

fn percent_decode(text: &str) -> String {
    // The crate `url` decodes only form data, where `+` means a space; in a user name or password it is a plus sign.
    let form = format!("x={}", text.replace('+', "%2B").replace('&', "%26"));
    url::form_urlencoded::parse(form.as_bytes()).next().map(|(_, value)| value.into_owned()).unwrap_or_default()
}

fn secret_part(url: &Url) -> Option<&str> {
    let is_token = matches!(url.scheme(), "nats" | "tls") && url.password().is_none();
    if is_token { Some(url.username()).filter(|token| !token.is_empty()) } else { url.password() }
}

impl FromStr for BrokerUrl {
    type Err = BrokerUrlError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        BrokerUrl::parse(text)
    }
}

impl fmt::Display for BrokerUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}://", self.url.scheme())?;
        match (secret_part(&self.url), self.url.password()) {
            (Some(_), Some(_)) => write!(f, "{}:{REDACTED}@", self.url.username())?,
            (Some(_), None) => write!(f, "{REDACTED}@")?,
            (None, _) if !self.url.username().is_empty() => write!(f, "{}@", self.url.username())?,
            _ => {}
        }
        write!(f, "{}", self.url.host_str().unwrap_or_default())?;
        if let Some(port) = self.url.port() {
            write!(f, ":{port}")?;
        }
        // The query is omitted: it may contain secrets too.
        f.write_str(self.url.path())
    }
}

impl fmt::Debug for BrokerUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

#[cfg(test)]
#[expect(clippy::unwrap_used, reason = "a failed test must point at its line")]
mod tests {
    use super::*;

    #[test]
    fn the_password_is_never_shown() {
        for (text, shown) in [
            ("amqp://user:se%2Fcret@host:5672/vhost", "amqp://user:***@host:5672/vhost"),
            ("amqp://user@host/%2f", "amqp://user@host/%2f"),
            ("redis://:secret@host:6379/0?password=secret", "redis://:***@host:6379/0"),
            ("nats://token@host:4222", "nats://***@host:4222"),
            ("nats://user:secret@host", "nats://user:***@host"),
            ("amqps://host", "amqps://host"),
        ] {
            let url = BrokerUrl::parse(text).unwrap();
            assert_eq!(url.to_string(), shown);
            assert_eq!(format!("{url:?}"), shown);
        }
    }

    #[test]
    fn the_password_is_removed_from_texts_of_libraries_and_brokers() {
        let url = BrokerUrl::parse("amqp://user:se%2Fcret@host").unwrap();
        assert_eq!(
            url.redact("access denied with se/cret or se%2Fcret for user"),
            "access denied with *** or *** for user"
        );
        let url = BrokerUrl::parse("redis://host/0?password=se%2Fcret&protocol=3").unwrap();
        assert_eq!(url.redact("denied with se/cret, protocol 3"), "denied with ***, protocol 3");
        assert_eq!(BrokerUrl::parse("amqp://user:@host").unwrap().redact("unchanged"), "unchanged");
        let url = BrokerUrl::parse("amqp://guest:guest@host").unwrap();
        assert_eq!(url.redact(&format!("lost {url}: guest")), "lost amqp://guest:***@host: ***");
    }

    #[test]
    fn user_name_and_password_are_decoded_and_can_be_omitted() {
        let url = BrokerUrl::parse("nats://us%40er:a+b%26c@host:4222").unwrap();
        assert_eq!(url.credentials(), (Some("us@er".into()), Some("a+b&c".into())));
        assert_eq!(url.without_credentials(), "nats://host:4222");
        assert_eq!(BrokerUrl::parse("nats://host").unwrap().credentials(), (None, None));
    }

    #[test]
    fn the_part_after_the_host_must_suit_the_broker() {
        for good in ["redis://h", "redis://h/", "redis://h/15", "amqp://h/%2f", "amqp://h/a%2fb", "nats://h:4222/"] {
            assert!(BrokerUrl::parse(good).is_ok(), "{good}");
        }
        for (bad, error) in [
            ("redis://h/abc", BrokerUrlError::RedisDatabase),
            ("rediss://h/0/1", BrokerUrlError::RedisDatabase),
            ("redis://h/-1", BrokerUrlError::RedisDatabase),
            ("amqp://h/a/b", BrokerUrlError::VirtualHost),
            ("nats://h/stream", BrokerUrlError::NatsPath),
        ] {
            assert_eq!(BrokerUrl::parse(bad), Err(error), "{bad}");
        }
    }

    #[test]
    fn the_error_does_not_contain_the_rejected_text() {
        for text in
            ["amqp//user:secret@host", "amqp://user:sec/ret@", "http://user:secret@host", "amqp:///vhost-secret"]
        {
            let error = BrokerUrl::parse(text).unwrap_err();
            assert!(!format!("{error} {error:?}").contains("secret"), "{error}");
        }
    }
}
