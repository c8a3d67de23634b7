//! Retries, deletes, searches and counts dead letters: jobs that failed permanently.

use std::collections::BTreeMap;

use async_trait::async_trait;
use faena_domain::{JobId, Timestamp};

use crate::Result;

/// Retries, deletes and summarises dead letters: jobs that failed permanently.
#[async_trait]
pub trait DeadLetterStore: Send + Sync + 'static {
    /// Retries a failed job. A job in another state is not changed.
    async fn dead_letter_retry(&self, id: JobId, by: &str, now: Timestamp) -> Result<()>;

    /// Deletes a failed job. A job in another state is not changed.
    async fn dead_letter_delete(&self, id: JobId, by: &str, now: Timestamp) -> Result<()>;

    /// Returns the reasons and the age of the dead letters. Their number is in the counters.
    async fn dead_letter_stats(&self) -> Result<DeadLetterStats>;
}

/// Summary of the dead letters.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct DeadLetterStats {
    /// Number of dead letters per reason, among the newest ones.
    pub by_reason: BTreeMap<String, u64>,
    /// How many of the newest dead letters were counted by reason.
    pub reason_sample_size: u64,
    /// The oldest by creation time.
    pub oldest: Option<JobId>,
    pub newest: Option<JobId>,
}
