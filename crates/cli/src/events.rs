//! `faena events`: follows events through lost connections and restarts, without losing its position.

use std::{process::ExitCode, time::Duration};

use clap::Args;
use faena::{ErrorCode, StreamEvent};
use serde_json::Value;

use crate::{
    Api, CommandError, Connection, complete, ids,
    output::{print, print_error, shorten},
};

#[derive(Args)]
pub struct Arguments {
    /// Only these types, like job.*,schedule.missed; * matches anything
    #[arg(long, value_delimiter = ',', value_name = "TYPE,…")]
    types: Vec<String>,
    /// Only events of jobs in this queue
    #[arg(long, add = complete::queues())]
    queue: Option<String>,
    /// Only events with this correlation id
    #[arg(long, value_name = "ID")]
    correlation_id: Option<String>,
    /// Only events of this job
    #[arg(long, value_name = "ID", add = complete::jobs())]
    job: Option<String>,
    /// Only events of this task
    #[arg(long, value_name = "ID", add = complete::tasks())]
    task: Option<String>,
    /// Continue after this position; 0 starts at the oldest stored event [default: new events only]
    #[arg(long, value_name = "POSITION")]
    from: Option<i64>,
    #[command(flatten)]
    connection: Connection,
}

impl Arguments {
    /// Returns arguments that follow all events of one task: first the stored ones, then new ones.
    pub fn of_task(task: String, connection: Connection) -> Arguments {
        let (types, queue, correlation_id, job) = (Vec::new(), None, None, None);
        Arguments { types, queue, correlation_id, job, task: Some(task), from: Some(0), connection }
    }
}

const FIRST_DELAY: Duration = Duration::from_secs(1);
const LONGEST_DELAY: Duration = Duration::from_secs(60);

pub async fn run(mut arguments: Arguments) -> Result<ExitCode, CommandError> {
    let api = Api::new(&arguments.connection)?;
    arguments.job = ids::resolve_opt(&api, &ids::JOB, arguments.job).await?;
    arguments.task = ids::resolve_opt(&api, &ids::TASK, arguments.task).await?;
    let mut follower = Follower { position: arguments.from.map(|position| position.to_string()), has_received: false };
    let mut delay = FIRST_DELAY;
    let mut was_connected = false;
    loop {
        let (reason, retry_after) = match follower.follow(&api, &arguments).await {
            Ok(()) => ("the stream ended".to_owned(), None),
            Err(error) if !is_outage(&error) || !(was_connected || follower.has_received) => return Err(error),
            Err(error) => (error.to_string(), error.retry_after()),
        };
        if std::mem::take(&mut follower.has_received) {
            (was_connected, delay) = (true, FIRST_DELAY);
        }
        let wait = delay.max(retry_after.unwrap_or_default());
        print_error(&format!("{reason}; retrying in {} s", wait.as_secs()));
        tokio::time::sleep(wait).await;
        delay = (delay * 2).min(LONGEST_DELAY);
    }
}

/// Returns whether a retry may help.
fn is_outage(error: &CommandError) -> bool {
    use faena::Error::{Response, Unreachable};
    let CommandError::Api(error) = error else { return false };
    matches!(error, Unreachable { .. } | Response { code: ErrorCode::Unavailable | ErrorCode::RateLimited, .. })
}

struct Follower {
    /// Everything up to here was printed.
    position: Option<String>,
    /// Whether something was received over this connection.
    has_received: bool,
}

impl Follower {
    /// Prints events until the stream ends.
    async fn follow(&mut self, api: &Api, arguments: &Arguments) -> Result<(), CommandError> {
        let mut request = api
            .get("/api/v1/events")
            .query_opt("types", Some(arguments.types.join(",")).filter(|types| !types.is_empty()))
            .query_opt("queue", arguments.queue.as_ref())
            .query_opt("correlationId", arguments.correlation_id.as_ref())
            .query_opt("jobId", arguments.job.as_ref())
            .query_opt("taskId", arguments.task.as_ref());
        if let Some(position) = &self.position {
            request = request.header("Last-Event-ID", position);
        }
        let mut stream = request.stream().await?;
        while let Some(event) = stream.next().await {
            self.has_received = true;
            if !event.data.is_empty() {
                print(&format_event(&event, api.json));
            }
            // The position changes only now, so that after a lost connection the server sends unprinted events again.
            self.position = event.id.or(self.position.take());
        }
        Ok(())
    }
}

fn format_event(event: &StreamEvent, json: bool) -> String {
    let is_gap = event.event.as_deref() == Some("gap");
    match serde_json::from_str::<Value>(&event.data) {
        Ok(gap) if is_gap && json => format!("{{\"gap\":{gap}}}"),
        Ok(gap) if is_gap => {
            format!("-- gap: events after position {} and before {} were not kept", gap["after"], gap["first"])
        }
        Ok(event) if !json => one_line(&event),
        _ => event.data.clone(),
    }
}

fn one_line(event: &Value) -> String {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let data = &event["data"];
    let status = match (data["previousStatus"].as_str(), data["status"].as_str()) {
        (Some(from), Some(to)) if from != to => format!("{from} > {to}"),
        (_, Some(to)) => to.to_owned(),
        _ => text(&data["state"]) + &text(&data["outcome"]),
    };
    let name = [&data["name"], &data["workerId"]].into_iter().find_map(Value::as_str).unwrap_or_default();
    let subject = text(&event["subject"]);
    let mut line = format!("{}  {:<18} {subject}  {name}  {status}", text(&event["time"]), text(&event["type"]));
    if let Some(queue) = data["queue"].as_str() {
        line.push_str(&format!("  queue {queue}"));
    }
    line.push_str(&format!("  by {}", text(&event["actor"])));
    if let Some(error) = data["error"].as_str() {
        line.push_str(&format!("  {}", shorten(error, 80)));
    }
    line
}
