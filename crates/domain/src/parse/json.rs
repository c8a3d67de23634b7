//! Checks that other programs can read the JSON that Faena stores and passes on verbatim.

/// Deepest nesting that is accepted: many parsers stop at 128 or 256.
const MAX_DEPTH: usize = 100;

/// Returns an error if other programs may not be able to read `json`, which must be valid by JSON's grammar.
pub fn check_json(json: &str) -> Result<(), String> {
    if depth(json) > MAX_DEPTH {
        return Err(format!("must not be nested deeper than {MAX_DEPTH}"));
    }
    if has_lone_surrogate(json) {
        return Err("must not contain half of a surrogate pair".into());
    }
    Ok(())
}

/// Counts the levels of nested objects and arrays.
fn depth(json: &str) -> usize {
    let (mut depth, mut deepest, mut in_string, mut escaped) = (0usize, 0, false, false);
    for byte in json.bytes() {
        match byte {
            _ if escaped => escaped = false,
            b'\\' if in_string => escaped = true,
            b'"' => in_string = !in_string,
            b'{' | b'[' if !in_string => {
                depth += 1;
                deepest = deepest.max(depth);
            }
            b'}' | b']' if !in_string => depth = depth.saturating_sub(1),
            _ => {}
        }
    }
    deepest
}

/// Returns whether the text contains half of a surrogate pair. JSON's grammar allows it, but most parsers reject the
/// whole document.
///
/// Scans only documents that may contain an escaped surrogate.
fn has_lone_surrogate(json: &str) -> bool {
    if !json.contains("\\ud") && !json.contains("\\uD") {
        return false;
    }
    let mut rest = json.as_bytes();
    while let Some(at) = rest.iter().position(|byte| *byte == b'\\') {
        let code_unit = |bytes: &[u8]| {
            let digits = bytes.strip_prefix(b"\\u")?.get(..4)?;
            u16::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok()
        };
        let escape = &rest[at..];
        let length = match code_unit(escape) {
            Some(0xd800..=0xdbff) => match code_unit(escape.get(6..).unwrap_or_default()) {
                Some(0xdc00..=0xdfff) => 12,
                _ => return true,
            },
            Some(0xdc00..=0xdfff) => return true,
            Some(_) => 6,
            None => 2,
        };
        rest = escape.get(length..).unwrap_or_default();
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn brackets_inside_strings_do_not_nest() {
        assert_eq!(depth(r#"{"a":["[[{{",{"b":"\"["}]}"#), 3);
        assert!(check_json(&"[".repeat(MAX_DEPTH + 1)).is_err());
    }

    #[test]
    fn half_of_a_surrogate_pair_is_rejected_and_a_whole_pair_is_not() {
        assert!(check_json(r#""\ud83d\ude00""#).is_ok());
        assert!(check_json(r#""\ud83d""#).is_err());
        assert!(check_json(r#""\ude00\ud83d""#).is_err());
        assert!(check_json(r#""\\ud83d""#).is_ok(), "an escaped backslash does not begin a \\u escape");
    }
}
