//! Checks rows that must be parsed, and keeps only the faulty ones.

use std::collections::{BTreeMap, HashMap, HashSet};

use faena_domain::schedule::{CompiledTiming, ScheduleSpec};
use faena_domain::{LogEntry, LogEvent, Timestamp, WorkerState};
use uuid::Uuid;

use super::{Cell, EXAMPLES, Finding, code_of};
use crate::{
    assemble::parse_options,
    doctor::checks::Code,
    sql::{CANCELLED, COMPLETED, FAILED, QUEUED, RETRYING},
};

/// Servers whose clocks differ by less may work together.
const CLOCKS_DIFFER_MS: i64 = 10_000;

#[derive(Default)]
pub(crate) struct Judge {
    pub jobs: u64,
    /// By code, in the order in which they were found.
    found: BTreeMap<&'static str, Found>,
    order: Vec<&'static str>,
    /// The last state in the history of each worker.
    histories: HashMap<Uuid, i64>,
    /// The schedule whose jobs are being read, and the due times of its jobs.
    dues: (String, HashSet<Timestamp>),
}

#[derive(Default)]
struct Found {
    count: u64,
    examples: Vec<String>,
}

impl Judge {
    /// Takes a row of a query: `code, id, words, x, y, z`, the number of rows of its code, and its index among them.
    pub fn row(&mut self, row: &[Cell]) {
        let code = code_of(row[0].text());
        let example = code.read(row);
        let found = self.entry(code);
        if found.examples.len() < EXAMPLES {
            found.examples.push(example);
        }
        if row[7].number() == 1 {
            found.count += u64::try_from(row[6].number()).unwrap_or(1);
        }
    }

    /// Adds one fault.
    pub fn add(&mut self, code: &'static str, id: Uuid, words: &str) {
        let code = code_of(code);
        let found = self.entry(code);
        found.count += 1;
        if found.examples.len() < EXAMPLES {
            let row = [Cell::Null, Cell::Id(id), Cell::Text(words.into())];
            let example = code.read(&row);
            found.examples.push(example);
        }
    }

    fn entry(&mut self, code: &'static Code) -> &mut Found {
        if !self.found.contains_key(code.code) {
            self.order.push(code.code);
        }
        self.found.entry(code.code).or_default()
    }

    pub fn findings(self) -> Vec<Finding> {
        let of =
            |code: &&'static str| self.found.get(code).map(|found| code_of(code).found(found.count, &found.examples));
        self.order.iter().filter_map(of).collect()
    }
}

pub(super) fn jobs(judge: &mut Judge, row: &[Cell]) {
    judge.jobs = u64::try_from(row[0].number()).unwrap_or(0);
}

pub(super) fn options(judge: &mut Judge, row: &[Cell]) {
    if parse_options(Some(row[1].text())).is_err() {
        judge.add("job-unreadable", row[0].id(), "");
    }
}

/// `id, anchor_at, spec, name`.
pub(super) fn schedule(judge: &mut Judge, row: &[Cell]) {
    if compile_timing(row[1].number(), row[2].text()).is_none() {
        judge.add("schedule-unreadable", row[0].id(), row[3].text());
    }
}

/// Parses the timing of a stored schedule, if it is readable.
pub(crate) fn compile_timing(anchor_at: i64, spec: &str) -> Option<CompiledTiming> {
    let spec: ScheduleSpec = serde_json::from_str(spec).ok()?;
    spec.timing.compile(Timestamp::from_ms(anchor_at)).ok()
}

/// Takes `schedule, id, options`, the jobs of each schedule together. A manual run has no due time.
pub(super) fn due(judge: &mut Judge, row: &[Cell]) {
    let Ok(options) = parse_options(Some(row[2].text())) else { return };
    let Some(due) = options.schedule_due.filter(|_| options.scheduled_at.is_some()) else { return };
    if judge.dues.0 != row[0].text() {
        judge.dues = (row[0].text().to_owned(), HashSet::new());
    }
    if !judge.dues.1.insert(due) {
        judge.add("due-twice", row[1].id(), &format!("schedule {}, due {due}", row[0].text()));
    }
}

/// `where, id, state, run, log`.
pub(super) fn log(judge: &mut Judge, row: &[Cell]) {
    let [table, id, state, run, log] = row else { return };
    if let Some((code, words)) = fault_of_log(table.text(), state.number(), run.number(), log.text()) {
        judge.add(code, id.id(), words);
    }
}

fn fault_of_log<'a>(table: &'a str, state: i64, run: i64, log: &str) -> Option<(&'static str, &'a str)> {
    let Some(entries) = LogEntry::outline(log) else { return Some(("log-unreadable", table)) };
    if entries.is_empty() {
        return Some(("log-incomplete", table));
    }
    if entries.windows(2).any(|pair| pair[1].0 < pair[0].0 - CLOCKS_DIFFER_MS) {
        return Some(("log-time", table));
    }
    let has = |events: &[LogEvent]| entries.iter().any(|entry| events.iter().any(|event| event.as_str() == entry.1));
    let begins = table == "job_log" || run == 0 || entries[0].1 == LogEvent::Queued.as_str();
    let ends = match i16::try_from(state).unwrap_or(-1) {
        COMPLETED => has(&[LogEvent::Completed]),
        RETRYING => has(&[LogEvent::RetryScheduled]),
        FAILED => has(&[LogEvent::Failed, LogEvent::Timeout, LogEvent::Orphaned, LogEvent::Expired]),
        CANCELLED => has(&[LogEvent::Cancelled]),
        QUEUED => has(&[LogEvent::HandedBack, LogEvent::Recovered]),
        _ => true,
    };
    (!begins || !ends).then_some(("log-incomplete", table))
}

/// Histories come first, each in its order.
pub(super) fn history(judge: &mut Judge, row: &[Cell]) {
    let (worker, state) = (row[0].id(), row[1].number());
    if let Some(before) = judge.histories.insert(worker, state)
        && let (Some(before), Some(state)) = (worker_state(before), worker_state(state))
        && !before.can_transition_to(state)
    {
        judge.add("worker-history", worker, &format!("{worker} from {before} to {state}"));
    }
}

pub(super) fn worker(judge: &mut Judge, row: &[Cell]) {
    let (id, state, key) = (row[0].id(), row[1].number(), row[2].text());
    let last = judge.histories.get(&id).copied();
    if last != Some(state)
        && let Some(now) = worker_state(state)
    {
        let has = last.and_then(worker_state).map_or("nothing".into(), |state| state.to_string());
        judge.add("worker-history", id, &format!("{key} is {now}, its history says {has}"));
    }
}

fn worker_state(code: i64) -> Option<WorkerState> {
    WorkerState::ALL.get(usize::try_from(code).ok()?).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_log_is_checked_by_its_events_and_times() {
        let whole = r#"[1000,"queued"],[1001,"assigned"],[1002,"started","on \"x\""],[1003,"completed"]"#;
        assert_eq!(fault_of_log("completed", 6, 1, whole), None);
        for (state, run, log, code) in [
            (6, 1, r#"[1000,"queued""#, "log-unreadable"),
            (6, 1, r#"["queued"]"#, "log-unreadable"),
            (6, 1, "", "log-incomplete"),
            (6, 1, r#"[1000,"queued"],[1001,"assigned"]"#, "log-incomplete"),
            (6, 1, r#"[1001,"assigned"],[1002,"completed"]"#, "log-incomplete"),
            (7, 1, r#"[1000,"queued"],[1001,"completed"]"#, "log-incomplete"),
            (6, 1, r#"[20001,"queued"],[10000,"completed"]"#, "log-time"),
        ] {
            assert_eq!(fault_of_log("x", state, run, log), Some((code, "x")), "{log}");
        }
        assert_eq!(fault_of_log("ended", 8, 0, r#"[5,"cancelled","by a person"]"#), None, "it never ran");
        assert_eq!(fault_of_log("completed", 6, 1, r#"[20000,"queued"],[10000,"completed"]"#), None, "clocks differ");
    }

    #[test]
    fn a_finding_names_twenty_and_counts_the_rest() {
        let mut judge = Judge::default();
        for n in 0..25 {
            judge.add("job-nowhere", Uuid::from_u128(n), "");
        }
        let finding = judge.findings().remove(0);
        assert_eq!((finding.count, finding.text.matches("00000000-").count()), (25, EXAMPLES));
        assert!(finding.text.ends_with("and 5 more"), "{}", finding.text);
    }
}
