//! API keys: their text, what they permit, and how a presented key is compared with the stored one.
//!
//! A key is `fna_<lookup>_<secret>`. The lookup part is public and finds the stored key; only the SHA-256 of the whole text is
//! stored. The secret has 258 random bits, so a slow password hash would add nothing.

use std::fmt;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;

use crate::{ApiKeyId, FieldError, Timestamp, field_error::check_text, parse::Fields};

const PREFIX: &str = "fna_";
const LOOKUP_CHARACTERS: usize = 12;
const SECRET_CHARACTERS: usize = 43;
/// 64 characters, so that six random bits choose one without bias.
const ALPHABET: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";
/// 32 characters that are hard to confuse, because people read the lookup part aloud.
const LOOKUP_ALPHABET: &[u8; 32] = b"abcdefghijkmnpqrstuvwxyz23456789";

/// The text of an API key. `Debug` hides the secret.
#[derive(Clone, PartialEq, Eq)]
pub struct ApiKeyText(String);

/// What an API key permits. `admin` includes everything, `write` includes `read`.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum KeyScope {
    /// Reading jobs, queues, schedules and events.
    Read,
    /// Submitting and changing jobs and schedules.
    Write,
    /// Claiming jobs and reporting on them.
    Worker,
    /// Everything, including limits, keys and the audit log.
    Admin,
}

impl KeyScope {
    pub const ALL: [KeyScope; 4] = [KeyScope::Read, KeyScope::Write, KeyScope::Worker, KeyScope::Admin];

    pub fn as_str(self) -> &'static str {
        match self {
            KeyScope::Read => "read",
            KeyScope::Write => "write",
            KeyScope::Worker => "worker",
            KeyScope::Admin => "admin",
        }
    }

    pub fn parse(text: &str) -> Option<KeyScope> {
        KeyScope::ALL.into_iter().find(|scope| scope.as_str() == text)
    }

    /// Returns whether a key with this scope may call a route that needs `needed`.
    pub fn includes(self, needed: KeyScope) -> bool {
        self == needed || self == KeyScope::Admin || (self == KeyScope::Write && needed == KeyScope::Read)
    }
}

impl fmt::Display for KeyScope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// SHA-256 of a key's or a session token's text, compared in constant time.
#[derive(Clone, Copy)]
pub struct KeyHash(pub [u8; 32]);

impl KeyHash {
    pub fn matches(&self, other: &KeyHash) -> bool {
        self.0.ct_eq(&other.0).into()
    }
}

impl fmt::Debug for KeyHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("KeyHash(…)")
    }
}

/// Returns the text of a secret, with six random bits per character.
pub(crate) fn secret_characters(random: [u8; SECRET_CHARACTERS]) -> String {
    random.map(|byte| char::from(ALPHABET[usize::from(byte % 64)])).into_iter().collect()
}

impl ApiKeyText {
    /// Builds a key from random bytes, one per character.
    pub fn from_random(lookup: [u8; LOOKUP_CHARACTERS], secret: [u8; SECRET_CHARACTERS]) -> ApiKeyText {
        let lookup = lookup.map(|byte| char::from(LOOKUP_ALPHABET[usize::from(byte % 32)]));
        Self::with_lookup(&String::from_iter(lookup), secret)
    }

    /// Builds another key with the same lookup part, for a rotation.
    pub fn with_lookup(lookup: &str, secret: [u8; SECRET_CHARACTERS]) -> ApiKeyText {
        ApiKeyText(format!("{PREFIX}{lookup}_{}", secret_characters(secret)))
    }

    /// Parses a key as a caller sent it. `None`: it cannot be an API key of Faena.
    pub fn parse(text: &str) -> Option<ApiKeyText> {
        let (lookup, secret) = text.strip_prefix(PREFIX)?.split_once('_')?;
        let is_valid = lookup.len() == LOOKUP_CHARACTERS
            && secret.len() == SECRET_CHARACTERS
            && lookup.bytes().all(|byte| LOOKUP_ALPHABET.contains(&byte))
            && secret.bytes().all(|byte| ALPHABET.contains(&byte));
        is_valid.then(|| ApiKeyText(text.to_owned()))
    }

    /// Returns the public part by which the stored key is found.
    pub fn lookup(&self) -> &str {
        &self.0[PREFIX.len()..PREFIX.len() + LOOKUP_CHARACTERS]
    }

    pub fn hash(&self) -> KeyHash {
        KeyHash(Sha256::digest(self.0.as_bytes()).into())
    }

    /// Returns the whole text, to be shown once.
    pub fn reveal(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for ApiKeyText {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{PREFIX}{}_…", self.lookup())
    }
}

/// An API key without its secret, as the API shows it.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ApiKey {
    pub id: ApiKeyId,
    /// Public part of the key: `fna_<lookup>_…`.
    pub lookup: String,
    pub name: String,
    pub scopes: Vec<KeyScope>,
    /// Queues that the key is restricted to. `null`: all queues.
    pub queues: Option<Vec<String>>,
    /// Groups that the key belongs to. The approvals of tasks name the groups that may decide.
    #[serde(default)]
    pub groups: Vec<String>,
    /// Whether the payloads, results, data, logs and errors of jobs and tasks are hidden from the key.
    #[serde(default)]
    pub without_payloads: bool,
    pub created_at: Timestamp,
    pub created_by: String,
    pub expires_at: Option<Timestamp>,
    /// When it was last replaced by a rotation.
    pub rotated_at: Option<Timestamp>,
    /// Until when the key from before the last rotation is accepted as well.
    pub previous_valid_until: Option<Timestamp>,
    pub revoked_at: Option<Timestamp>,
    pub last_used_at: Option<Timestamp>,
}

impl ApiKey {
    pub fn permits(&self, needed: KeyScope) -> bool {
        self.scopes.iter().any(|scope| scope.includes(needed))
    }

    /// Returns why the key is not accepted at `now`, or `None` if it is.
    pub fn rejection(&self, now: Timestamp) -> Option<&'static str> {
        if self.revoked_at.is_some() {
            Some("this API key was revoked")
        } else if self.expires_at.is_some_and(|at| at <= now) {
            Some("this API key has expired")
        } else {
            None
        }
    }
}

/// An API key with the hashes that a presented key is compared with.
#[derive(Clone, Debug)]
pub struct StoredApiKey {
    pub key: ApiKey,
    pub hash: KeyHash,
    /// Hash of the key from before the last rotation, valid until `previous_valid_until`.
    pub previous_hash: Option<KeyHash>,
}

impl StoredApiKey {
    /// Returns a new key with this text.
    pub fn new(new: NewApiKey, text: &ApiKeyText, created_by: &str, now: Timestamp) -> StoredApiKey {
        let key = ApiKey {
            id: ApiKeyId::new(),
            lookup: text.lookup().into(),
            name: new.name,
            scopes: new.scopes,
            queues: new.queues,
            groups: new.groups,
            without_payloads: new.without_payloads,
            created_at: now,
            created_by: created_by.into(),
            expires_at: new.expires_at,
            rotated_at: None,
            previous_valid_until: None,
            revoked_at: None,
            last_used_at: None,
        };
        StoredApiKey { key, hash: text.hash(), previous_hash: None }
    }

    /// Returns whether `presented` is this key. Compares both hashes in constant time.
    pub fn matches(&self, presented: &KeyHash, now: Timestamp) -> bool {
        let is_current = self.hash.matches(presented);
        let is_previous = self.previous_hash.is_some_and(|hash| hash.matches(presented));
        let previous_is_valid = self.key.previous_valid_until.is_some_and(|until| now < until);
        is_current || (is_previous && previous_is_valid)
    }
}

/// What a caller asks for when it creates a key.
#[derive(Clone, PartialEq, Debug)]
pub struct NewApiKey {
    pub name: String,
    pub scopes: Vec<KeyScope>,
    pub queues: Option<Vec<String>>,
    pub groups: Vec<String>,
    pub without_payloads: bool,
    pub expires_at: Option<Timestamp>,
}

/// Maximum number of groups that a caller belongs to.
const MAX_GROUPS: usize = 50;

/// Parses groups that are separated by commas, as a reverse proxy names them in a header. Leaves out invalid names.
pub fn parse_groups(text: &str) -> Vec<String> {
    let names = text.split(',').map(|name| name.trim_matches([' ', '\t'])).filter(|name| is_group(name));
    let mut groups: Vec<String> = names.take(MAX_GROUPS).map(str::to_owned).collect();
    groups.sort();
    groups.dedup();
    groups
}

/// Returns whether a text can be the name of a group. A comma is not allowed, because it separates groups in a list.
fn is_group(name: &str) -> bool {
    let mut errors = Vec::new();
    check_text(&mut errors, "", name, 100);
    errors.is_empty() && !name.contains(',') && name.trim_matches(' ') == name
}

impl NewApiKey {
    /// Parses the fields of a request. Returns every invalid field.
    pub fn parse(mut fields: Fields<'_>, now: Timestamp) -> Result<NewApiKey, Vec<FieldError>> {
        let name = fields.text("name");
        if name.is_none() {
            fields.reject("name", "is required");
        }
        let mut scopes: Vec<KeyScope> = fields.list("scopes", "a list of read, write, worker, admin");
        scopes.sort();
        scopes.dedup();
        let queues = fields.take("queues", "a list of queue names");
        let mut groups: Vec<String> = fields.list("groups", "a list of names of groups");
        groups.sort();
        groups.dedup();
        let without_payloads = fields.take("withoutPayloads", "true or false").unwrap_or_default();
        let expires_at = fields.time("expiresAt");
        let new = NewApiKey { name: name.unwrap_or_default(), scopes, queues, groups, without_payloads, expires_at };
        let mut errors = fields.finish();
        let found = new.check(now).into_iter().filter(|found| errors.iter().all(|error| error.path != found.path));
        let found: Vec<FieldError> = found.collect();
        errors.extend(found);
        if errors.is_empty() { Ok(new) } else { Err(errors) }
    }

    /// Fails if this is the first key and cannot manage others: from then on every call needs a key.
    pub fn check_first(&self, is_first: bool) -> Result<(), FieldError> {
        if is_first && !self.scopes.contains(&KeyScope::Admin) {
            return Err(FieldError::new(
                "scopes",
                "the first key must have admin: from then on every call needs a key",
            ));
        }
        Ok(())
    }

    /// Returns every invalid field.
    pub fn check(&self, now: Timestamp) -> Vec<FieldError> {
        let mut errors = Vec::new();
        check_text(&mut errors, "name", &self.name, 100);
        if self.scopes.is_empty() {
            errors.push(FieldError::new("scopes", "must name at least one of read, write, worker, admin"));
        }
        if let Some(queues) = &self.queues {
            if queues.is_empty() || queues.len() > 100 {
                errors.push(FieldError::new("queues", "must have 1 to 100 names; omit it to allow all queues"));
            }
            for (index, queue) in queues.iter().enumerate() {
                check_text(&mut errors, &format!("queues[{index}]"), queue, 100);
            }
            if self.scopes.contains(&KeyScope::Admin) {
                errors.push(FieldError::new("queues", "an admin key cannot be restricted to queues"));
            }
        }
        if self.groups.len() > MAX_GROUPS {
            errors.push(FieldError::new("groups", format!("must have at most {MAX_GROUPS} names")));
        }
        for (index, group) in self.groups.iter().enumerate().filter(|(_, group)| !is_group(group)) {
            let message = "must have 1 to 100 characters, without commas, control characters, or spaces at its ends";
            errors.push(FieldError::new(
                format!("groups[{index}]"),
                format!("{message}, is \"{}\"", group.escape_debug()),
            ));
        }
        // The holder of a key that may write could send payloads to itself, with a webhook or a task.
        if self.without_payloads && self.scopes != [KeyScope::Read] {
            errors.push(FieldError::new(
                "withoutPayloads",
                "only a key with the scope read alone can be without payloads",
            ));
        }
        if self.expires_at.is_some_and(|at| at <= now) {
            errors.push(FieldError::new("expiresAt", "must be in the future"));
        }
        errors
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> ApiKeyText {
        ApiKeyText::from_random(std::array::from_fn(|n| n as u8), std::array::from_fn(|n| 200 - n as u8))
    }

    fn stored(text: &ApiKeyText) -> StoredApiKey {
        let new = NewApiKey {
            name: "ci".into(),
            scopes: vec![KeyScope::Write],
            queues: None,
            groups: vec![],
            without_payloads: false,
            expires_at: None,
        };
        StoredApiKey::new(new, text, "loopback", Timestamp::from_ms(0))
    }

    #[test]
    fn a_key_is_parsed_and_its_secret_is_not_shown() {
        let key = sample();
        assert_eq!(ApiKeyText::parse(key.reveal()), Some(key.clone()));
        let shown = format!("{key:?}");
        assert_eq!(shown, format!("fna_{}_…", key.lookup()));
        assert!(!format!("{:?}", key.hash()).contains(char::is_numeric), "a hash is not shown either");
    }

    #[test]
    fn a_text_that_is_not_a_key_is_not_parsed() {
        let text = sample().reveal().to_owned();
        for wrong in ["", "fna_", "fna__", "Bearer x", &text[1..], &text[..text.len() - 1], &format!("{text}A")] {
            assert_eq!(ApiKeyText::parse(wrong), None, "{wrong}");
        }
        assert_eq!(ApiKeyText::parse(&text.replace(&text[20..21], "é")), None);
    }

    #[test]
    fn admin_includes_everything_and_write_includes_read() {
        for (has, needed, expected) in [
            (KeyScope::Read, KeyScope::Read, true),
            (KeyScope::Read, KeyScope::Write, false),
            (KeyScope::Write, KeyScope::Read, true),
            (KeyScope::Write, KeyScope::Worker, false),
            (KeyScope::Worker, KeyScope::Read, false),
            (KeyScope::Admin, KeyScope::Worker, true),
        ] {
            assert_eq!(has.includes(needed), expected, "{has} {needed}");
        }
    }

    #[test]
    fn the_previous_key_is_accepted_until_the_overlap_ends() {
        let (old, new) = (sample(), ApiKeyText::with_lookup(sample().lookup(), [7; SECRET_CHARACTERS]));
        let mut key = stored(&new);
        key.previous_hash = Some(old.hash());
        key.key.previous_valid_until = Some(Timestamp::from_ms(1_000));
        assert!(key.matches(&old.hash(), Timestamp::from_ms(999)));
        assert!(!key.matches(&old.hash(), Timestamp::from_ms(1_000)));
        assert!(key.matches(&new.hash(), Timestamp::from_ms(1_000)));
    }

    #[test]
    fn revoked_and_expired_keys_are_rejected() {
        let mut key = stored(&sample()).key;
        assert_eq!(key.rejection(Timestamp::from_ms(5)), None);
        key.expires_at = Some(Timestamp::from_ms(5));
        assert_eq!(key.rejection(Timestamp::from_ms(4)), None);
        assert_eq!(key.rejection(Timestamp::from_ms(5)), Some("this API key has expired"));
        key.revoked_at = Some(Timestamp::from_ms(1));
        assert_eq!(key.rejection(Timestamp::from_ms(4)), Some("this API key was revoked"));
    }

    #[test]
    fn every_invalid_field_of_a_new_key_is_reported() {
        let key = NewApiKey {
            name: String::new(),
            scopes: vec![KeyScope::Admin],
            queues: Some(vec![String::new()]),
            groups: ["ok", "a,b", "", " blank", "line\nbreak"].map(String::from).to_vec(),
            without_payloads: true,
            expires_at: Some(Timestamp::from_ms(1)),
        };
        let paths: Vec<String> = key.check(Timestamp::from_ms(1)).into_iter().map(|error| error.path).collect();
        let groups = ["groups[1]", "groups[2]", "groups[3]", "groups[4]"];
        assert_eq!(paths[..3], ["name", "queues[0]", "queues"]);
        assert_eq!(paths[3..7], groups);
        assert_eq!(paths[7..], ["withoutPayloads", "expiresAt"]);
        let many = NewApiKey { groups: (0..51).map(|n| n.to_string()).collect(), ..key };
        assert!(many.check(Timestamp::from_ms(0)).iter().any(|error| error.path == "groups"));
    }

    #[test]
    fn only_a_key_that_reads_and_does_nothing_else_can_be_without_payloads() {
        let rejected = |scopes: &[KeyScope]| {
            let key = NewApiKey {
                name: "viewer".into(),
                scopes: scopes.to_vec(),
                queues: None,
                groups: vec![],
                without_payloads: true,
                expires_at: None,
            };
            key.check(Timestamp::from_ms(0)).into_iter().map(|error| error.path).collect::<Vec<_>>()
        };
        assert_eq!(rejected(&[KeyScope::Read]), [""; 0]);
        for other in [KeyScope::Write, KeyScope::Worker, KeyScope::Admin] {
            assert_eq!(rejected(&[KeyScope::Read, other]), ["withoutPayloads"], "{other}");
            assert_eq!(rejected(&[other]), ["withoutPayloads"], "{other}");
        }
    }

    #[test]
    fn groups_in_a_header_are_separated_by_commas() {
        assert_eq!(parse_groups(" reviewers,managers , reviewers,,"), ["managers", "reviewers"]);
        assert_eq!(parse_groups(""), [""; 0]);
        assert_eq!(parse_groups(&format!("{},ok", "x".repeat(101))), ["ok"]);
        assert_eq!(parse_groups(&(0..200).map(|n| n.to_string()).collect::<Vec<_>>().join(",")).len(), 50);
    }
}
