//! Splits the text of a command into words, without a shell: there are no variables, patterns or pipes.

/// Splits a command into its words, at spaces outside of quotes. A text that begins with `[` is a JSON array of words.
pub fn split(text: &str) -> Result<Vec<String>, String> {
    let words = match text.trim_start().starts_with('[') {
        true => serde_json::from_str(text).map_err(|error| format!("not a JSON array of strings: {error}"))?,
        false => split_quoted(text)?,
    };
    match words.first() {
        None => Err("must name a program".into()),
        Some(program) if program.is_empty() => Err("the name of the program is empty".into()),
        Some(_) => Ok(words),
    }
}

fn split_quoted(text: &str) -> Result<Vec<String>, String> {
    let (mut words, mut word) = (Vec::new(), None::<String>);
    let mut characters = text.chars();
    while let Some(character) = characters.next() {
        match character {
            '\'' | '"' => {
                let word = word.get_or_insert_default();
                loop {
                    match characters.next() {
                        None => return Err(format!("the quote {character} is not closed")),
                        Some(end) if end == character => break,
                        Some('\\') if character == '"' => word.extend(characters.next()),
                        Some(inner) => word.push(inner),
                    }
                }
            }
            '\\' => word.get_or_insert_default().extend(characters.next()),
            character if character.is_whitespace() => words.extend(word.take()),
            character => word.get_or_insert_default().push(character),
        }
    }
    words.extend(word);
    Ok(words)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_split_at_spaces_outside_of_quotes() {
        for (text, words) in [
            ("agent -p --model x", vec!["agent", "-p", "--model", "x"]),
            ("  a 'b c' \"d \\\" e\" f\\ g ''", vec!["a", "b c", "d \" e", "f g", ""]),
            ("sh -c 'echo $HOME; rm *'", vec!["sh", "-c", "echo $HOME; rm *"]),
            (r#"["a b", "c"]"#, vec!["a b", "c"]),
        ] {
            assert_eq!(split(text).as_deref(), Ok(owned(&words).as_slice()), "{text}");
        }
        for text in ["", "  ", "'open", "[1]", "[]", "'' x"] {
            assert!(split(text).is_err(), "{text}");
        }
    }

    fn owned(words: &[&str]) -> Vec<String> {
        words.iter().map(|word| (*word).to_owned()).collect()
    }
}
