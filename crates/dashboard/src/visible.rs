//! Makes bidirectional control characters visible.
//!
//! These invisible characters can reorder a whole line, so that a person would approve a plan other than the one they read.
//! Right-to-left text itself needs none of them.

/// Returns whether a character reorders the text around it.
fn is_bidi_control(char: char) -> bool {
    matches!(char, '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

/// Replaces bidirectional controls in a text with their code points: `[U+202E]`.
pub fn visible(text: String) -> String {
    replace(text, |char| format!("[U+{:04X}]", u32::from(char)))
}

/// Replaces bidirectional controls in JSON with escapes, which keeps its meaning.
pub fn visible_json(text: String) -> String {
    replace(text, |char| format!("\\u{:04x}", u32::from(char)))
}

fn replace(text: String, shown: fn(char) -> String) -> String {
    if !text.contains(is_bidi_control) {
        return text;
    }
    let mut replaced = String::with_capacity(text.len() + 64);
    for char in text.chars() {
        match is_bidi_control(char) {
            true => replaced.push_str(&shown(char)),
            false => replaced.push(char),
        }
    }
    replaced
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bidirectional_controls_are_shown_and_right_to_left_text_is_unchanged() {
        assert_eq!(visible("a\u{202e}b".into()), "a[U+202E]b");
        assert_eq!(visible("שלום مرحبا".into()), "שלום مرحبا");
        let json = visible_json(serde_json::json!({"a": "x\u{2066}y"}).to_string());
        let read: serde_json::Value = serde_json::from_str(&json).expect("the same JSON");
        assert_eq!((json.as_str(), read["a"].as_str()), (r#"{"a":"x\u2066y"}"#, Some("x\u{2066}y")));
    }
}
