//! The kinds of values that a configuration key can have.

#[derive(Clone, Copy, PartialEq)]
pub enum Kind {
    Text,
    /// A text that may be empty: the feature is off then.
    OptionalText,
    Secret,
    Number {
        min: u64,
        max: u64,
    },
    /// A number, or `none`.
    Limit {
        max: u64,
    },
    Duration,
    Flag,
    Choice(&'static [&'static str]),
    Roles,
    Networks,
    /// Origins of web pages, or `*`.
    Origins,
    /// Names of queues.
    Names,
    /// A URI reference.
    Uri,
    /// Never shown, even in an error.
    Secrets,
    /// URL of a collector of spans; empty: off. Not shown in an error, because it may contain a password.
    Endpoint,
    /// Address of Redis. Not shown in an error, because it may contain a password.
    Redis,
    /// First part of the names of keys in Redis.
    KeyPrefix,
    /// Headers as `name=value`. Never shown, even in an error.
    Headers,
    /// Attributes as `name=value`.
    Pairs,
    /// A number from 0 to 1.
    Ratio,
}

impl Kind {
    /// Returns whether an error must not contain the value.
    pub fn is_secret(self) -> bool {
        matches!(self, Kind::Secret | Kind::Secrets | Kind::Endpoint | Kind::Redis | Kind::Headers)
    }
}
