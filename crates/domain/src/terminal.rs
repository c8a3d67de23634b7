//! Makes text safe for a terminal.
//!
//! Callers, workers and brokers choose names, errors and log lines. A terminal interprets the control sequences in them, and shows
//! text after a bidirectional override in another order.

use std::{
    borrow::Cow,
    io::{self, Write},
};

/// Escapes control characters other than line breaks and tabs, and characters that change the direction of text, as in JSON.
pub fn printable(text: &str) -> Cow<'_, str> {
    escape(text, |c| is_control(c) || changes_direction(c))
}

fn is_control(c: char) -> bool {
    (c.is_control() && c != '\n' && c != '\t') || matches!(c, '\u{2028}' | '\u{2029}')
}

fn changes_direction(c: char) -> bool {
    matches!(c, '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

fn escape(text: &str, is_unsafe: impl Fn(char) -> bool) -> Cow<'_, str> {
    if !text.contains(&is_unsafe) {
        return Cow::Borrowed(text);
    }
    let mut escaped = String::with_capacity(text.len() + 16);
    for c in text.chars() {
        if is_unsafe(c) {
            escaped.push_str(&format!("\\u{:04x}", u32::from(c)));
        } else {
            escaped.push(c);
        }
    }
    Cow::Owned(escaped)
}

/// Writes to a log and escapes characters that are not safe for a terminal.
///
/// If the log has colours, control characters pass unchanged: they are its colour codes. The control characters in
/// messages have already been escaped.
pub struct LogWriter<W> {
    inner: W,
    has_colours: bool,
}

impl<W> LogWriter<W> {
    pub fn new(inner: W, has_colours: bool) -> LogWriter<W> {
        LogWriter { inner, has_colours }
    }
}

impl<W: Write> Write for LogWriter<W> {
    /// Expects whole lines: a character must not be split.
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let text = String::from_utf8_lossy(bytes);
        let text = if self.has_colours { escape(&text, changes_direction) } else { printable(&text) };
        self.inner.write_all(text.as_bytes())?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.inner.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_characters_and_changes_of_direction_are_escaped() {
        assert_eq!(printable("plain ñ 日本 עברית 👩‍🔧\n\ttext"), "plain ñ 日本 עברית 👩‍🔧\n\ttext");
        assert_eq!(printable("\u{1b}[31mred\u{7}\r\u{9b}2J\0"), "\\u001b[31mred\\u0007\\u000d\\u009b2J\\u0000");
        assert_eq!(printable("a\u{202e}b\u{2066}c\u{200f}\u{2028}"), "a\\u202eb\\u2066c\\u200f\\u2028");
    }

    #[test]
    fn escaped_json_means_the_same() {
        let value = "\u{202e}evil\u{85}";
        let text = serde_json::to_string(value).expect("JSON");
        assert_eq!(serde_json::from_str::<String>(&printable(&text)).expect("JSON"), value);
    }

    #[test]
    fn a_log_keeps_its_colours_only() {
        let written = |has_colours| {
            let mut writer = LogWriter::new(Vec::new(), has_colours);
            writer.write_all("\u{1b}[2mINFO\u{1b}[0m \u{202e}x\n".as_bytes()).expect("written");
            String::from_utf8(writer.inner).expect("text")
        };
        assert_eq!(written(true), "\u{1b}[2mINFO\u{1b}[0m \\u202ex\n");
        assert_eq!(written(false), "\\u001b[2mINFO\\u001b[0m \\u202ex\n");
    }
}
