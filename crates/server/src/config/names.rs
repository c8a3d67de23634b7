//! Checks of names, patterns and URIs in the configuration.

/// Returns whether a text is a name of 1 to `max_bytes` bytes without control characters and without spaces at its beginning or end.
pub fn is_name(text: &str, max_bytes: usize) -> bool {
    !text.is_empty() && text.len() <= max_bytes && text.trim() == text && !text.chars().any(char::is_control)
}

/// Returns whether a text can be the type or the queue of a job: a name of 1 to 100 characters, see [`is_name`].
pub fn is_type_or_queue(text: &str) -> bool {
    is_name(text, usize::MAX) && text.chars().count() <= 100
}

/// Returns whether a text is a NATS subject without wildcards: words separated by dots.
pub fn is_subject(text: &str) -> bool {
    is_subject_filter(text) && !text.contains(['*', '>'])
}

/// Returns whether a text selects NATS subjects: words separated by dots. Each may be `*`, and the last one `>`.
pub fn is_subject_filter(text: &str) -> bool {
    let words: Vec<&str> = text.split('.').collect();
    words.iter().enumerate().all(|(at, word)| match *word {
        "*" => true,
        ">" => at + 1 == words.len(),
        word => is_plain_word(word) && !word.contains(['*', '>']),
    })
}

/// Returns whether a text is a binding pattern of a RabbitMQ topic exchange: words separated by dots. Each may be `*`
/// or `#`.
pub fn is_binding_pattern(text: &str) -> bool {
    text.len() <= 255
        && text.split('.').all(|word| matches!(word, "*" | "#") || is_plain_word(word) && !word.contains(['*', '#']))
}

fn is_plain_word(word: &str) -> bool {
    !word.is_empty() && !word.chars().any(|character| character.is_whitespace() || character.is_control())
}

/// Returns whether a text matches a pattern in which `*` stands for any text.
pub fn matches(pattern: &str, text: &str) -> bool {
    let mut parts = pattern.split('*');
    let Some(mut rest) = parts.next().and_then(|first| text.strip_prefix(first)) else { return false };
    let Some(last) = parts.next_back() else { return rest.is_empty() };
    for part in parts {
        let Some(at) = rest.find(part) else { return false };
        rest = &rest[at + part.len()..];
    }
    rest.ends_with(last)
}

/// Returns whether a text is a URI reference, as the `source` of CloudEvents must be.
pub fn is_uri_reference(text: &str) -> bool {
    const UNSAFE: &str = "\"<>\\^`{|}";
    !text.is_empty() && text.chars().all(|c| c.is_ascii_graphic() && !UNSAFE.contains(c))
}

/// Returns whether a text is `*` or the origin of a web page as a browser writes it: the scheme, the host, and the port
/// unless it is the default one.
pub fn is_origin(text: &str) -> bool {
    let is_same =
        |url: url::Url| matches!(url.scheme(), "http" | "https") && url.origin().ascii_serialization() == text;
    text == "*" || (!text.contains('*') && url::Url::parse(text).is_ok_and(is_same))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn subjects_and_patterns_are_words_with_dots_between() {
        for good in ["a", "a.b", "a.*", "a.>", ">", "*", "a-b.c_d"] {
            assert!(is_subject_filter(good), "{good}");
        }
        for bad in ["", "a..b", ".a", "a.", "a b", "a.>.b", "a*.b", "a>", "a.\t"] {
            assert!(!is_subject_filter(bad) && !is_subject(bad), "{bad}");
        }
        assert!(is_subject("a.b") && !is_subject("a.*") && !is_subject("a.>"));
        for good in ["#", "*", "order.#", "order.*.paid"] {
            assert!(is_binding_pattern(good), "{good}");
        }
        for bad in ["", "a..b", "a b", "order.#x"] {
            assert!(!is_binding_pattern(bad), "{bad}");
        }
    }

    #[test]
    fn a_star_stands_for_any_text() {
        for (pattern, text) in [("*", "a.b"), ("a.*", "a.b"), ("*.b", "a.b"), ("a*b", "a.x.b"), ("a.b", "a.b")] {
            assert!(matches(pattern, text), "{pattern} {text}");
        }
        for (pattern, text) in [("a", "a.b"), ("b.*", "a.b"), ("a.*c", "a.b"), ("a*a", "a"), ("", "a")] {
            assert!(!matches(pattern, text), "{pattern} {text}");
        }
    }

    #[test]
    fn an_origin_is_written_as_a_browser_sends_it() {
        for good in ["*", "https://app.example.com", "http://localhost:8080", "http://[::1]:3000"] {
            assert!(is_origin(good), "{good}");
        }
        for bad in [
            "app.example.com",
            "https://app.example.com/",
            "https://App.example.com",
            "https://a.b:443",
            "null",
            "https://*.b",
            "file://x",
        ] {
            assert!(!is_origin(bad), "{bad}");
        }
    }

    #[test]
    fn a_uri_reference_has_no_spaces() {
        assert!(is_uri_reference("/faena") && is_uri_reference("https://example.com/jobs?x=%20"));
        assert!(!is_uri_reference("") && !is_uri_reference("my jobs") && !is_uri_reference("a\tb"));
    }
}
