//! Starts a new task from a point in the history of another.

use std::collections::BTreeMap;

use faena_domain::Timestamp;
use serde_json::{Map, Value};

use super::{Step, check_size, start::first_step};
use crate::{
    definition::Definition,
    task::{Caller, Origin, Record, Task},
};

/// A task as it was after a record of its history.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct HistoryPoint {
    /// Number of the record.
    pub record: u64,
    pub version: u32,
    /// The active states, the outermost first, joined by dots.
    pub state: String,
    pub data: Map<String, Value>,
    pub counters: BTreeMap<String, u32>,
}

impl HistoryPoint {
    /// Applies the next record.
    pub fn advance(&mut self, record: &Record) {
        self.record = record.sequence;
        self.data.extend(record.set.clone());
        self.counters = record.counters.clone().unwrap_or_else(|| std::mem::take(&mut self.counters));
        self.version = record.version.unwrap_or(self.version);
        if let Some(to) = &record.to {
            self.state = to.clone();
        }
    }

    fn innermost(&self) -> &str {
        self.state.rsplit('.').next().unwrap_or(&self.state)
    }

    /// Returns whether a task at this point has ended.
    pub fn is_final(&self, definition: &Definition) -> bool {
        definition.state(self.innermost()).is_some_and(|state| definition.states[state].ends.is_some())
    }
}

/// Creates a task in the state and with the data and counters of a point in a history.
///
/// The task enters the state as any task does: entry actions run, timers start, an approval opens. `data` replaces fields.
pub fn fork(
    definition: &Definition,
    id: String,
    creator: Caller,
    point: HistoryPoint,
    origin: Origin,
    data: Map<String, Value>,
    now: Timestamp,
) -> Result<Step, String> {
    if point.is_final(definition) {
        return Err(format!("record {} is in the final state {}; choose an earlier one", point.record, point.state));
    }
    let state = definition
        .state(point.innermost())
        .ok_or_else(|| format!("version {} of the machine has no state {}", definition.version, point.state))?;
    let mut merged = point.data;
    merged.extend(data);
    let data = Value::Object(merged);
    check_size(definition, &data)?;
    let mut task = Task::new(id, &creator, data, definition, now);
    task.counters = point.counters;
    task.start_state = Some(definition.states[state].name.clone());
    task.forked_from = Some(origin);
    first_step(definition, task, now)
}
