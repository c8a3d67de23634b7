//! Names for the numbers that SQL text contains.
//!
//! States, tallies and kinds are stored as small integers. SQL text writes them as `{FAILED}` or `{TALLY_IN_FLIGHT}`; [`sql!`] replaces
//! the names by the numbers of the Rust enums while the crate is compiled. So a statement stays a constant: partial indexes match,
//! prepared statements are cached by their text, and nothing is formatted at run time.

use faena_domain::{JobState, WebhookState, WorkerKind, WorkerState, schedule::TickOutcome};

use crate::{
    Tally,
    plan::{KeyKind, LabelKind},
};

macro_rules! names {
    ($($name:ident = $value:expr),+ $(,)?) => {
        $(pub const $name: i16 = $value as i16;)+
        const NAMES: &[(&str, i16)] = &[$((stringify!($name), $name)),+];
    };
}

names! {
    PENDING = JobState::Pending,
    QUEUED = JobState::Queued,
    SCHEDULED = JobState::Scheduled,
    ASSIGNED = JobState::Assigned,
    PROCESSING = JobState::Processing,
    RETRYING = JobState::Retrying,
    COMPLETED = JobState::Completed,
    FAILED = JobState::Failed,
    CANCELLED = JobState::Cancelled,
    TALLY_PENDING = Tally::Pending,
    TALLY_QUEUED = Tally::Queued,
    TALLY_IN_FLIGHT = Tally::InFlight,
    TALLY_RETRYING = Tally::Retrying,
    TALLY_COMPLETED = Tally::Completed,
    TALLY_FAILED = Tally::Failed,
    TALLY_CANCELLED = Tally::Cancelled,
    TALLY_RAN = Tally::Ran,
    WORKER_CREATING = WorkerState::Creating,
    WORKER_READY = WorkerState::Ready,
    WORKER_TERMINATED = WorkerState::Terminated,
    BUILT_IN_WORKER = WorkerKind::BuiltIn,
    REMOTE_WORKER = WorkerKind::Remote,
    POOL_WORKER = WorkerKind::Pool,
    WEBHOOK_WAITING = WebhookState::Waiting,
    WEBHOOK_SENDING = WebhookState::Sending,
    WEBHOOK_DELIVERED = WebhookState::Delivered,
    WEBHOOK_FAILED = WebhookState::Failed,
    TICK_FIRED = TickOutcome::Fired,
    TICK_MISSED = TickOutcome::Missed,
    TICK_SKIPPED = TickOutcome::Skipped,
    TICK_TRIGGERED = TickOutcome::Triggered,
    TAG_LABEL = LabelKind::Tag,
    SCHEDULE_LABEL = LabelKind::Schedule,
    NAME_LABEL = LabelKind::Name,
    PARENT_LABEL = LabelKind::Parent,
    IDEMPOTENCY_KEY = KeyKind::Idempotency,
    UNIQUE_KEY = KeyKind::Unique,
    // As `Scope::parts` and `fairness_code` write them.
    SCOPE_SYSTEM = 0,
    SCOPE_QUEUE = 1,
    SCOPE_TYPE = 2,
    SCOPE_KEY = 3,
    SCOPE_MACHINE = 4,
    FAIRNESS_NONE = 0,
    FAIRNESS_KEY = 1,
}

/// SQL text in which every `{NAME}` is replaced by its number. Other braces, like `{now}` or `'{}'`, stay.
macro_rules! sql {
    ($text:expr) => {{
        const TEXT: &str = $text;
        const BYTES: [u8; $crate::sql::filled_len(TEXT)] = $crate::sql::fill(TEXT);
        const SQL: &str = match std::str::from_utf8(&BYTES) {
            Ok(text) => text,
            Err(_) => panic!("a digit replaces a name, so the text stays UTF-8"),
        };
        SQL
    }};
}
pub(crate) use sql;

/// Returns the length of the name that starts after the brace at `start`, or 0 if it is not a name.
const fn name_len(text: &[u8], start: usize) -> usize {
    let mut end = start + 1;
    while end < text.len() && (text[end].is_ascii_uppercase() || text[end] == b'_') {
        end += 1;
    }
    if end < text.len() && text[end] == b'}' { end - start - 1 } else { 0 }
}

/// Returns the number of the name in `text[start..start + len]`. An unknown name does not compile.
const fn number(text: &[u8], start: usize, len: usize) -> u8 {
    let mut at = 0;
    while at < NAMES.len() {
        let name = NAMES[at].0.as_bytes();
        let mut same = 0;
        while name.len() == len && same < len && name[same] == text[start + same] {
            same += 1;
        }
        if name.len() == len && same == len {
            assert!(NAMES[at].1 >= 0 && NAMES[at].1 < 10, "stored numbers have one digit");
            return NAMES[at].1 as u8;
        }
        at += 1;
    }
    panic!("SQL text contains an unknown name in braces")
}

pub(crate) const fn filled_len(text: &str) -> usize {
    let text = text.as_bytes();
    let (mut at, mut len) = (0, 0);
    while at < text.len() {
        let name = if text[at] == b'{' { name_len(text, at) } else { 0 };
        at += if name > 0 { name + 2 } else { 1 };
        len += 1;
    }
    len
}

pub(crate) const fn fill<const LEN: usize>(text: &str) -> [u8; LEN] {
    let text = text.as_bytes();
    let mut filled = [0; LEN];
    let (mut at, mut len) = (0, 0);
    while at < text.len() {
        let name = if text[at] == b'{' { name_len(text, at) } else { 0 };
        if name > 0 {
            filled[len] = b'0' + number(text, at + 1, name);
            at += name + 2;
        } else {
            filled[len] = text[at];
            at += 1;
        }
        len += 1;
    }
    filled
}

#[cfg(test)]
mod tests {
    use faena_domain::{EVENT_TYPES, Fairness, Scope};

    use super::*;
    use crate::{migrate::SCHEMA, rules::fairness_code, sqlite::events::EVENTS_ON};

    #[test]
    fn names_become_numbers_and_other_braces_stay() {
        assert_eq!(sql!("state IN ({FAILED}, {CANCELLED})"), "state IN (7, 8)");
        assert_eq!(sql!("{now} '{}' {{PENDING}} é {WORKER_READY}"), "{now} '{}' {0} é 2");
    }

    #[test]
    fn stored_numbers_do_not_change() {
        assert_eq!(JobState::ALL.map(|state| state as i16), [0, 1, 2, 3, 4, 5, 6, 7, 8]);
        assert_eq!(Tally::ALL.map(|tally| tally as i16), [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13]);
        assert_eq!(WorkerState::ALL.map(|state| state as i16), [0, 1, 2, 3, 4, 5, 6]);
        let scopes = [
            Scope::System,
            Scope::Queue("q".into()),
            Scope::Type("t".into()),
            Scope::Key("k".into()),
            Scope::Machine("m".into()),
        ];
        let numbers = [SCOPE_SYSTEM, SCOPE_QUEUE, SCOPE_TYPE, SCOPE_KEY, SCOPE_MACHINE];
        assert_eq!(scopes.map(|scope| scope.parts().0), numbers);
        assert_eq!([Fairness::None, Fairness::Key].map(fairness_code), [FAIRNESS_NONE, FAIRNESS_KEY]);
    }

    /// Returns the lines of an SQL text without comments.
    fn code(sql: &str) -> impl Iterator<Item = &str> {
        sql.lines().filter(|line| !line.trim_start().starts_with("--"))
    }

    /// Returns the texts in single quotes.
    fn quoted(sql: &str) -> Vec<&str> {
        code(sql).flat_map(|line| line.split('\'').skip(1).step_by(2)).collect()
    }

    fn words(sql: &str) -> Vec<&str> {
        let is_separator = |letter: char| !letter.is_ascii_alphabetic();
        code(sql).flat_map(|line| line.split(is_separator)).filter(|word| !word.is_empty()).collect()
    }

    #[test]
    fn events_and_states_in_sql_are_those_of_the_domain() {
        for sql in [EVENTS_ON, SCHEMA.postgres] {
            let is_event = |word: &&str| {
                let aggregate = word.split('.').next().unwrap_or_default();
                word.contains('.') && ["job", "worker", "schedule"].contains(&aggregate)
            };
            let mut found: Vec<&str> = quoted(sql).into_iter().filter(is_event).collect();
            found.sort_unstable();
            found.dedup();
            let mut known = EVENT_TYPES;
            known.sort_unstable();
            assert_eq!(found, known);
            let states = JobState::ALL.map(|state| state.to_string());
            let words = words(sql);
            contains_in_order(&words, &states.each_ref().map(String::as_str));
            contains_in_order(&words, &WorkerState::ALL.map(WorkerState::as_str));
            contains_in_order(&words, &TickOutcome::ALL.map(TickOutcome::as_str));
        }
    }

    fn contains_in_order(words: &[&str], wanted: &[&str]) {
        assert!(words.windows(wanted.len()).any(|words| words == wanted), "{wanted:?} is not in the SQL text");
    }
}
