//! Values of the due time in a payload: `{{due}}` and the like, inside its texts.
//!
//! A text that consists of one number-valued placeholder (`"{{due.ms}}"`) becomes that number. Names of other template languages
//! are left alone; a name that looks like ours and is none is a fault when the schedule is made, not a surprise at night.

use super::CompiledTiming;
use crate::{ScheduleId, Timestamp};

/// What a payload may speak of.
pub struct Values<'a> {
    pub id: ScheduleId,
    pub name: &'a str,
    pub timezone: &'a str,
    pub timing: &'a CompiledTiming,
    pub due: Timestamp,
    pub previous: Option<Timestamp>,
    /// Counts the runs of the schedule, from 1.
    pub run: u64,
}

const TIMES: [&str; 2] = ["due", "previous"];
const PARTS: [&str; 6] = ["", "local", "date", "time", "ms", "unix"];
const OTHERS: [&str; 4] = ["schedule.id", "schedule.name", "timezone", "run"];

enum Value {
    Text(String),
    Number(String),
    Nothing,
}

/// How many placeholders a payload may have: each may become longer than it is.
const MOST: usize = 100;

/// Names that look like ours and are none, and too many of them.
pub fn check(payload: &str) -> impl Iterator<Item = String> {
    let count = placeholders(payload).filter(|found| is_known(found.name)).count();
    let many = (count > MOST).then(|| format!("must have at most {MOST} placeholders, has {count}"));
    let unknown = placeholders(payload).filter(|found| {
        let head = found.name.split('.').next().unwrap_or_default();
        let ours = TIMES.contains(&head) || OTHERS.iter().any(|known| known.split('.').next() == Some(head));
        ours && !is_known(found.name)
    });
    let names: Vec<String> = unknown.map(|found| found.name.to_owned()).collect();
    many.into_iter().chain(names.into_iter().map(|name| {
        format!(
            "{{{{{name}}}}} is not known; there are {{{{due}}}} and {{{{previous}}}}, each also with .local .date .time .ms .unix, and {{{{schedule.id}}}} {{{{schedule.name}}}} {{{{timezone}}}} {{{{run}}}}"
        )
    }))
}

fn is_known(name: &str) -> bool {
    let (head, part) = name.split_once('.').unwrap_or((name, ""));
    OTHERS.contains(&name) || TIMES.contains(&head) && PARTS.contains(&part) && !name.ends_with('.')
}

/// The payload with its placeholders filled in.
pub fn render(payload: &str, values: &Values<'_>) -> String {
    let mut text = String::with_capacity(payload.len() + 32);
    let mut copied = 0;
    for found in placeholders(payload) {
        let Some(value) = value(found.name, values) else { continue };
        let alone = stands_alone(&payload[..found.start], &payload[found.end..]);
        let (start, end) = if alone { (found.start - 1, found.end + 1) } else { (found.start, found.end) };
        text.push_str(&payload[copied..start]);
        match (value, alone) {
            (Value::Number(number), _) => text.push_str(&number),
            (Value::Nothing, true) => text.push_str("null"),
            (Value::Nothing, false) => {}
            (Value::Text(plain), alone) => {
                let quoted = serde_json::to_string(&plain).expect("a text is JSON");
                text.push_str(if alone { &quoted } else { &quoted[1..quoted.len() - 1] });
            }
        }
        copied = end;
    }
    text.push_str(&payload[copied..]);
    text
}

/// Whether the text consists of nothing else. The quote before it may belong to the text: `"\"{{due.ms}}"`. The name of a member has to
/// stay a text.
fn stands_alone(before: &str, after: &str) -> bool {
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
    let Some(at) = at else { return Some(Value::Nothing) };
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

/// In JSON two opening braces stand next to each other only inside a text.
fn placeholders(payload: &str) -> impl Iterator<Item = Placeholder<'_>> {
    let mut from = 0;
    std::iter::from_fn(move || {
        let opening = from + payload[from..].find("{{")?;
        let closing = opening + 2 + payload[opening + 2..].find("}}")?;
        // Braces that nobody closed may stand before it: `"{{ and {{due}}"`.
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
    fn a_payload_may_speak_of_its_due_time() {
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
    fn a_name_that_looks_like_ours_and_is_none_is_a_fault() {
        for (payload, faults) in [
            (r#"{"a":"{{due.dat}}"}"#, 1),
            (r#"{"a":"{{schedule}} {{run.x}}"}"#, 2),
            (r#"{"a":"{{due.}}"}"#, 1),
            (r#"{"a":"{{due}} {{customer.name}} {{#if}}"}"#, 0),
        ] {
            assert_eq!(check(payload).count(), faults, "{payload}");
        }
    }
}
