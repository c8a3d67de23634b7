//! Where a broker is, with the secret to get in, which nobody gets to see.

use std::{fmt, str::FromStr};

use url::Url;

const HIDDEN: &str = "***";

/// `amqp://user:password@host:5672/vhost`, and the like for NATS and Redis. Shown, also by `Debug`, without the password.
#[derive(Clone, PartialEq, Eq)]
pub struct BrokerUrl {
    url: Url,
    /// As it stands in the URL and as it is sent, longest first.
    secrets: Vec<String>,
}

/// What is wrong with it, without the text itself.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BrokerUrlError {
    #[error(
        "is no URL ({0}); it should look like amqp://user:password@host:5672/vhost, with special characters of the password as %XX"
    )]
    Unreadable(url::ParseError),
    #[error("has the scheme {0:?}; amqp, amqps, nats, tls, redis and rediss are known")]
    Scheme(String),
    #[error("names no host")]
    NoHost,
}

impl BrokerUrl {
    pub fn parse(text: &str) -> Result<Self, BrokerUrlError> {
        let url = Url::parse(text.trim()).map_err(BrokerUrlError::Unreadable)?;
        if !matches!(url.scheme(), "amqp" | "amqps" | "nats" | "tls" | "redis" | "rediss") {
            return Err(BrokerUrlError::Scheme(url.scheme().to_owned()));
        }
        if url.host_str().unwrap_or_default().is_empty() {
            return Err(BrokerUrlError::NoHost);
        }
        let mut secrets = Vec::new();
        if let Some(raw) = secret_part(&url) {
            let sent = decoded(raw);
            secrets.push(raw.to_owned());
            secrets.push(sent);
        }
        secrets.retain(|secret| !secret.is_empty());
        secrets.sort_by_key(|secret| std::cmp::Reverse(secret.len()));
        secrets.dedup();
        Ok(BrokerUrl { url, secrets })
    }

    /// The whole URL, for the library that connects.
    pub(crate) fn expose(&self) -> &str {
        self.url.as_str()
    }

    /// Name and password as they are sent. NATS: a name alone is a token.
    pub(crate) fn credentials(&self) -> (Option<String>, Option<String>) {
        let user = Some(self.url.username()).filter(|user| !user.is_empty()).map(decoded);
        (user, self.url.password().map(decoded))
    }

    /// The same place without name and password.
    pub(crate) fn without_credentials(&self) -> String {
        let mut url = self.url.clone();
        // Both can only fail for URLs without a host, and those are refused above.
        let _ = url.set_username("");
        let _ = url.set_password(None);
        url.into()
    }

    /// A text of a library or broker, without the password should it hold it. The URL as it is shown may stand in it, and stays.
    pub(crate) fn clean(&self, text: impl fmt::Display) -> String {
        let (text, shown) = (text.to_string(), self.to_string());
        let parts: Vec<String> = text.split(&shown).map(|part| self.without_secrets(part)).collect();
        parts.join(&shown)
    }

    fn without_secrets(&self, text: &str) -> String {
        self.secrets.iter().fold(text.to_owned(), |text, secret| text.replace(secret.as_str(), HIDDEN))
    }
}

fn decoded(text: &str) -> String {
    // `url` brings the decoding of forms only, where + is a blank; here it is a plus.
    let form = format!("x={}", text.replace('+', "%2B").replace('&', "%26"));
    url::form_urlencoded::parse(form.as_bytes()).next().map(|(_, value)| value.into_owned()).unwrap_or_default()
}

fn secret_part(url: &Url) -> Option<&str> {
    let token = matches!(url.scheme(), "nats" | "tls") && url.password().is_none();
    if token { Some(url.username()).filter(|token| !token.is_empty()) } else { url.password() }
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
            (Some(_), Some(_)) => write!(f, "{}:{HIDDEN}@", self.url.username())?,
            (Some(_), None) => write!(f, "{HIDDEN}@")?,
            (None, _) if !self.url.username().is_empty() => write!(f, "{}@", self.url.username())?,
            _ => {}
        }
        write!(f, "{}", self.url.host_str().unwrap_or_default())?;
        if let Some(port) = self.url.port() {
            write!(f, ":{port}")?;
        }
        // Without what stands behind the question mark: it may hold secrets too.
        f.write_str(self.url.path())
    }
}

impl fmt::Debug for BrokerUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

#[cfg(test)]
#[expect(clippy::unwrap_used, reason = "a test that cannot go on shall say where")]
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
    fn texts_of_others_are_cleaned_of_it() {
        let url = BrokerUrl::parse("amqp://user:se%2Fcret@host").unwrap();
        assert_eq!(url.clean("no way in with se/cret or se%2Fcret for user"), "no way in with *** or *** for user");
        assert_eq!(BrokerUrl::parse("amqp://user:@host").unwrap().clean("as it is"), "as it is");
        let url = BrokerUrl::parse("amqp://guest:guest@host").unwrap();
        assert_eq!(url.clean(format!("lost {url}: guest")), "lost amqp://guest:***@host: ***");
    }

    #[test]
    fn name_and_password_are_decoded_and_can_be_left_out() {
        let url = BrokerUrl::parse("nats://us%40er:a+b%26c@host:4222").unwrap();
        assert_eq!(url.credentials(), (Some("us@er".into()), Some("a+b&c".into())));
        assert_eq!(url.without_credentials(), "nats://host:4222");
        assert_eq!(BrokerUrl::parse("nats://host").unwrap().credentials(), (None, None));
    }

    #[test]
    fn what_is_wrong_is_said_without_the_text() {
        for text in
            ["amqp//user:secret@host", "amqp://user:sec/ret@", "http://user:secret@host", "amqp:///vhost-secret"]
        {
            let error = BrokerUrl::parse(text).unwrap_err();
            assert!(!format!("{error} {error:?}").contains("secret"), "{error}");
        }
    }
}
