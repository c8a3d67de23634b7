//! Dead letters: retries, deletes, searches and counts failed jobs.

use std::collections::BTreeMap;

use async_trait::async_trait;
use faena_domain::{JobId, Timestamp};

use crate::Result;

/// Dead letters: retries, deletes, searches and counts failed jobs.
#[async_trait]
pub trait DeadLetterStore: Send + Sync + 'static {
    /// Retries a failed job. A job in another state is not changed.
    async fn dead_letter_retry(&self, id: JobId, by: &str, now: Timestamp) -> Result<()>;

    /// Deletes a failed job. A job in another state is not changed.
    async fn dead_letter_delete(&self, id: JobId, by: &str, now: Timestamp) -> Result<()>;

    /// Returns reasons and age of the dead letters. The counters have their number.
    async fn dead_letter_stats(&self) -> Result<DeadLetterStats>;
}

/// Summary of the dead letters.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct DeadLetterStats {
    /// Reasons of the newest ones, and how many were read.
    pub by_reason: BTreeMap<String, u64>,
    pub reason_sample_size: u64,
    /// The oldest by creation time.
    pub oldest: Option<JobId>,
    pub newest: Option<JobId>,
}
