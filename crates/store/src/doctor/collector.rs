//! Checks the rows for which SQL is not enough, and collects all violations.

use std::collections::{BTreeMap, HashMap, HashSet};

use faena_domain::schedule::{CompiledTiming, ScheduleSpec};
use faena_domain::{JobState, LogEntry, LogEvent, Timestamp, WorkerState};
use uuid::Uuid;

use super::{Cell, EXAMPLES, Finding, code_of, tasks, tasks::TaskChecks};
use crate::{assemble::parse_options, doctor::checks::Code, jobs::state_code};

/// Difference between the clocks of two servers that is tolerated.
const MAX_CLOCK_SKEW_MS: i64 = 10_000;

/// Collects the rows that violate an invariant.
#[derive(Default)]
pub(crate) struct Collector {
    pub jobs: u64,
    found: BTreeMap<&'static str, Found>,
    /// Codes in the order in which they were found.
    order: Vec<&'static str>,
    /// Latest state in each worker's history.
    histories: HashMap<Uuid, i64>,
    /// The schedule whose jobs are being read, and the due times of these jobs.
    due_times: (String, HashSet<Timestamp>),
    pub(super) tasks: TaskChecks,
}

#[derive(Default)]
struct Found {
    count: u64,
    examples: Vec<String>,
}

impl Collector {
    /// Adds a row of a query: `code, id, detail, x, y, z`, the number of rows with its code, and its number among them.
    pub fn row(&mut self, row: &[Cell]) {
        let code = code_of(row[0].text());
        let example = code.describe(row);
        let found = self.entry(code);
        if found.examples.len() < EXAMPLES {
            found.examples.push(example);
        }
        if row[7].number() == 1 {
            found.count += u64::try_from(row[6].number()).unwrap_or(1);
        }
    }

    /// Adds a violation that is described by a text.
    pub fn add(&mut self, code: &'static str, id: Uuid, detail: &str) {
        let code = code_of(code);
        let found = self.entry(code);
        found.count += 1;
        if found.examples.len() < EXAMPLES {
            let row = [Cell::Null, Cell::Id(id), Cell::Text(detail.into())];
            let example = code.describe(&row);
            found.examples.push(example);
        }
    }

    fn entry(&mut self, code: &'static Code) -> &mut Found {
        if !self.found.contains_key(code.code) {
            self.order.push(code.code);
        }
        self.found.entry(code.code).or_default()
    }

    pub fn findings(mut self) -> Vec<Finding> {
        tasks::finish(&mut self);
        let finding =
            |code: &&'static str| self.found.get(code).map(|found| code_of(code).found(found.count, &found.examples));
        self.order.iter().filter_map(finding).collect()
    }
}

pub(super) fn jobs(collector: &mut Collector, row: &[Cell]) {
    collector.jobs = u64::try_from(row[0].number()).unwrap_or(0);
}

pub(super) fn options(collector: &mut Collector, row: &[Cell]) {
    if parse_options(Some(row[1].text())).is_err() {
        collector.add("job-unreadable", row[0].id(), "");
    }
}

/// Checks a row `id, anchor_at, spec, name`.
pub(super) fn schedule(collector: &mut Collector, row: &[Cell]) {
    if compile_timing(row[1].number(), row[2].text()).is_none() {
        collector.add("schedule-unreadable", row[0].id(), row[3].text());
    }
}

/// Compiles the timing of a stored schedule. Returns `None` if it is invalid.
pub(crate) fn compile_timing(anchor_at: i64, spec: &str) -> Option<CompiledTiming> {
    let spec: ScheduleSpec = serde_json::from_str(spec).ok()?;
    spec.timing.compile(Timestamp::from_ms(anchor_at)).ok()
}

/// Checks a row `schedule, id, options`. The rows are sorted by schedule. Jobs that a user triggered have no scheduled
/// time.
pub(super) fn due(collector: &mut Collector, row: &[Cell]) {
    let Ok(options) = parse_options(Some(row[2].text())) else { return };
    let Some(due) = options.schedule_due.filter(|_| options.scheduled_at.is_some()) else { return };
    if collector.due_times.0 != row[0].text() {
        collector.due_times = (row[0].text().to_owned(), HashSet::new());
    }
    if !collector.due_times.1.insert(due) {
        collector.add("due-twice", row[1].id(), &format!("schedule {}, due {due}", row[0].text()));
    }
}

/// Checks a row `table, id, state, run, log`.
pub(super) fn log(collector: &mut Collector, row: &[Cell]) {
    let [table, id, state, run, log] = row else { return };
    if let Some((code, detail)) = check_log(table.text(), state.number(), run.number(), log.text()) {
        collector.add(code, id.id(), detail);
    }
}

fn check_log<'a>(table: &'a str, state: i64, run: i64, log: &str) -> Option<(&'static str, &'a str)> {
    let Some(lines) = LogEntry::outline(log) else { return Some(("log-unreadable", table)) };
    if lines.is_empty() {
        return Some(("log-incomplete", table));
    }
    if lines.windows(2).any(|pair| pair[1].0 < pair[0].0 - MAX_CLOCK_SKEW_MS) {
        return Some(("log-time", table));
    }
    let has = |events: &[LogEvent]| lines.iter().any(|line| events.iter().any(|event| event.as_str() == line.1));
    let begins = table == "job_log" || run == 0 || lines[0].1 == LogEvent::Queued.as_str();
    let ends = match job_state(state) {
        Some(JobState::Completed) => has(&[LogEvent::Completed]),
        Some(JobState::Retrying) => has(&[LogEvent::RetryScheduled]),
        Some(JobState::Failed) => has(&[LogEvent::Failed, LogEvent::Timeout, LogEvent::Orphaned, LogEvent::Expired]),
        Some(JobState::Cancelled) => has(&[LogEvent::Cancelled]),
        Some(JobState::Queued) => has(&[LogEvent::Released, LogEvent::Recovered]),
        _ => true,
    };
    (!begins || !ends).then_some(("log-incomplete", table))
}

/// Checks a change of a worker's state. Runs before [`worker`]; the changes of each worker follow each other in order.
pub(super) fn history(collector: &mut Collector, row: &[Cell]) {
    let (worker, state) = (row[0].id(), row[1].number());
    if let Some(before) = collector.histories.insert(worker, state)
        && let (Some(before), Some(state)) = (worker_state(before), worker_state(state))
        && !before.can_transition_to(state)
    {
        collector.add("worker-history", worker, &format!("{worker} from {before} to {state}"));
    }
}

pub(super) fn worker(collector: &mut Collector, row: &[Cell]) {
    let (id, state, key) = (row[0].id(), row[1].number(), row[2].text());
    let last = collector.histories.get(&id).copied();
    if last != Some(state)
        && let Some(now) = worker_state(state)
    {
        let last = last.and_then(worker_state).map_or("nothing".into(), |state| state.to_string());
        collector.add("worker-history", id, &format!("{key} is {now}, its history ends with {last}"));
    }
}

/// Returns the state that is stored as this number.
fn job_state(code: i64) -> Option<JobState> {
    JobState::ALL.into_iter().find(|state| i64::from(state_code(*state)) == code)
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
        assert_eq!(check_log("completed", 6, 1, whole), None);
        for (state, run, log, code) in [
            (6, 1, r#"[1000,"queued""#, "log-unreadable"),
            (6, 1, r#"["queued"]"#, "log-unreadable"),
            (6, 1, "", "log-incomplete"),
            (6, 1, r#"[1000,"queued"],[1001,"assigned"]"#, "log-incomplete"),
            (6, 1, r#"[1001,"assigned"],[1002,"completed"]"#, "log-incomplete"),
            (7, 1, r#"[1000,"queued"],[1001,"completed"]"#, "log-incomplete"),
            (6, 1, r#"[20001,"queued"],[10000,"completed"]"#, "log-time"),
        ] {
            assert_eq!(check_log("x", state, run, log), Some((code, "x")), "{log}");
        }
        assert_eq!(check_log("ended", 8, 0, r#"[5,"cancelled","by a person"]"#), None, "it never ran");
        assert_eq!(check_log("completed", 6, 1, r#"[20000,"queued"],[10000,"completed"]"#), None, "clocks differ");
    }

    #[test]
    fn a_finding_names_twenty_rows_and_counts_the_rest() {
        let mut collector = Collector::default();
        for n in 0..25 {
            collector.add("job-without-state", Uuid::from_u128(n), "");
        }
        let finding = collector.findings().remove(0);
        assert_eq!((finding.count, finding.text.matches("00000000-").count()), (25, EXAMPLES));
        assert!(finding.text.ends_with("and 5 more"), "{}", finding.text);
    }
}
