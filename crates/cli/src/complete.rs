//! Values for shell completions, read from the server.
//!
//! The shell requests them while a person types. The result is quick or empty, never an error: there may be no server, or
//! no permission to read.

use std::{collections::BTreeMap, ffi::OsStr, time::Duration};

use clap_complete::engine::{ArgValueCompleter, CompletionCandidate};
use faena::{Client, Method};
use serde_json::Value;

use crate::{
    ids::{self, Kind},
    output::{one_line, shorten},
};

/// How long a completion may take, because a person waits for it.
const TIMEOUT: Duration = Duration::from_millis(700);
/// Number of entries to read from each list, newest first.
const ENTRIES: usize = 100;
/// Width of the explanation of a value.
const HELP_WIDTH: usize = 50;

pub fn jobs() -> ArgValueCompleter {
    completer(|current| entries(&ids::JOB, current))
}

pub fn dead_letters() -> ArgValueCompleter {
    completer(|current| entries(&ids::DEAD_LETTER, current))
}

pub fn tasks() -> ArgValueCompleter {
    completer(|current| entries(&ids::TASK, current))
}

pub fn webhooks() -> ArgValueCompleter {
    completer(|current| entries(&ids::WEBHOOK, current))
}

pub fn api_keys() -> ArgValueCompleter {
    completer(|_| pairs(&read("/api/v1/api-keys", &[]), "apiKeys", "id", &["name"]))
}

pub fn queues() -> ArgValueCompleter {
    completer(|_| pairs(&read("/api/v1/queues", &[("limit", "1000".into())]), "queues", "name", &[]))
}

pub fn workers() -> ArgValueCompleter {
    completer(|_| pairs(&read("/api/v1/workers", &[("limit", "100".into())]), "workers", "id", &["state"]))
}

pub fn schedules() -> ArgValueCompleter {
    completer(|_| pairs(&read("/api/v1/schedules", &[("limit", "100".into())]), "schedules", "name", &["explanation"]))
}

pub fn machines() -> ArgValueCompleter {
    completer(|_| pairs(&read("/api/v1/machines", &[]), "machines", "name", &[]))
}

pub fn sinks() -> ArgValueCompleter {
    completer(|_| pairs(&read("/api/v1/outbox", &[]), "sinks", "name", &[]))
}

/// Completes types of jobs: those that workers can run, and those of recent jobs.
pub fn types() -> ArgValueCompleter {
    completer(|_| {
        let workers = read("/api/v1/workers", &[("limit", "100".into())]);
        let mut types = pairs(&read(ids::JOB.path, &[("limit", ENTRIES.to_string())]), "jobs", "type", &[]);
        for worker in workers["workers"].as_array().into_iter().flatten() {
            let capabilities = worker["capabilities"].as_array().into_iter().flatten().filter_map(Value::as_str);
            types.extend(capabilities.map(|name| (name.to_owned(), String::new())));
        }
        types
    })
}

/// Values of an argument with their explanations.
type Pairs = BTreeMap<String, String>;

fn completer(values: fn(&str) -> Pairs) -> ArgValueCompleter {
    ArgValueCompleter::new(move |current: &OsStr| candidates(current, values))
}

fn candidates(current: &OsStr, values: fn(&str) -> Pairs) -> Vec<CompletionCandidate> {
    let Some(current) = current.to_str() else { return Vec::new() };
    let values = values(current).into_iter();
    let matching = values.filter(|(value, _)| is_safe(value) && value.starts_with(&current.to_ascii_lowercase()));
    // The newest first: ids begin with the time.
    let help = |text: String| Some(text).filter(|text| !text.is_empty()).map(Into::into);
    matching.rev().map(|(value, text)| CompletionCandidate::new(value).help(help(text))).collect()
}

/// Returns whether a shell leaves a value unchanged. No other value is offered: a queue may have the name `$(reboot)`.
fn is_safe(value: &str) -> bool {
    let is_plain = |c: char| c.is_alphanumeric() || "-_.:/@+%".contains(c);
    !value.is_empty() && !value.starts_with('-') && value.chars().all(is_plain)
}

/// Returns the entries whose ids begin with the typed text.
fn entries(kind: &Kind, current: &str) -> Pairs {
    let mut query = vec![("limit", ENTRIES.to_string())];
    query.extend(ids::cursor_after(current).map(|cursor| ("cursor", cursor)));
    pairs(&read(kind.path, &query), kind.list, "id", kind.labels)
}

fn pairs(answer: &Value, list: &str, value: &str, labels: &[&str]) -> Pairs {
    let pair = |entry: &Value| {
        let texts = labels.iter().filter_map(|name| entry[name].as_str()).filter(|text| !text.is_empty());
        let help = shorten(&one_line(&texts.collect::<Vec<_>>().join(" ")), HELP_WIDTH);
        Some((entry[value].as_str()?.to_owned(), help))
    };
    answer[list].as_array().into_iter().flatten().filter_map(pair).collect()
}

/// Sends a request to the server. Returns `null` if the answer does not arrive in time.
fn read(path: &str, query: &[(&str, String)]) -> Value {
    let answer = async {
        let mut builder = Client::builder();
        if let Some(url) = url_on_the_command_line(std::env::args()) {
            builder = builder.url(url);
        }
        let client = builder.build().ok()?;
        let mut request = client.request(Method::GET, path).timeout(TIMEOUT);
        for (name, value) in query {
            request = request.query(name, value);
        }
        request.send().await.ok()
    };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.ok().and_then(|runtime| runtime.block_on(answer)).unwrap_or(Value::Null)
}

/// Returns the value of `--url` in the command that is being typed.
fn url_on_the_command_line(mut words: impl Iterator<Item = String>) -> Option<String> {
    while let Some(word) = words.next() {
        if word == "--url" {
            return words.next();
        }
        if let Some(url) = word.strip_prefix("--url=") {
            return Some(url.to_owned());
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_values_that_a_shell_leaves_unchanged_are_offered() {
        let offered = ["mail", "email.send", "tenant:7/a", "añil"];
        let refused = ["", "$(reboot)", "a b", "`x`", "a;b", "-f", "a\nb", "*", "'", "~root"];
        assert!(offered.into_iter().all(is_safe));
        assert!(!refused.into_iter().any(is_safe));
    }

    #[test]
    fn the_server_is_taken_from_the_typed_command() {
        let url = |text: &str| url_on_the_command_line(text.split(' ').map(str::to_owned));
        assert_eq!(url("faena jobs show --url http://a"), Some("http://a".to_owned()));
        assert_eq!(url("faena jobs show --url=http://a"), Some("http://a".to_owned()));
        assert_eq!(url("faena jobs show"), None);
    }
}
