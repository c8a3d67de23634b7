//! Identifiers. All are UUIDv7, so they sort by creation time; a run is a number from one growing sequence.

use std::{fmt, str::FromStr, sync::Mutex};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use uuid::{ContextV7, Uuid};

use crate::Timestamp;

/// Keeps the ids of one millisecond in the order of their creation.
static CONTEXT: Mutex<ContextV7> = Mutex::new(ContextV7::new());
/// A separate context, so that ids of the current time do not move those of a given time forward.
static NOW_CONTEXT: Mutex<ContextV7> = Mutex::new(ContextV7::new());

/// Number of a claim, which all its jobs share.
///
/// Run numbers only grow, so they serve as fencing tokens: a report with an older run number changes nothing.
pub type Run = i64;

/// Creates a UUIDv7 with this time, or with the latest time that this context has seen.
fn uuid_at(context: &Mutex<ContextV7>, at: Timestamp) -> Uuid {
    let ms = u64::try_from(at.as_ms()).unwrap_or(0);
    let nanos = u32::try_from(ms % 1_000).unwrap_or(0) * 1_000_000;
    Uuid::new_v7(uuid::Timestamp::from_unix(context, ms / 1_000, nanos))
}

macro_rules! id {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize, JsonSchema)]
        #[serde(transparent)]
        #[schemars(inline)]
        pub struct $name(pub Uuid);

        impl $name {
            /// Creates an id that sorts after every id created before it in this process.
            pub fn new() -> Self {
                Self(uuid_at(&NOW_CONTEXT, Timestamp::now()))
            }
        }

        impl Default for $name {
            fn default() -> Self {
                Self::new()
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }

        impl FromStr for $name {
            type Err = uuid::Error;

            fn from_str(text: &str) -> Result<Self, Self::Err> {
                Uuid::from_str(text).map(Self)
            }
        }
    };
}

id!(
    /// Id of a job.
    JobId
);
id!(
    /// Id of an API key. A rotation keeps it.
    ApiKeyId
);
id!(
    /// Id of a webhook. All attempts share it, so that the receiver can recognise a repeated delivery.
    WebhookId
);
id!(
    /// Id of a bulk action.
    BulkId
);
id!(
    /// Id of a task.
    TaskId
);
id!(
    /// Id of a schedule.
    ScheduleId
);
id!(
    /// Id of a node: one start of a server process. A restarted server is another node, so no claim of the old process looks alive.
    NodeId
);
id!(
    /// Id of a worker's registration.
    WorkerId
);

impl JobId {
    /// Creates the id of a job that is created at `at`. The id contains the time.
    pub fn at(at: Timestamp) -> JobId {
        JobId(uuid_at(&CONTEXT, at))
    }

    /// Returns the creation time of the job.
    pub fn created_at(self) -> Timestamp {
        let ms = (self.0.as_u128() >> 80) as u64;
        Timestamp::from_ms(i64::try_from(ms).unwrap_or(i64::MAX))
    }

    /// Returns the smallest id that a job created at `ms` can have. Turns a time bound into an id bound.
    pub fn first_at_ms(ms: i64) -> JobId {
        let ms = u128::try_from(ms.max(0)).unwrap_or(0) & ((1 << 48) - 1);
        JobId(Uuid::from_u128(ms << 80))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_sort_in_the_order_of_their_creation() {
        let ids: Vec<JobId> = (0..1_000).map(|_| JobId::new()).collect();
        assert!(ids.is_sorted());
    }

    #[test]
    fn an_id_contains_the_creation_time_of_its_job() {
        let at = Timestamp::from_ms(1_763_236_800_123);
        let ids: Vec<JobId> = (0..1_000).map(|_| JobId::at(at)).collect();
        assert!(ids.is_sorted());
        assert!(ids.iter().all(|id| id.created_at() == at));
    }

    #[test]
    fn a_time_bound_is_not_greater_than_any_id_of_that_time() {
        let id = JobId::new();
        let ms = id.created_at().as_ms();
        assert!(JobId::first_at_ms(ms) <= id);
        assert!(JobId::first_at_ms(ms + 1) > id);
    }
}
