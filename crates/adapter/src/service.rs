//! The interface that the smith and the sandbox implement.

use async_trait::async_trait;
use tokio_util::sync::CancellationToken;

use crate::{
    progress::Progress,
    records::{Record, Records},
    task::Work,
};

/// A service that does one kind of work.
#[async_trait]
pub trait Service: Send + Sync + 'static {
    /// Returns the types of the messages that it receives.
    fn messages(&self) -> &'static [&'static str];

    /// Returns the states in which tasks wait for this service.
    fn states(&self) -> &'static [&'static str];

    /// Returns whether the work is for this service.
    fn accepts(&self, work: &Work) -> bool {
        self.states().contains(&work.state())
    }

    /// Does the work of a record, and returns the type and payload of the result.
    ///
    /// It may be called again for the same record after a crash, so it first removes what an interrupted run left.
    async fn perform(&self, run: &mut Run<'_>) -> Result<(&'static str, serde_json::Value), Failure>;

    /// Deletes what the service stores for a task that has ended, apart from the task's folder.
    async fn forget(&self, records: &Records, task: &str);
}

/// One run of a piece of work.
pub struct Run<'a> {
    pub record: &'a mut Record,
    pub records: &'a Records,
    pub cancel: &'a CancellationToken,
    pub progress: &'a Progress,
}

impl Run<'_> {
    /// Stores the record.
    pub fn save(&self) -> Result<(), Failure> {
        self.records.save(self.record).map_err(|error| Failure::Retry(format!("cannot store the record: {error}")))
    }
}

/// Why work has no result.
#[derive(Debug, PartialEq)]
pub enum Failure {
    /// The task no longer waits for it, or the program stops.
    Cancelled,
    /// Another attempt may succeed.
    Retry(String),
    /// Another attempt would fail the same way.
    Final(String),
}
