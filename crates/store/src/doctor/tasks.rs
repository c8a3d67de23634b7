//! The invariants of machines and tasks.
//!
//! Every definition is readable and matches its stored hash. Every task that has not ended has the timers that its
//! states need, so it cannot wait forever; its columns agree with its body; its history has no gap and ends in its
//! state; its jobs have no later epoch than the task. One query returns each task, then its records, then its jobs, so
//! that one task at a time is in memory.

use std::collections::HashMap;

use faena_domain::Timestamp;
use faena_machine::{Definition, Record, Task, contradictions, with_timers};
use uuid::Uuid;

use super::{
    Cell, Collector, Dialect,
    checks::{Code, FIX, RESTORE, SERVE, error, warning},
};
use crate::tasks::to_text;

pub(super) const CODES: &[Code] = &[
    error(
        "machine-unreadable",
        "{machine is|machines are} unreadable, so {its|their} tasks cannot continue",
        "{detail}",
        RESTORE,
    ),
    error("machine-changed", "{machine was|machines were} changed after {its|their} registration", "{detail}", RESTORE),
    error(
        "task-without-machine",
        "{task has|tasks have} a machine that is not registered",
        "{id} ({detail})",
        "register the version again (\"faena machines register\")",
    ),
    error("task-unreadable", "{task is|tasks are} unreadable and cannot continue", "{id} ({detail})", RESTORE),
    error("task-timers", "{task lacks|tasks lack} a timer, or {has|have} one too many", "{id} ({detail})", FIX)
        .repaired("{task|tasks} given the timers of {its|their} states"),
    error("task-columns", "{task has|tasks have} columns that differ from {its|their} body", "{id} ({detail})", FIX)
        .repaired("{task|tasks} given the columns of {its|their} body"),
    error("task-inconsistent", "{task is|tasks are} inconsistent", "{id} ({detail})", RESTORE),
    error("task-history", "{task has|tasks have} a broken history", "{id} ({detail})", RESTORE),
    warning("task-overdue", "{task has|tasks have} a timer that is overdue", "{id} ({detail}, {x:s} ago)", SERVE),
];

/// Reads the machines. Runs before [`TASKS`].
pub(crate) const MACHINES: &str = "SELECT name, CAST(version AS bigint), hash, definition FROM machine";

/// Each task (part 0), its records (part 1) and its jobs (part 2).
pub(super) const TASKS: &str = "
    SELECT id, CAST(0 AS bigint) AS part, CAST(0 AS bigint) AS n, body AS body, machine AS machine, CAST(version AS bigint) AS version,
           status AS status, state AS state, ended_at AS ended_at, due_at AS due_at,
           CAST(CASE WHEN approval THEN 1 ELSE 0 END AS bigint) AS approval
    FROM task
    UNION ALL SELECT task, 1, sequence, record, '', 0, '', '', NULL, NULL, 0 FROM task_record
    UNION ALL SELECT task, 2, epoch, name, '', 0, '', state, NULL, NULL, 0 FROM task_job
    ORDER BY 1, 2, 3";

pub(super) const OVERDUE: &str = "
    SELECT 'task-overdue' AS code, id, machine AS detail, {now} - due_at AS x, CAST(NULL AS bigint) AS y, CAST(NULL AS bigint) AS z
    FROM task WHERE due_at < {now} - 300000";

/// The definitions, and the task whose rows are being read.
#[derive(Default)]
pub(crate) struct TaskChecks {
    /// `None`: it is not readable.
    machines: HashMap<(String, i64), Option<Definition>>,
    current: Option<CurrentTask>,
}

struct CurrentTask {
    id: Uuid,
    /// `None`: it is not readable.
    task: Option<Task>,
    /// Number of the last record, and the state that it leads to.
    sequence: u64,
    state: String,
    problem: Option<String>,
}

/// Checks a row of [`MACHINES`].
pub(super) fn machine(collector: &mut Collector, row: &[Cell]) {
    let (name, version, hash) = (row[0].text(), row[1].number(), row[2].text());
    let detail = format!("{name} version {version}");
    let definition = Definition::parse(row[3].text());
    match &definition {
        Err(_) => collector.add("machine-unreadable", Uuid::nil(), &detail),
        Ok(definition)
            if definition.hash != hash || definition.machine != name || i64::from(definition.version) != version =>
        {
            collector.add("machine-changed", Uuid::nil(), &detail);
        }
        Ok(_) => {}
    }
    collector.tasks.machines.insert((name.to_owned(), version), definition.ok());
}

/// Checks a row of [`TASKS`].
pub(super) fn task(collector: &mut Collector, row: &[Cell]) {
    match row[1].number() {
        0 => {
            finish(collector);
            begin(collector, row);
        }
        1 => record(collector, row),
        _ => job(collector, row),
    }
}

fn begin(collector: &mut Collector, row: &[Cell]) {
    let id = row[0].id();
    let task: Option<Task> = serde_json::from_str(row[3].text()).ok();
    let machine = format!("{} version {}", row[4].text(), row[5].number());
    let mut found = Vec::new();
    match (&task, collector.tasks.machines.get(&(row[4].text().to_owned(), row[5].number()))) {
        (None, _) => found.push(("task-unreadable", machine)),
        (Some(_), None) => found.push(("task-without-machine", machine)),
        (Some(task), Some(definition)) => {
            let checked = definition.iter().flat_map(|definition| check(definition, task));
            found.extend(checked);
            found.extend(wrong_columns(task, &row[6..]).map(|detail| ("task-columns", detail)));
        }
    }
    for (code, detail) in found {
        collector.add(code, id, &detail);
    }
    collector.tasks.current = Some(CurrentTask { id, task, sequence: 0, state: String::new(), problem: None });
}

fn check(definition: &Definition, task: &Task) -> Vec<(&'static str, String)> {
    let mut found: Vec<_> =
        contradictions(definition, task).into_iter().map(|text| ("task-inconsistent", text)).collect();
    // The timers that an inconsistent task needs are unknown.
    if found.is_empty() && with_timers(definition, task, task.last_seen).is_some() {
        found.push(("task-timers", task.state()));
    }
    found
}

/// Compares the columns `status, state, ended_at, due_at, approval` with the body.
fn wrong_columns(task: &Task, columns: &[Cell]) -> Option<String> {
    let time = |at: Option<Timestamp>| at.map_or(Cell::Null, |at| Cell::Number(at.as_ms()));
    let expected = [
        ("status", Cell::Text(task.status.as_str().to_owned())),
        ("state", Cell::Text(task.state())),
        ("ended_at", time(task.ended_at)),
        ("due_at", time(task.due())),
        ("approval", Cell::Number(i64::from(task.approval.is_some()))),
    ];
    let wrong = expected.iter().zip(columns).find(|((_, expected), found)| expected != *found);
    wrong.map(|((name, expected), found)| format!("{name} is {found}, not {expected}"))
}

/// Checks the next record of the current task. Records without a task are orphans.
fn record(collector: &mut Collector, row: &[Cell]) {
    let Some(current) = collector.tasks.current.as_mut().filter(|current| current.id == row[0].id()) else { return };
    let number = u64::try_from(row[2].number()).unwrap_or_default();
    let expected = current.sequence + 1;
    current.sequence = number;
    let mut problem = |text: String| {
        current.problem.get_or_insert(text);
    };
    match serde_json::from_str::<Record>(row[3].text()) {
        Err(_) => problem(format!("record {number} is unreadable")),
        Ok(record) => {
            if number != expected {
                problem(format!("record {expected} is missing"));
            } else if record.sequence != number || record.from != current.state {
                problem(format!("record {number} does not continue record {}", number - 1));
            }
            if let Some(to) = record.to {
                current.state = to;
            }
        }
    }
}

/// Checks a job of the current task.
fn job(collector: &mut Collector, row: &[Cell]) {
    let current = collector.tasks.current.as_ref().filter(|current| current.id == row[0].id());
    let Some(task) = current.and_then(|current| current.task.as_ref()) else { return };
    if u64::try_from(row[2].number()).map_or(true, |epoch| epoch > task.epoch) {
        let detail =
            format!("job {} has epoch {}, but the task has epoch {}", row[3].text(), row[2].number(), task.epoch);
        collector.add("task-inconsistent", row[0].id(), &detail);
    }
}

/// Compares the whole history with the task.
pub(super) fn finish(collector: &mut Collector) {
    let Some(current) = collector.tasks.current.take() else { return };
    let problem = current.problem.or_else(|| {
        let task = current.task.as_ref()?;
        if task.sequence != current.sequence {
            return Some(format!("it ends with record {}, not {}", current.sequence, task.sequence));
        }
        (task.state() != current.state).then(|| format!("it ends in {}, not {}", current.state, task.state()))
    });
    if let Some(problem) = problem {
        collector.add("task-history", current.id, &problem);
    }
}

/// Repairs the timers and the columns of tasks, one after the other.
#[derive(Default)]
pub(crate) struct TaskRepair {
    machines: HashMap<(String, i64), Definition>,
}

/// Reads the rows for [`TaskRepair::statement`].
pub(crate) const ALL_TASKS: &str = "SELECT id, machine, CAST(version AS bigint), body, status, state, ended_at, due_at,
    CAST(CASE WHEN approval THEN 1 ELSE 0 END AS bigint) FROM task";

impl TaskRepair {
    /// Adds a row of [`MACHINES`].
    pub fn add_machine(&mut self, row: &[Cell]) {
        if let Ok(definition) = Definition::parse(row[3].text()) {
            self.machines.insert((row[0].text().to_owned(), row[1].number()), definition);
        }
    }

    /// Returns the statement that repairs a row of [`ALL_TASKS`], if it needs one and its body is valid.
    pub fn statement(&self, dialect: &Dialect, row: &[Cell]) -> Option<String> {
        let definition = self.machines.get(&(row[1].text().to_owned(), row[2].number()))?;
        let task: Task = serde_json::from_str(row[3].text()).ok()?;
        if !contradictions(definition, &task).is_empty() {
            return None;
        }
        let repaired = with_timers(definition, &task, dialect.now);
        if repaired.is_none() && wrong_columns(&task, &row[4..]).is_none() {
            return None;
        }
        let task = repaired.unwrap_or(task);
        let time = |at: Option<Timestamp>| at.map_or("NULL".to_owned(), |at| at.as_ms().to_string());
        Some(format!(
            "UPDATE task SET status = {}, state = {}, ended_at = {}, due_at = {}, approval = {}, body = {} WHERE id = {}",
            quoted(task.status.as_str()),
            quoted(&task.state()),
            time(task.ended_at),
            time(task.due()),
            if task.approval.is_some() { "TRUE" } else { "FALSE" },
            quoted(&to_text(&task).ok()?),
            (dialect.literal)(row[0].id()),
        ))
    }
}

fn quoted(text: &str) -> String {
    format!("'{}'", text.replace('\'', "''"))
}
