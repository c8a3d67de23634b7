//! Follows a task until it ends.
//!
//! The stream of events only signals that the task changed. The printed records come from its history, so a lost connection loses none.

use std::process::ExitCode;

use faena_machine::{Record, Status};
use serde::Deserialize;

use crate::{Api, CommandError, api::segment, output::print, tasks::path, watch::until_finished};

/// Records per request.
const PAGE: usize = 1_000;

pub async fn watch(api: &Api, id: &str) -> Result<ExitCode, CommandError> {
    let mut follower = Follower { api, id, printed: 0 };
    until_finished(async || Ok(follower.follow().await?.map(|status| status == Status::Completed))).await
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
        // The stream is open, so nothing that happens after this read is missed.
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
        // Read before the history, so that the history contains the end of a task that has ended.
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
            print(&format!("{} {} in {}{fault}", self.id, task.status.as_str(), task.state));
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
