//! Estimates the width of text without a font. The estimate is never too small for common sans-serif fonts.

/// Font size of all texts.
pub(super) const FONT: f64 = 12.0;

/// Height of a line of text.
pub(super) const LINE: f64 = 15.0;

/// Maximum width of a line of a label beside the column of states, and inside it.
pub(super) const LABEL_WIDTH: f64 = 190.0;
pub(super) const INNER_LABEL_WIDTH: f64 = 150.0;

/// Maximum width of the name of a state; longer names are shortened.
const NAME_WIDTH: f64 = 320.0;

/// Returns an upper bound of the width of a text.
pub(super) fn width(text: &str) -> f64 {
    text.chars().map(width_of).sum::<f64>() * FONT
}

/// Returns the width of a character as a fraction of the font's size, with a reserve for wider fonts.
fn width_of(character: char) -> f64 {
    match character {
        'i' | 'j' | 'l' | '.' | ',' | ':' | ';' | '\'' | '|' | '!' | ' ' => 0.36,
        'm' | 'w' | 'M' | 'W' | '@' | '%' => 0.98,
        '_' | '-' | 'a'..='z' | '0'..='9' => 0.62,
        'A'..='Z' => 0.76,
        ' '..='~' => 0.72,
        '\u{80}'..='\u{24f}' => 0.82,
        _ => 1.1,
    }
}

/// Breaks a label into lines: after spaces and punctuation, and anywhere if a word is too long.
pub(super) fn wrap(label: &str, longest: f64) -> Vec<String> {
    let mut lines = vec![String::new()];
    for word in label.split_inclusive([' ', '.', '_', '-', ',']) {
        for piece in pieces(word, longest) {
            let line = lines.last().map(String::as_str).unwrap_or_default();
            if !line.is_empty() && width(line.trim_end()) + width(piece.trim_end()) > longest {
                lines.push(String::new());
            }
            if let Some(line) = lines.last_mut() {
                line.push_str(&piece);
            }
        }
    }
    lines.iter().map(|line| line.trim().to_owned()).filter(|line| !line.is_empty()).collect()
}

/// Cuts a word that is longer than a line.
fn pieces(word: &str, longest: f64) -> Vec<String> {
    let mut pieces = vec![String::new()];
    for character in word.chars() {
        if pieces.last().is_some_and(|piece| width(piece) + width_of(character) * FONT > longest) {
            pieces.push(String::new());
        }
        if let Some(piece) = pieces.last_mut() {
            piece.push(character);
        }
    }
    pieces
}

/// Shortens the name of a state that is too long to be drawn. The whole name stays in the tooltip.
pub(super) fn shorten(name: &str) -> String {
    if width(name) <= NAME_WIDTH {
        return name.to_owned();
    }
    let mut short = String::new();
    for character in name.chars() {
        if width(&short) + width_of(character) * FONT + width("…") > NAME_WIDTH {
            break;
        }
        short.push(character);
    }
    short.push('…');
    short
}

/// Escapes text for XML. Characters that XML forbids become a replacement character.
pub(super) fn escape(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for character in text.chars() {
        match character {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '"' => escaped.push_str("&quot;"),
            '\n' | '\t' => escaped.push(' '),
            '\u{fffe}' | '\u{ffff}' => escaped.push('\u{fffd}'),
            character if character.is_control() => escaped.push('\u{fffd}'),
            character => escaped.push(character),
        }
    }
    escaped
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_label_is_wrapped_and_loses_nothing() {
        let label = "resultado.integracion_finalizada, job.correccion.completed, job.correccion.failed";
        let lines = wrap(label, LABEL_WIDTH);
        assert!(lines.len() > 1 && lines.iter().all(|line| width(line) <= LABEL_WIDTH), "{lines:?}");
        assert_eq!(lines.concat().replace(' ', ""), label.replace(' ', ""));
        assert!(wrap(&"x".repeat(300), LABEL_WIDTH).iter().all(|line| width(line) <= LABEL_WIDTH));
    }

    #[test]
    fn text_is_escaped_for_xml() {
        assert_eq!(escape("<a href=\"&\">\u{1}\u{ffff}\n"), "&lt;a href=&quot;&amp;&quot;&gt;\u{fffd}\u{fffd} ");
    }
}
