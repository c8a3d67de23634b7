//! A configuration key, and the kinds of values that it can have.

pub struct Key {
    /// `section.name`, as in the file.
    pub path: &'static str,
    pub env: &'static str,
    pub kind: ValueKind,
    pub default: &'static str,
    pub doc: &'static str,
}

pub const fn key(
    path: &'static str,
    env: &'static str,
    kind: ValueKind,
    default: &'static str,
    doc: &'static str,
) -> Key {
    Key { path, env, kind, default, doc }
}

#[derive(Clone, Copy, PartialEq)]
pub enum ValueKind {
    Text,
    /// A text that may be empty, which turns the feature off.
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
    /// URL of a trace collector; empty: off. Not shown in an error, because it may contain a password.
    Endpoint,
    /// Address of Redis. Not shown in an error, because it may contain a password.
    Redis,
    /// Prefix of key names in Redis.
    KeyPrefix,
    /// Headers as `name=value`. Never shown, even in an error.
    Headers,
    /// Attributes as `name=value`.
    Pairs,
    /// A number from 0 to 1.
    Ratio,
}

impl ValueKind {
    /// Returns whether an error must not contain the value.
    pub fn is_secret(self) -> bool {
        matches!(
            self,
            ValueKind::Secret | ValueKind::Secrets | ValueKind::Endpoint | ValueKind::Redis | ValueKind::Headers
        )
    }
}
