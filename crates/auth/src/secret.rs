//! Creates the secrets of API keys.

use faena_domain::ApiKeyText;

/// Returns a new key with its own lookup part.
pub fn new_key_text() -> ApiKeyText {
    ApiKeyText::from_random(rand::random(), rand::random())
}

/// Returns a new secret for the key with this lookup part.
pub fn rotated_key_text(lookup: &str) -> ApiKeyText {
    ApiKeyText::with_lookup(lookup, rand::random())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rotated_key_keeps_its_lookup_part_and_has_another_secret() {
        let key = new_key_text();
        let rotated = rotated_key_text(key.lookup());
        assert_eq!(key.lookup(), rotated.lookup());
        assert_ne!(key, rotated);
        assert_ne!(new_key_text().lookup(), key.lookup());
    }
}
