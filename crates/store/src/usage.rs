//! Usage of paid services, for their budgets.

use async_trait::async_trait;
use faena_domain::{JobId, TaskId, Timestamp};

use crate::Result;

/// Reserves and counts tokens of language models, by day in UTC and by task.
#[async_trait]
pub trait UsageStore: Send + Sync + 'static {
    /// Reserves tokens for one call on the day of `now`. Returns `false`, and reserves nothing, if the day would exceed `limit`.
    ///
    /// A reservation counts until it is settled, so that concurrent calls, including those of other nodes, do not exceed the limit
    /// together. A call whose server died counts as if it had used its whole reservation.
    async fn tokens_reserve(&self, tokens: u64, limit: u64, now: Timestamp) -> Result<bool>;

    /// Replaces a reservation of the day of `reserved_at` by what the call has used.
    async fn tokens_settle(&self, reserved: u64, used: u64, reserved_at: Timestamp) -> Result<()>;

    /// Reserves tokens of the task that a job belongs to, if its machine limits them. A reservation counts until it is settled.
    async fn task_tokens_reserve(&self, job: JobId, tokens: u64) -> Result<TaskTokens>;

    /// Replaces a reservation of a task by what the call has used.
    async fn task_tokens_settle(&self, task: TaskId, reserved: u64, used: u64) -> Result<()>;

    /// Returns the tokens that are used or reserved on the day of `now`.
    async fn tokens_used(&self, now: Timestamp) -> Result<u64>;
}

/// Whether a task may use more tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TaskTokens {
    /// The job belongs to no task, or to one without a limit.
    Unlimited,
    Reserved(TaskId),
    Exceeded {
        task: TaskId,
        limit: u64,
        /// Used or reserved so far.
        used: u64,
    },
}

/// Number of days for which the usage is kept.
pub const KEEP_DAYS: i64 = 31;

/// Returns the number of the day since 1970.
pub fn day(at: Timestamp) -> i64 {
    at.as_ms().div_euclid(86_400_000)
}

/// Returns a number of tokens as the database stores it, capped so that sums do not overflow.
pub fn stored(tokens: u64) -> i64 {
    i64::try_from(tokens).unwrap_or(i64::MAX / 4).min(i64::MAX / 4)
}
