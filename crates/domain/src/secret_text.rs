//! Secrets that are sent in messages.

use std::{borrow::Cow, fmt};

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::{KeyHash, api_key::secret_characters};

/// Beginning of every session token, so that people and scanners recognise one.
const SESSION_PREFIX: &str = "fst_";

/// A secret that a caller sends or receives. `Debug` hides it.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct SecretText(String);

impl SecretText {
    /// Builds the token of a worker's session from random bytes, one per character.
    ///
    /// It has 258 random bits, so that a plain SHA-256 of it can be stored.
    pub fn session_token(random: [u8; 43]) -> SecretText {
        SecretText(format!("{SESSION_PREFIX}{}", secret_characters(random)))
    }

    pub fn hash(&self) -> KeyHash {
        KeyHash(Sha256::digest(self.0.as_bytes()).into())
    }

    /// Returns the secret text.
    pub fn reveal(&self) -> &str {
        &self.0
    }
}

impl From<String> for SecretText {
    fn from(text: String) -> SecretText {
        SecretText(text)
    }
}

impl fmt::Debug for SecretText {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("\"…\"")
    }
}

impl JsonSchema for SecretText {
    fn inline_schema() -> bool {
        true
    }

    fn schema_name() -> Cow<'static, str> {
        "SecretText".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({"type": "string"})
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn debug_output_hides_the_secret() {
        let token = SecretText::session_token([7; 43]);
        assert!(token.reveal().starts_with("fst_") && token.reveal().len() == 47);
        assert_eq!(format!("{token:?}"), "\"…\"");
        assert!(token.hash().matches(&SecretText::from(token.reveal().to_owned()).hash()));
        assert!(!token.hash().matches(&SecretText::session_token([8; 43]).hash()));
    }
}
