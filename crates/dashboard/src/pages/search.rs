//! Parses the text of the job search.
//!
//! `type:invoice.send error:503 overdue` means: of that type, with that error, and "overdue" anywhere. Values with spaces are
//! quoted.

use crate::query::Pairs;

/// Filter names that a user types before a colon, and the API parameters they map to.
const NAMES: [(&str, &str); 12] = [
    ("type", "type"),
    ("name", "name"),
    ("queue", "queue"),
    ("tag", "tag"),
    ("error", "error"),
    ("payload", "payload"),
    ("reason", "reason"),
    ("priority", "priority"),
    ("worker", "workerId"),
    ("schedule", "scheduleId"),
    ("correlation", "correlationId"),
    ("state", "status"),
];

/// Returns the API parameters for a search text.
pub fn parse_search(text: &str) -> Pairs {
    let mut pairs = Pairs::default();
    let mut plain = Vec::new();
    for word in words(text) {
        let known = word.split_once(':').and_then(|(name, value)| {
            let (_, parameter) = NAMES.iter().find(|(known, _)| name.eq_ignore_ascii_case(known))?;
            (!value.is_empty()).then_some((*parameter, value.to_owned()))
        });
        match known {
            Some((parameter @ ("status" | "priority"), value)) => pairs.add(parameter, &value.to_uppercase()),
            Some((parameter, value)) => pairs.add(parameter, &value),
            None => plain.push(word),
        }
    }
    if !plain.is_empty() {
        pairs.add("q", &plain.join(" "));
    }
    pairs
}

/// Splits at spaces that are not inside quotes. Quotes are removed.
fn words(text: &str) -> Vec<String> {
    let (mut words, mut word, mut is_quoted) = (Vec::new(), String::new(), false);
    for character in text.chars() {
        match character {
            '"' => is_quoted = !is_quoted,
            ' ' if !is_quoted => words.push(std::mem::take(&mut word)),
            _ => word.push(character),
        }
    }
    words.push(word);
    words.retain(|word| !word.is_empty());
    words
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn named_words_become_filters_and_the_rest_is_searched_everywhere() {
        let pairs = parse_search(r#"type:invoice.send error:"503 Service" order 88412 state:failed"#);
        assert_eq!(pairs.get("type"), Some("invoice.send"));
        assert_eq!(pairs.get("error"), Some("503 Service"));
        assert_eq!(pairs.get("status"), Some("FAILED"));
        assert_eq!(pairs.get("q"), Some("order 88412"));
    }

    #[test]
    fn an_unknown_name_is_plain_text() {
        let pairs = parse_search("http://example.org type:");
        assert_eq!(pairs.get("q"), Some("http://example.org type:"));
        assert!(parse_search("   ").is_empty());
    }
}
