//! Fills in the placeholders of a schedule's payload: `{{due}}`, `{{run}}` and so on, inside JSON strings.
//!
//! A string that consists of one placeholder with a numeric value (`"{{due.ms}}"`) becomes that number. An unknown name is
//! rejected when the schedule is created, not at its first due time. Braces without a name, such as `{{#if}}`, stay as they are.

use super::CompiledTiming;
use crate::{ScheduleId, Timestamp};

/// Values of the placeholders.
pub struct Values<'a> {
    pub id: ScheduleId,
    pub name: &'a str,
    pub timezone: &'a str,
    pub timing: &'a CompiledTiming,
    pub due: Timestamp,
    pub previous: Option<Timestamp>,
    /// Number of this run of the schedule, counted from 1.
    pub run: u64,
}

const TIMES: [&str; 2] = ["due", "previous"];
const PARTS: [&str; 6] = ["", "local", "date", "time", "ms", "unix"];
const OTHERS: [&str; 4] = ["schedule.id", "schedule.name", "timezone", "run"];

enum Value {
    Text(String),
    Number(String),
    Null,
}

/// Maximum number of placeholders in a payload. The number is limited because a value may be longer than its
/// placeholder.
const MAX_PLACEHOLDERS: usize = 100;
/// Maximum number of unknown placeholders that are reported.
const MAX_LISTED: usize = 10;

/// Returns what is wrong with the placeholders of a payload: too many, or unknown ones.
pub fn check(payload: &str) -> impl Iterator<Item = String> {
    let count = placeholders(payload).filter(|found| is_known(found.name)).count();
    let too_many =
        (count > MAX_PLACEHOLDERS).then(|| format!("must have at most {MAX_PLACEHOLDERS} placeholders, has {count}"));
    let unknown = placeholders(payload).filter(|found| is_name(found.name) && !is_known(found.name));
    let names: Vec<String> = unknown.map(|found| found.name.to_owned()).take(MAX_LISTED).collect();
    too_many.into_iter().chain(names.into_iter().map(|name| {
        format!(
            "unknown placeholder \"{{{{{name}}}}}\"; use {{{{due}}}} or {{{{previous}}}}, each also with .local, .date, .time, .ms or .unix, or {{{{schedule.id}}}}, {{{{schedule.name}}}}, {{{{timezone}}}} or {{{{run}}}}"
        )
    }))
}

/// Returns whether the text between the braces is a name: `due.date`, `customer`, but not `#if` or `a | b`.
fn is_name(text: &str) -> bool {
    text.starts_with(char::is_alphabetic) && text.chars().all(|c| c.is_alphanumeric() || matches!(c, '.' | '_' | '-'))
}

fn is_known(name: &str) -> bool {
    let (head, part) = name.split_once('.').unwrap_or((name, ""));
    OTHERS.contains(&name) || TIMES.contains(&head) && PARTS.contains(&part) && !name.ends_with('.')
}

/// Returns the payload with the values of its placeholders.
pub fn render(payload: &str, values: &Values<'_>) -> String {
    let mut text = String::with_capacity(payload.len() + 32);
    let mut copied = 0;
    for found in placeholders(payload) {
        let Some(value) = value(found.name, values) else { continue };
        let alone = is_whole_string(&payload[..found.start], &payload[found.end..]);
        let (start, end) = if alone { (found.start - 1, found.end + 1) } else { (found.start, found.end) };
        text.push_str(&payload[copied..start]);
        match (value, alone) {
            (Value::Number(number), _) => text.push_str(&number),
            (Value::Null, true) => text.push_str("null"),
            (Value::Null, false) => {}
            (Value::Text(plain), alone) => {
                let quoted = serde_json::to_string(&plain).expect("a string always serialises");
                text.push_str(if alone { &quoted } else { &quoted[1..quoted.len() - 1] });
            }
        }
        copied = end;
    }
    text.push_str(&payload[copied..]);
    text
}

/// Returns whether the JSON string consists of the placeholder alone, and is not the name of a member, which must stay a string.
///
/// An escaped quote before the placeholder belongs to the string: `"\"{{due.ms}}"`.
fn is_whole_string(before: &str, after: &str) -> bool {
    let opens = before.ends_with('"') && !before.ends_with("\\\"");
    let is_name = |rest: &str| rest.trim_start().starts_with(':');
    opens && after.strip_prefix('"').is_some_and(|rest| !is_name(rest))
}

fn value(name: &str, values: &Values<'_>) -> Option<Value> {
    if !is_known(name) {
        return None;
    }
    let (head, part) = name.split_once('.').unwrap_or((name, ""));
    let at = match head {
        "due" => Some(values.due),
        "previous" => values.previous,
        "timezone" => return Some(Value::Text(values.timezone.to_owned())),
        "run" => return Some(Value::Number(values.run.to_string())),
        _ if part == "id" => return Some(Value::Text(values.id.to_string())),
        _ => return Some(Value::Text(values.name.to_owned())),
    };
    let Some(at) = at else { return Some(Value::Null) };
    let local = values.timing.local(at);
    Some(match part {
        "local" => Value::Text(local),
        "date" => Value::Text(local.get(..10).unwrap_or_default().to_owned()),
        "time" => Value::Text(local.get(11..19).unwrap_or_default().to_owned()),
        "ms" => Value::Number(at.as_ms().to_string()),
        "unix" => Value::Number(at.as_ms().div_euclid(1_000).to_string()),
        _ => Value::Text(at.to_string()),
    })
}

struct Placeholder<'a> {
    start: usize,
    end: usize,
    name: &'a str,
}

/// Finds the placeholders of a payload. In JSON, two adjacent opening braces occur only inside a string.
fn placeholders(payload: &str) -> impl Iterator<Item = Placeholder<'_>> {
    let mut from = 0;
    std::iter::from_fn(move || {
        let opening = from + payload[from..].find("{{")?;
        let closing = opening + 2 + payload[opening + 2..].find("}}")?;
        // Unclosed braces may precede it: `"{{ and {{due}}"`.
        let start = opening + payload[opening..closing].rfind("{{")?;
        from = closing + 2;
        Some(Placeholder { start, end: closing + 2, name: payload[start + 2..closing].trim() })
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::schedule::Timing;

    fn rendered(payload: &str) -> String {
        let at = |text| Timestamp::parse(text).expect("a time");
        let timing =
            Timing { cron_expression: Some("0 2 * * *".into()), timezone: "Europe/Madrid".into(), ..Timing::default() };
        let values = Values {
            id: ScheduleId(uuid::Uuid::nil()),
            name: "say \"hi\"",
            timezone: "Europe/Madrid",
            timing: &timing.compile(at("2026-01-01T00:00:00Z")).expect("a timing"),
            due: at("2026-07-01T00:00:00Z"),
            previous: None,
            run: 7,
        };
        render(payload, &values)
    }

    #[test]
    fn placeholders_are_replaced_by_their_values() {
        for (payload, expected) in [
            (r#"{"at":"{{due}}"}"#, r#"{"at":"2026-07-01T00:00:00.000Z"}"#),
            (r#"{"day":"{{ due.date }}"}"#, r#"{"day":"2026-07-01"}"#),
            (r#"{"at":"{{due.local}}"}"#, r#"{"at":"2026-07-01T02:00:00+02:00"}"#),
            (r#"{"file":"report-{{due.date}}T{{due.time}}.csv"}"#, r#"{"file":"report-2026-07-01T02:00:00.csv"}"#),
            (r#"{"ms":"{{due.ms}}","s":"{{due.unix}}"}"#, r#"{"ms":1782864000000,"s":1782864000}"#),
            (r#"{"text":"at {{due.unix}}"}"#, r#"{"text":"at 1782864000"}"#),
            (r#"{"n":"{{run}}","z":"{{timezone}}"}"#, r#"{"n":7,"z":"Europe/Madrid"}"#),
            (r#"{"n":"{{schedule.name}}"}"#, r#"{"n":"say \"hi\""}"#),
            (r#"{"p":"{{previous}}","t":"since {{previous}}"}"#, r#"{"p":null,"t":"since "}"#),
            (r#"{"mail":"Dear {{customer}}, {{due"}"#, r#"{"mail":"Dear {{customer}}, {{due"}"#),
            (r#"{"a":{"b":{}}}"#, r#"{"a":{"b":{}}}"#),
            (r#"{"{{due.unix}}":1,"{{previous}}" : 2}"#, r#"{"1782864000":1,"" : 2}"#),
            (r#"{"a":"{{ and ","b":"{{run}}"}"#, r#"{"a":"{{ and ","b":7}"#),
            (r#"{"a":"\"{{run}}","b":"\\","c":"{{run}}"}"#, r#"{"a":"\"7","b":"\\","c":7}"#),
            (r#"{"a":"{{}}{{{run}}}"}"#, r#"{"a":"{{}}{7}"}"#),
        ] {
            assert_eq!(rendered(payload), expected);
            serde_json::from_str::<serde_json::Value>(&rendered(payload)).expect("still JSON");
        }
    }

    #[test]
    fn a_payload_cannot_grow_without_bound() {
        let many = |count: usize| format!(r#"{{"a":"{}"}}"#, "{{schedule.name}}".repeat(count));
        assert_eq!((check(&many(100)).count(), check(&many(101)).count()), (0, 1));
    }

    #[test]
    fn an_unknown_placeholder_is_rejected_and_other_braces_are_not() {
        for (payload, errors) in [
            (r#"{"a":"{{due.dat}}"}"#, 1),
            (r#"{"a":"{{schedule}} {{run.x}}"}"#, 2),
            (r#"{"a":"{{due.}}"}"#, 1),
            (r#"{"a":"{{nope}} {{ customer.name }}"}"#, 2),
            (r#"{"a":"{{due}} {{#if}} {{}} {{a | b}} {{ {{run}}"}"#, 0),
        ] {
            assert_eq!(check(payload).count(), errors, "{payload}");
        }
    }
}
