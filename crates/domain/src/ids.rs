//! Identities. All are UUIDv7, so they sort by the time they were made; a run is a number from one ever-growing sequence.

use std::{fmt, str::FromStr, sync::Mutex};

use serde::{Deserialize, Serialize};
use uuid::{ContextV7, Uuid};

use crate::Timestamp;

/// Keeps ids of the same millisecond in the order they were made.
static CONTEXT: Mutex<ContextV7> = Mutex::new(ContextV7::new());

/// The number of one hand-out of a job. It only ever grows, so it is the fence: a report under an older run changes nothing.
pub type Run = i64;

macro_rules! id {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
        #[serde(transparent)]
        pub struct $name(pub Uuid);

        impl $name {
            /// A new identity, later in order than every one made before it in this process.
            pub fn new() -> Self {
                Self(Uuid::now_v7())
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
    /// One job.
    JobId
);
id!(
    /// One webhook: the same for all its attempts, so that its receiver can tell them from news.
    WebhookId
);
id!(
    /// One action on many jobs.
    BulkId
);
id!(
    /// One schedule.
    ScheduleId
);
id!(
    /// One start of a server process. A restarted server is another node, so nothing of the dead one can look alive.
    NodeId
);
id!(
    /// One start of a worker.
    WorkerId
);

impl JobId {
    /// A new identity for a job that is created at `at`: the time is part of the id.
    pub fn at(at: Timestamp) -> JobId {
        let ms = u64::try_from(at.as_ms()).unwrap_or(0);
        let nanos = u32::try_from(ms % 1_000).unwrap_or(0) * 1_000_000;
        JobId(Uuid::new_v7(uuid::Timestamp::from_unix(&CONTEXT, ms / 1_000, nanos)))
    }

    /// When the job was created.
    pub fn created_at(self) -> Timestamp {
        let ms = (self.0.as_u128() >> 80) as u64;
        Timestamp::from_ms(i64::try_from(ms).unwrap_or(i64::MAX))
    }

    /// The smallest id that a job created at `ms` could have: turns a time bound into an id bound.
    pub fn first_at_ms(ms: i64) -> JobId {
        let ms = u128::try_from(ms.max(0)).unwrap_or(0) & ((1 << 48) - 1);
        JobId(Uuid::from_u128(ms << 80))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_sort_in_the_order_they_were_made() {
        let ids: Vec<JobId> = (0..1_000).map(|_| JobId::new()).collect();
        assert!(ids.is_sorted());
    }

    #[test]
    fn an_id_carries_the_time_of_its_job() {
        let at = Timestamp::from_ms(1_763_236_800_123);
        let ids: Vec<JobId> = (0..1_000).map(|_| JobId::at(at)).collect();
        assert!(ids.is_sorted());
        assert!(ids.iter().all(|id| id.created_at() == at));
    }

    #[test]
    fn a_time_bound_lies_before_every_id_of_that_time() {
        let id = JobId::new();
        let ms = id.created_at().as_ms();
        assert!(JobId::first_at_ms(ms) <= id);
        assert!(JobId::first_at_ms(ms + 1) > id);
    }
}
