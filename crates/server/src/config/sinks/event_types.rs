//! Checks the event types that a sink names.
//!
//! Faena's own types are known, so a wrong one is an error. The events of machines have names that their authors choose, and a
//! machine may be registered later, so every name that does not resemble one of Faena's types is accepted.

use faena_domain::{EVENT_TYPES, TASK_EVENT_TYPES};

use super::super::names::matches;

/// The first words of Faena's own types.
const PREFIXES: [&str; 4] = ["job", "worker", "schedule", "task"];

/// Checks a type or a pattern in which `*` stands for any text.
///
/// # Errors
/// Returns why no event can have this type, and what to write instead.
pub fn check(pattern: &str) -> Result<(), String> {
    if own_types().any(|known| matches(pattern, known)) {
        return Ok(());
    }
    let first = pattern.split(['.', '*']).next().unwrap_or_default();
    if PREFIXES.contains(&first) {
        let with_prefix = own_types().filter(|known| known.split('.').next() == Some(first));
        let types: Vec<&str> = with_prefix.collect();
        return Err(format!("{pattern:?} matches no event; the types are {}", types.join(", ")));
    }
    if let Some(prefix) = PREFIXES.iter().find(|prefix| is_misspelt(first, prefix)) {
        let rest = &pattern[first.len()..];
        let rest = if rest.is_empty() { ".*" } else { rest };
        return Err(format!("{pattern:?} matches no event; use {prefix}{rest}"));
    }
    if let Some(expected) = own_types().find(|known| known.ends_with(&format!(".{pattern}"))) {
        return Err(format!("{pattern:?} matches no event; use {expected}"));
    }
    let is_valid = |character: char| character.is_alphanumeric() || matches!(character, '_' | '-' | '.' | '*');
    if !pattern.chars().all(is_valid) {
        return Err(format!("{pattern:?} matches no event: the name of an event has letters, digits, _, - and ."));
    }
    Ok(())
}

fn own_types() -> impl Iterator<Item = &'static str> {
    EVENT_TYPES.into_iter().chain(TASK_EVENT_TYPES)
}

/// Returns whether a word differs from `expected` by its case, by one inserted, missing or wrong letter, or by two swapped
/// letters.
fn is_misspelt(word: &str, expected: &str) -> bool {
    let lower: Vec<char> = word.to_lowercase().chars().collect();
    let expected: Vec<char> = expected.chars().collect();
    let same_start = lower.iter().zip(&expected).take_while(|(a, b)| a == b).count();
    let (rest, rest_expected) = (&lower[same_start..], &expected[same_start..]);
    match (rest, rest_expected) {
        ([], []) => true,
        ([_, rest @ ..], []) => rest.is_empty(),
        ([], [_, rest @ ..]) => rest.is_empty(),
        ([a, b, rest @ ..], [c, d, rest_expected @ ..]) if (a, b) == (d, c) => rest == rest_expected,
        ([_, a @ ..], [_, b @ ..]) => a == b || a == rest_expected || rest == b,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn types_of_faena_and_of_machines_are_accepted() {
        for pattern in [
            "*",
            "job.*",
            "task.*",
            "task.approval.*",
            "*.created",
            "tarea.*",
            "tarea.crear",
            "resultado.*",
            "paid",
            "Order.Paid",
        ] {
            assert_eq!(check(pattern), Ok(()), "{pattern}");
        }
    }

    #[test]
    fn a_misspelt_or_unknown_type_of_faena_is_rejected() {
        for (pattern, message) in [
            ("jobs.*", "\"jobs.*\" matches no event; use job.*"),
            ("jop.completed", "use job.completed"),
            ("Task.ended", "use task.ended"),
            ("taks.ended", "use task.ended"),
            ("workers", "use worker.*"),
            ("job.complete", "the types are job.created, job.status.changed"),
            ("task.done", "the types are task.created"),
            ("completed", "use job.completed"),
            ("deadline_missed", "use task.deadline_missed"),
            ("tarea crear", "the name of an event has letters"),
        ] {
            let found = check(pattern).expect_err("rejected");
            assert!(found.contains(message), "{pattern}: {found}");
        }
    }
}
