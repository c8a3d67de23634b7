//! Ids that may be shortened to a unique beginning.
//!
//! The lists of the API are ordered by id, newest first, and their cursor is the id to continue after. A list that
//! continues after the highest possible id with a given beginning therefore starts with the ids that have this
//! beginning. It reads one short range of an index.

use serde_json::Value;

use crate::{Api, CommandError, output::one_line, whole_list};

/// Maximum number of candidates that an error lists.
const CANDIDATES: usize = 8;
/// Fewer characters are probably a mistake.
const MIN_LENGTH: usize = 4;
/// Hexadecimal digits of an id.
const DIGITS: usize = 32;

/// A resource with ids, and how to list it.
pub struct Kind {
    pub noun: &'static str,
    pub path: &'static str,
    /// Field of the answer with the list.
    pub list: &'static str,
    /// Fields that distinguish the candidates.
    pub labels: &'static [&'static str],
}

pub const JOB: Kind = Kind { noun: "job", path: "/api/v1/jobs", list: "jobs", labels: &["type", "queue", "status"] };
pub const DEAD_LETTER: Kind =
    Kind { noun: "dead letter", path: "/api/v1/dead-letter", list: "data", labels: &["type", "queue", "error"] };
pub const TASK: Kind =
    Kind { noun: "task", path: "/api/v1/tasks", list: "tasks", labels: &["machine", "state", "title"] };
pub const WEBHOOK: Kind =
    Kind { noun: "webhook", path: "/api/v1/webhooks", list: "webhooks", labels: &["event", "state", "url"] };
pub const REJECTED_EVENT: Kind = Kind {
    noun: "rejected event",
    path: "/api/v1/outbox/dead-letter",
    list: "data",
    labels: &["sink", "eventType", "errorMessage"],
};
pub const API_KEY: Kind = Kind { noun: "API key", path: "/api/v1/api-keys", list: "apiKeys", labels: &["name"] };

/// Returns the whole id, given the id or a unique beginning of it.
pub async fn resolve(api: &Api, kind: &Kind, text: &str) -> Result<String, CommandError> {
    if is_whole(text) {
        return Ok(text.to_owned());
    }
    check_beginning(kind, text)?;
    let request = api.get(kind.path).query("limit", CANDIDATES + 1).query_opt("cursor", cursor_after(text));
    let answer: Value = request.send().await?;
    choose(kind, text, answer[kind.list].as_array().map(Vec::as_slice).unwrap_or_default())
}

/// Like [`resolve`], for a short list whose cursor is not an id: reads all of its pages.
pub async fn resolve_in_whole_list(api: &Api, kind: &Kind, text: &str) -> Result<String, CommandError> {
    if is_whole(text) {
        return Ok(text.to_owned());
    }
    check_beginning(kind, text)?;
    let answer = whole_list::read_pages(api, kind.path, kind.list).await?;
    choose(kind, text, answer[kind.list].as_array().map(Vec::as_slice).unwrap_or_default())
}

/// Returns whole ids, each given as in [`resolve`].
pub async fn resolve_all(api: &Api, kind: &Kind, texts: Vec<String>) -> Result<Vec<String>, CommandError> {
    let mut ids = Vec::with_capacity(texts.len());
    for text in texts {
        ids.push(resolve(api, kind, &text).await?);
    }
    Ok(ids)
}

/// Returns the whole id of an optional argument, given as in [`resolve`].
pub async fn resolve_opt(api: &Api, kind: &Kind, text: Option<String>) -> Result<Option<String>, CommandError> {
    match text {
        Some(text) => resolve(api, kind, &text).await.map(Some),
        None => Ok(None),
    }
}

/// Rejects a text that no id begins with.
fn check_beginning(kind: &Kind, text: &str) -> Result<(), CommandError> {
    if is_beginning(text) {
        return Ok(());
    }
    let message = format!(
        "\"{text}\" is not the id of a {}; pass the id, or at least its first {MIN_LENGTH} characters",
        kind.noun
    );
    Err(CommandError::Usage(message))
}

fn choose(kind: &Kind, text: &str, entries: &[Value]) -> Result<String, CommandError> {
    let id = |entry: &&Value| entry["id"].as_str().unwrap_or_default().to_owned();
    let is_candidate = |entry: &&Value| has_beginning(&id(entry), text);
    let candidates: Vec<&Value> = entries.iter().filter(is_candidate).collect();
    let noun = kind.noun;
    match candidates.as_slice() {
        [] => Err(CommandError::Other(format!("no {noun} has an id that begins with \"{text}\""))),
        [one] => Ok(id(one)),
        several => {
            let shown =
                several.iter().take(CANDIDATES).map(|entry| format!("\n  {}  {}", id(entry), label(kind, entry)));
            let more = if several.len() > CANDIDATES { "\n  …" } else { "" };
            let shown: String = shown.collect();
            let message = format!("several {noun}s have an id that begins with \"{text}\"; pass more characters:");
            Err(CommandError::Other(format!("{message}{shown}{more}")))
        }
    }
}

/// Returns the cursor of the page that starts with the ids that begin with `text`. `None`: no id can begin like this.
pub fn cursor_after(text: &str) -> Option<String> {
    beginning(text).map(|digits| dashed(&format!("{digits:f<DIGITS$}")))
}

fn is_whole(text: &str) -> bool {
    let digits = text.replace('-', "");
    digits.len() == DIGITS && digits.bytes().all(|byte| byte.is_ascii_hexdigit())
}

pub fn is_beginning(text: &str) -> bool {
    beginning(text).is_some()
}

pub fn has_beginning(id: &str, text: &str) -> bool {
    beginning(text).is_some_and(|digits| id.replace('-', "").starts_with(&digits))
}

/// Returns what distinguishes a candidate from the others.
fn label(kind: &Kind, entry: &Value) -> String {
    let labels = kind.labels.iter().filter_map(|name| entry[name].as_str()).filter(|text| !text.is_empty());
    one_line(&labels.map(|text| crate::output::shorten(text, 40)).collect::<Vec<_>>().join("  "))
}

/// Returns the hexadecimal digits of a beginning of an id, or `None` if the text is a whole id or no beginning of one.
fn beginning(text: &str) -> Option<String> {
    let digits: String = text.to_ascii_lowercase().chars().filter(|c| *c != '-').collect();
    let has_right_dashes = dashed(&digits) == text.to_ascii_lowercase().trim_end_matches('-');
    let is_beginning = (MIN_LENGTH..DIGITS).contains(&digits.len())
        && digits.bytes().all(|byte| byte.is_ascii_hexdigit())
        && (has_right_dashes || !text.contains('-'));
    is_beginning.then_some(digits)
}

/// Writes the dashes of an id between its digits.
fn dashed(digits: &str) -> String {
    let mut text = String::with_capacity(36);
    for (n, digit) in digits.chars().enumerate() {
        if [8, 12, 16, 20].contains(&n) {
            text.push('-');
        }
        text.push(digit);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_part_of_an_id_is_a_beginning() {
        let found = ["0199", "0199A3C47e1", "0199a3c4-", "0199a3c4-7e1b-7c51-9d3e-5a7c2f6b8d1"].map(beginning);
        let expected = ["0199", "0199a3c47e1", "0199a3c4", "0199a3c47e1b7c519d3e5a7c2f6b8d1"];
        assert_eq!(found.map(|digits| digits.expect("a beginning")), expected);
        let others = ["", "019", "01-99", "nightly", "beef cafe", "0199a3c4-7e1b-7c51-9d3e-5a7c2f6b8d10"];
        assert_eq!(others.map(beginning), others.map(|_| None), "a whole id, too short, or no id");
    }

    #[test]
    fn the_cursor_is_after_every_id_with_the_beginning() {
        assert_eq!(cursor_after("0199a3c4-7").as_deref(), Some("0199a3c4-7fff-ffff-ffff-ffffffffffff"));
    }
}
