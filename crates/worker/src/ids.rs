//! Identifiers: jobs and runs.

use std::{fmt, str::FromStr};

use serde::{Deserialize, Serialize};
use uuid::Uuid;

/// The id of a job: a UUID that the server assigns.
///
/// Ids sort by the time at which their jobs were created.
///
/// ```
/// let id: faena::JobId = "0199a3c4-0000-7000-8000-000000000001".parse().expect("a UUID");
/// assert_eq!(id.to_string(), "0199a3c4-0000-7000-8000-000000000001");
/// ```
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
#[serde(transparent)]
pub struct JobId(Uuid);

impl From<Uuid> for JobId {
    fn from(id: Uuid) -> JobId {
        JobId(id)
    }
}

impl From<JobId> for Uuid {
    fn from(id: JobId) -> Uuid {
        id.0
    }
}

impl fmt::Display for JobId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl FromStr for JobId {
    type Err = uuid::Error;

    fn from_str(text: &str) -> Result<JobId, uuid::Error> {
        Uuid::from_str(text).map(JobId)
    }
}

/// The number of one run of a job.
///
/// The server assigns a larger number to every later run, so a run number works as a fencing token: a system that remembers the
/// largest number it has seen can reject writes of an older run.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
#[serde(transparent)]
pub struct RunNumber(i64);

impl RunNumber {
    /// Returns the number itself, for example to store it in a column.
    pub const fn as_i64(self) -> i64 {
        self.0
    }
}

impl From<i64> for RunNumber {
    fn from(number: i64) -> RunNumber {
        RunNumber(number)
    }
}

impl From<RunNumber> for i64 {
    fn from(run: RunNumber) -> i64 {
        run.0
    }
}

impl fmt::Display for RunNumber {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}
