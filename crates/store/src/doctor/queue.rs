//! Reads what an external queue must contain.

use std::collections::{HashMap, HashSet};

use uuid::Uuid;

use super::{Cell, file_of};
use crate::{LaneId, Result, postgres, sqlite};

/// Maximum number of ready jobs, and of delayed jobs, that are read.
const MAX_ENTRIES: usize = 1_000_000;

/// The jobs that wait in the queue of the database.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct QueueEntries {
    pub lanes: Vec<LaneId>,
    /// Ready jobs with their lanes.
    pub ready: HashMap<Uuid, LaneId>,
    /// Jobs that wait for a time.
    pub delayed: HashSet<Uuid>,
    /// Whether the database has more jobs than were read.
    pub is_truncated: bool,
}

/// Reads the queue of the database without changing it. Servers may be running.
pub async fn queue_entries(url: &str) -> Result<QueueEntries> {
    match file_of(url) {
        Some(path) => sqlite::doctor::queue_entries(path).await,
        None => postgres::doctor::queue_entries(url).await,
    }
}

/// A statement, and the function that handles each of its rows.
pub(crate) type QueueStep = (String, fn(&mut QueueEntries, &[Cell]));

/// Returns the statements that read the queue. Both databases understand them.
pub(crate) fn queue_steps() -> [QueueStep; 3] {
    let limited = |sql: &str| format!("{sql} LIMIT {}", MAX_ENTRIES + 1);
    [
        ("SELECT id FROM lane ORDER BY id".into(), QueueEntries::add_lane),
        (limited("SELECT lane, id FROM ready"), QueueEntries::add_ready),
        (limited("SELECT id FROM waiting WHERE NOT blocked"), QueueEntries::add_delayed),
    ]
}

impl QueueEntries {
    fn add_lane(&mut self, row: &[Cell]) {
        self.lanes.push(lane(&row[0]));
    }

    fn add_ready(&mut self, row: &[Cell]) {
        self.is_truncated |= self.ready.len() == MAX_ENTRIES;
        self.ready.insert(row[1].id(), lane(&row[0]));
    }

    fn add_delayed(&mut self, row: &[Cell]) {
        self.is_truncated |= self.delayed.len() == MAX_ENTRIES;
        self.delayed.insert(row[0].id());
    }
}

fn lane(cell: &Cell) -> LaneId {
    LaneId::try_from(cell.number()).unwrap_or_default()
}
