//! Follows a task until it ends.
//!
//! The stream of events says when to look; what is printed are the records of the history, so that a lost connection loses none.

use std::{process::ExitCode, time::Duration};

use faena_machine::{Record, Status};
use serde::Deserialize;

use crate::{
    Api, CommandError,
    api::segment,
    output::print,
    tasks::{path, status},
};

const RETRY_INTERVAL: Duration = Duration::from_secs(1);
/// How many times in a row the stream may fail to open.
const MAX_FAILURES: u32 = 30;
/// Records per request.
const PAGE: usize = 1_000;

pub async fn watch(api: &Api, id: &str) -> Result<ExitCode, CommandError> {
    let mut follower = Follower { api, id, printed: 0 };
    let mut failures = 0;
    loop {
        let asked = match follower.follow().await {
            Ok(Some(Status::Completed)) => return Ok(ExitCode::SUCCESS),
            Ok(Some(_)) => return Ok(ExitCode::FAILURE),
            // The stream ended before the task, for example because the server restarts.
            Ok(None) => {
                failures = 0;
                None
            }
            Err(error) if failures < MAX_FAILURES && is_temporary(&error) => {
                failures += 1;
                error.retry_after()
            }
            Err(error) => return Err(error),
        };
        tokio::time::sleep(RETRY_INTERVAL.max(asked.unwrap_or_default())).await;
    }
}

/// Returns whether the server is unreachable, or asks to try again later.
fn is_temporary(error: &CommandError) -> bool {
    matches!(error, CommandError::Api(faena::Error::Unreachable { .. })) || error.retry_after().is_some()
}

#[derive(Deserialize)]
struct TaskStatus {
    status: Status,
    state: String,
    fault: Option<String>,
}

#[derive(Deserialize)]
struct History {
    history: Vec<Record>,
}

struct Follower<'a> {
    api: &'a Api,
    id: &'a str,
    /// Number of the last record that was printed.
    printed: u64,
}

impl Follower<'_> {
    /// Prints what happens until the task or the stream ends. Returns how the task ended.
    async fn follow(&mut self) -> Result<Option<Status>, CommandError> {
        let mut stream = self.api.get(&format!("/api/v1/events?taskId={}", segment(self.id))).stream().await?;
        // The stream is open, so nothing that happens after this look is missed.
        loop {
            if let Some(ended) = self.update().await? {
                return Ok(Some(ended));
            }
            if stream.next().await.is_none() {
                return Ok(None);
            }
        }
    }

    async fn update(&mut self) -> Result<Option<Status>, CommandError> {
        // Before the history: an ended task writes no more records that matter.
        let task: TaskStatus = self.api.get(&path(self.id, "")).send().await?;
        loop {
            let query = format!("/history?after={}&limit={PAGE}", self.printed);
            let page: History = self.api.get(&path(self.id, &query)).send().await?;
            for record in &page.history {
                self.printed = record.sequence;
                print(&if self.api.json { serde_json::to_string(record).unwrap_or_default() } else { line(record) });
            }
            if page.history.len() < PAGE {
                break;
            }
        }
        if !task.status.has_ended() {
            return Ok(None);
        }
        if !self.api.json {
            let fault = task.fault.map(|fault| format!(": {fault}")).unwrap_or_default();
            print(&format!("{} {} in {}{fault}", self.id, status(task.status), task.state));
        }
        Ok(Some(task.status))
    }
}

fn line(record: &Record) -> String {
    let outcome = format!("{:?}", record.outcome).to_lowercase();
    let to = record.to.as_ref().map(|to| format!("  to {to}")).unwrap_or_default();
    let reason = record.reason.as_ref().map(|reason| format!("  {reason}")).unwrap_or_default();
    format!("{}  {:<24} {outcome:<8} by {}{to}{reason}", record.at, record.event, record.actor)
}
