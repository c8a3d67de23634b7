//! Receives tasks through Faena's HTTP API: the event stream says that a task changed, and the task says what to do.
//!
//! A message only causes the service to read the task again, so a lost, late or repeated message does no harm. All
//! tasks that may concern the service are read when the stream begins, after a gap, and at regular intervals.

use std::{sync::Arc, time::Duration};

use faena::{ApiRequest, Client, Error, ErrorCode, Method, StreamEvent};
use serde::Deserialize;
use serde_json::{Value, json};

use super::{Delivered, Outage};
use crate::{
    CannotStart,
    backoff::Backoff,
    outgoing::Outgoing,
    runner::Runner,
    service::Service,
    task::{TaskMessage, TaskSnapshot},
};

/// Tasks per page of a list.
const PAGE: usize = 100;
/// Pages per machine and state. A later reconciliation finds further tasks, when those before them have left the state.
const MAX_PAGES: usize = 100;

pub struct Http {
    client: Client,
    machines: Vec<String>,
    originator: String,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct TaskPage {
    tasks: Vec<TaskSnapshot>,
    next_cursor: Option<String>,
}

#[derive(Deserialize)]
struct Answer {
    outcome: String,
    #[serde(default)]
    duplicate: bool,
}

impl Http {
    pub fn new(url: Option<&str>, machines: &[String], service: &str) -> Result<Http, CannotStart> {
        let client = client(url, service)?;
        Ok(Http { client, machines: machines.to_vec(), originator: service.to_owned() })
    }

    pub async fn send(&self, event: &Outgoing) -> Result<Delivered, Outage> {
        let body = json!({"type": event.kind, "payload": event.payload, "metadata": event.metadata(&self.originator)});
        let path = format!("/api/v1/tasks/{}/events", event.task);
        match self.client.request(Method::POST, &path).json(&body).send::<Answer>().await {
            Ok(answer) if answer.duplicate => Ok(Delivered::Accepted(format!("{} (duplicate)", answer.outcome))),
            Ok(answer) => Ok(Delivered::Accepted(answer.outcome)),
            Err(error) if is_final(&error) => Ok(Delivered::Refused(error.with_causes())),
            Err(error) => Err(Outage(error.with_causes())),
        }
    }

    /// Returns a task, or `None` if it does not exist or belongs to a machine that this service does not serve.
    pub async fn task(&self, id: &str) -> Result<Option<TaskSnapshot>, Outage> {
        Ok(task(&self.client, id).await?.filter(|task| self.machines.contains(&task.machine)))
    }

    /// Returns the running tasks in a state.
    async fn in_state(&self, state: &str) -> Result<Vec<TaskSnapshot>, Outage> {
        let mut found = Vec::new();
        for machine in &self.machines {
            let mut cursor = String::new();
            for _ in 0..MAX_PAGES {
                let request = self.client.request(Method::GET, "/api/v1/tasks").query("machine", machine);
                let request = request.query("state", state).query("status", "running").query("limit", PAGE);
                let page: TaskPage = request.query("cursor", &cursor).send().await.map_err(outage)?;
                found.extend(page.tasks);
                match page.next_cursor {
                    Some(next) => cursor = next,
                    None => break,
                }
            }
        }
        Ok(found)
    }
}

pub fn client(url: Option<&str>, service: &str) -> Result<Client, CannotStart> {
    let mut builder = Client::builder().user_agent(format!("faena-{service}/{}", env!("CARGO_PKG_VERSION")));
    if let Some(url) = url {
        builder = builder.url(url);
    }
    builder.build().map_err(|error| CannotStart(error.to_string()))
}

/// Returns a task, or `None` if it does not exist.
pub async fn task(client: &Client, id: &str) -> Result<Option<TaskSnapshot>, Outage> {
    match client.request(Method::GET, &format!("/api/v1/tasks/{id}")).send().await {
        Ok(task) => Ok(Some(task)),
        Err(Error::Response { code: ErrorCode::NotFound, .. }) => Ok(None),
        Err(error) => Err(outage(error)),
    }
}

fn outage(error: Error) -> Outage {
    Outage(match error {
        error @ Error::Response { code: ErrorCode::Unauthorized | ErrorCode::Forbidden, .. } => {
            format!("{error}; set FAENA_TOKEN to an API key with the scopes read and write")
        }
        error => error.with_causes(),
    })
}

/// Returns whether the server would refuse the same event again.
fn is_final(error: &Error) -> bool {
    use ErrorCode::{Conflict, InvalidTransition, NotFound, PayloadTooLarge, ValidationError};
    let Error::Response { code, .. } = error else { return false };
    matches!(code, Conflict | InvalidTransition | NotFound | PayloadTooLarge | ValidationError)
}

/// Follows the event stream until the program stops.
pub async fn follow<S: Service>(runner: &Arc<Runner<S>>, http: &Http, every: Duration) {
    let mut position = runner.records.position();
    let mut backoff = Backoff::new();
    let stop = runner.stop();
    while !stop.is_cancelled() {
        let ended = tokio::select! {
            ended = follow_once(runner, http, every, &mut position, &mut backoff) => ended,
            () = stop.cancelled() => return,
        };
        match ended {
            Ok(()) => tracing::info!("event stream ended, reconnecting"),
            Err(Outage(reason)) => tracing::warn!(reason, "event stream failed, reconnecting"),
        }
        if !backoff.wait(stop).await {
            return;
        }
    }
}

async fn follow_once<S: Service>(
    runner: &Arc<Runner<S>>,
    http: &Http,
    every: Duration,
    position: &mut Option<String>,
    backoff: &mut Backoff,
) -> Result<(), Outage> {
    let types = runner.service.messages().join(",");
    let mut request = http.client.request(Method::GET, "/api/v1/events").query("types", types);
    if let Some(position) = position.as_ref() {
        request = request.header("Last-Event-ID", position);
    }
    follow_events(request, every, backoff, async |event| {
        let Some(event) = event else { return reconcile(runner, http).await };
        handle(runner, http, &event).await?;
        if event.id.is_some() && event.id != *position {
            *position = event.id;
            let saved = position.as_ref().map_or(Ok(()), |position| runner.records.save_position(position));
            saved.map_err(|error| Outage(format!("cannot write the position: {error}")))?;
        }
        Ok(())
    })
    .await
}

/// Calls `handle` for each event of a stream until it ends. Calls it with `None` when everything must be read: when the
/// stream has begun, and then at regular intervals.
pub async fn follow_events(
    request: ApiRequest<'_>,
    every: Duration,
    backoff: &mut Backoff,
    mut handle: impl AsyncFnMut(Option<StreamEvent>) -> Result<(), Outage>,
) -> Result<(), Outage> {
    let mut stream = request.stream().await.map_err(outage)?;
    let mut tick = tokio::time::interval(every);
    tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let mut has_begun = false;
    loop {
        let event = tokio::select! {
            event = stream.next() => event,
            // The first tick comes immediately, but after the stream has begun, so nothing is missed between the two.
            _ = tick.tick(), if has_begun => {
                handle(None).await?;
                continue;
            }
        };
        let Some(event) = event else { return Ok(()) };
        if !std::mem::replace(&mut has_begun, true) {
            backoff.reset();
            tracing::info!("event stream connected");
        }
        handle(Some(event)).await?;
    }
}

async fn handle<S: Service>(runner: &Arc<Runner<S>>, http: &Http, event: &StreamEvent) -> Result<(), Outage> {
    if event.data.is_empty() {
        return Ok(());
    }
    if event.event.as_deref() == Some("gap") {
        tracing::warn!("events were deleted before they were read, reading all tasks");
        return reconcile(runner, http).await;
    }
    match TaskMessage::parse(event.event.as_deref().unwrap_or_default(), event.data.as_bytes()) {
        Ok(message) if runner.answer_status_request(&message) => Ok(()),
        Ok(message) if runner.concerns(&message) => read_task(runner, http, &message.task).await,
        Ok(_) => Ok(()),
        Err(reason) => {
            tracing::warn!(reason, "cannot read an event, ignoring it");
            Ok(())
        }
    }
}

/// Reads every task that may wait for this service, and those that it has records of.
async fn reconcile<S: Service>(runner: &Arc<Runner<S>>, http: &Http) -> Result<(), Outage> {
    let mut seen = std::collections::HashSet::new();
    for state in runner.service.states() {
        for task in http.in_state(state).await? {
            seen.insert(task.id.clone());
            runner.apply_snapshot(task);
        }
    }
    for task in runner.records.tasks() {
        if !seen.contains(&task) {
            read_task(runner, http, &task).await?;
        }
    }
    Ok(())
}

async fn read_task<S: Service>(runner: &Arc<Runner<S>>, http: &Http, id: &str) -> Result<(), Outage> {
    match http.task(id).await? {
        Some(task) => runner.apply_snapshot(task),
        None => runner.forget(id),
    }
    Ok(())
}

/// Returns the task id and the payload of a CloudEvent.
pub fn payload(event: &StreamEvent) -> Option<(String, Value)> {
    let body: Value = serde_json::from_str(&event.data).ok()?;
    let task = body["data"]["metadata"]["taskId"].as_str()?.to_owned();
    Some((task, body["data"]["payload"].clone()))
}
