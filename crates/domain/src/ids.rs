//! Identities. All are UUIDv7, so they sort by the time they were made; a run is a number from one ever-growing sequence.

use std::{fmt, str::FromStr};

use serde::{Deserialize, Serialize};
use uuid::Uuid;

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
    /// One start of a server process. A restarted server is another node, so nothing of the dead one can look alive.
    NodeId
);
id!(
    /// One start of a worker.
    WorkerId
);

impl JobId {
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
    fn a_time_bound_lies_before_every_id_of_that_time() {
        let id = JobId::new();
        let (seconds, nanos) = id.0.get_timestamp().expect("version 7").to_unix();
        let ms = i64::try_from(seconds * 1000 + u64::from(nanos) / 1_000_000).expect("small");
        assert!(JobId::first_at_ms(ms) <= id);
        assert!(JobId::first_at_ms(ms + 1) > id);
    }
}
