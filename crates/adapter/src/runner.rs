//! Runs the work of a service: one piece per task at a time, a bounded number altogether, with heartbeats for each.
//!
//! Work is on disk before it is acknowledged, and its result before it is sent.

use std::{collections::HashMap, io, sync::Arc, time::Duration};

use parking_lot::Mutex;
use serde_json::json;
use tokio::{sync::Semaphore, task::JoinHandle};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use crate::{
    CannotStart,
    backoff::Backoff,
    options::ServiceArguments,
    outgoing::{FAILED, Outgoing},
    progress::Progress,
    records::{Record, Records},
    service::{Failure, Run, Service},
    task::{ASK_STATE, ENDED, Known, STATE_CHANGED, TaskMessage, TaskSnapshot, WorkItem},
    transport::{Delivered, Transport, broker, http},
};

/// Maximum number of status answers that are sent concurrently.
const MAX_ANSWERS: usize = 32;
/// How long stopping may take.
const STOP_LIMIT: Duration = Duration::from_secs(10);
/// How often the log says that the program is alive.
const ALIVE_EVERY: Duration = Duration::from_secs(60);

pub struct Runner<S> {
    pub service: S,
    pub records: Records,
    transport: Transport,
    heartbeat: Duration,
    attempts: u32,
    slots: Semaphore,
    answers: Arc<Semaphore>,
    running: Mutex<HashMap<String, Running>>,
    tracker: TaskTracker,
    stop: CancellationToken,
}

/// Work in progress.
struct Running {
    id: String,
    state: &'static str,
    cancel: CancellationToken,
    progress: Progress,
    handle: JoinHandle<()>,
}

/// Runs a service until the program stops.
pub async fn serve<S: Service>(
    service: S,
    name: &str,
    records: Records,
    arguments: &ServiceArguments,
    stop: CancellationToken,
) -> Result<(), CannotStart> {
    let transport = Transport::new(&arguments.transport, &arguments.machines, name)?;
    let runner = Arc::new(Runner {
        service,
        records,
        transport,
        heartbeat: arguments.heartbeat,
        attempts: arguments.attempts,
        slots: Semaphore::new(arguments.concurrency.into()),
        answers: Arc::new(Semaphore::new(MAX_ANSWERS)),
        running: Mutex::default(),
        tracker: TaskTracker::new(),
        stop,
    });
    tracing::info!(
        service = name,
        workdir = %runner.records.folder().display(),
        concurrency = arguments.concurrency,
        machines = arguments.machines.join(","),
        "adapter started"
    );
    let receive = async {
        match &runner.transport {
            Transport::Http(http) => http::follow(&runner, http, arguments.reconcile).await,
            Transport::Broker(broker) => broker::consume(&runner, broker).await,
        }
    };
    tokio::select! {
        () = receive => {}
        () = runner.log_alive() => {}
    }
    runner.shut_down().await;
    Ok(())
}

impl<S: Service> Runner<S> {
    pub fn stop(&self) -> &CancellationToken {
        &self.stop
    }

    async fn log_alive(&self) {
        loop {
            tokio::time::sleep(ALIVE_EVERY).await;
            let (running, free) = (self.running.lock().len(), self.slots.available_permits());
            tracing::info!(running, free, "adapter alive");
        }
    }

    /// Kills all commands. Their work starts again when the service does.
    async fn shut_down(&self) {
        self.stop.cancel();
        self.tracker.close();
        if tokio::time::timeout(STOP_LIMIT, self.tracker.wait()).await.is_err() {
            tracing::warn!("stopped before all work ended, unfinished work restarts at the next start");
        }
        self.transport.close().await;
    }

    /// Returns whether a message is about a task of this service.
    pub fn concerns(&self, message: &TaskMessage) -> bool {
        match message.kind.as_str() {
            STATE_CHANGED | ENDED => {
                self.running.lock().contains_key(&message.task) || self.records.task_folder(&message.task).exists()
            }
            kind => self.service.messages().contains(&kind),
        }
    }

    /// Answers a status request about running work immediately. Returns `false` if the message is not a status request, or if the work
    /// does not run here.
    pub fn answer_status_request(self: &Arc<Self>, message: &TaskMessage) -> bool {
        if message.kind != ASK_STATE {
            return false;
        }
        let Some(state) = self.running.lock().get(&message.task).map(|running| running.progress.state()) else {
            return false;
        };
        // If so many answers are still being sent, the connection is down; the next heartbeat contains the state too.
        if let Ok(permit) = self.answers.clone().try_acquire_owned() {
            let event = Outgoing::heartbeat(&message.task, state, Some(&message.trace));
            let runner = self.clone();
            self.tracker.spawn(async move {
                runner.send_heartbeat(&event).await;
                drop(permit);
            });
        }
        true
    }

    /// Starts, keeps or stops work so that it matches the task's state.
    pub fn apply_snapshot(self: &Arc<Self>, task: TaskSnapshot) {
        if task.has_ended() {
            return self.forget(&task.id);
        }
        if task.status == "paused" {
            return;
        }
        match WorkItem::of_task(&task) {
            Ok(Some(item)) if self.service.accepts(&item.work) => self.accept(item).unwrap_or_else(|error| {
                tracing::error!(task = task.id, %error, "cannot store the work, check the disk of the workdir");
            }),
            Ok(_) => self.release(&task.id),
            Err(reason) => tracing::warn!(task = task.id, reason, "cannot read a task, ignoring it"),
        }
    }

    /// Handles a message. When it returns, the work is stored.
    pub fn receive(self: &Arc<Self>, message: &TaskMessage) -> Result<(), ReceiveError> {
        match message.kind.as_str() {
            ASK_STATE => {
                self.answer_status_request(message);
            }
            ENDED => self.forget(&message.task),
            STATE_CHANGED => {
                let to = message.payload["to"].as_str().unwrap_or_default();
                let state = to.split('.').next().unwrap_or_default();
                let is_left = self.running.lock().get(&message.task).is_some_and(|running| running.state != state);
                if is_left {
                    self.release(&message.task);
                }
            }
            _ => {
                let record = self.records.load(&message.task);
                let known = record.map(|record| record.known).unwrap_or_default();
                if let Some(item) = self.parse(message, &known)? {
                    self.accept(item).map_err(ReceiveError::Disk)?;
                }
            }
        }
        Ok(())
    }

    /// Continues work that was interrupted or whose result was not delivered.
    pub fn resume(self: &Arc<Self>) {
        for task in self.records.tasks() {
            let Some(record) = self.records.load(&task).filter(|record| !record.is_delivered) else { continue };
            if let Err(error) = self.accept(record.item) {
                tracing::error!(task, %error, "cannot continue the work of a task");
            }
        }
    }

    fn parse(&self, message: &TaskMessage, known: &Known) -> Result<Option<WorkItem>, ReceiveError> {
        let item = WorkItem::of_message(message, known).map_err(ReceiveError::Invalid)?;
        Ok(item.filter(|item| self.service.accepts(&item.work)))
    }

    /// Stores and starts work, unless it already runs or has ended.
    fn accept(self: &Arc<Self>, item: WorkItem) -> io::Result<()> {
        let mut running = self.running.lock();
        if self.stop.is_cancelled() || running.get(&item.task).is_some_and(|running| running.id == item.id) {
            return Ok(());
        }
        let record = match self.records.load(&item.task) {
            Some(record) if record.past.contains(&item.id) => return Ok(()),
            Some(record) if record.item.id == item.id && record.is_delivered => return Ok(()),
            Some(record) if record.item.id == item.id => record,
            previous => {
                let record = Record::new(item, previous);
                self.records.save(&record)?;
                record
            }
        };
        let previous = running.remove(&record.item.task).map(|previous| {
            previous.cancel.cancel();
            previous.handle
        });
        let (task, id, state) = (record.item.task.clone(), record.item.id.clone(), record.item.work.state());
        let (cancel, progress) = (self.stop.child_token(), Progress::default());
        progress.begin("en cola");
        tracing::info!(task, state, work = id, "work accepted");
        let run = self.clone().run(record, cancel.clone(), progress.clone(), previous);
        let handle = self.tracker.spawn(run);
        running.insert(task, Running { id, state, cancel, progress, handle });
        Ok(())
    }

    /// Cancels the work of a task that no longer waits for it.
    fn release(&self, task: &str) {
        if let Some(running) = self.running.lock().get(task) {
            running.cancel.cancel();
        }
    }

    /// Cancels the work of a task that has ended, and deletes its record.
    pub fn forget(self: &Arc<Self>, task: &str) {
        let previous = self.running.lock().remove(task);
        if previous.is_none() && !self.records.task_folder(task).exists() {
            return;
        }
        let (runner, task) = (self.clone(), task.to_owned());
        self.tracker.spawn(async move {
            if let Some(running) = previous {
                running.cancel.cancel();
                let _ = running.handle.await;
            }
            runner.service.forget(&runner.records, &task).await;
            match runner.records.remove(&task) {
                Ok(()) => tracing::info!(task, "task ended, files removed"),
                Err(error) => tracing::warn!(task, %error, "cannot remove the files of an ended task"),
            }
        });
    }

    async fn run(
        self: Arc<Self>,
        record: Record,
        cancel: CancellationToken,
        progress: Progress,
        previous: Option<JoinHandle<()>>,
    ) {
        let (task, id) = (record.item.task.clone(), record.item.id.clone());
        if let Some(previous) = previous {
            let _ = previous.await;
        }
        tokio::select! {
            () = self.carry_out(record, &cancel, &progress) => {}
            () = self.send_heartbeats(&task, &progress) => {}
        }
        let mut running = self.running.lock();
        if running.get(&task).is_some_and(|running| running.id == id) {
            running.remove(&task);
        }
    }

    async fn carry_out(&self, mut record: Record, cancel: &CancellationToken, progress: &Progress) {
        let task = record.item.task.clone();
        let result = match record.result.clone() {
            Some(result) => result,
            None => {
                let permit = tokio::select! {
                    permit = self.slots.acquire() => permit,
                    () = cancel.cancelled() => return,
                };
                let Some(result) = self.attempt(&mut record, cancel, progress).await else {
                    return tracing::info!(task, "work cancelled");
                };
                drop(permit);
                record.result = Some(result.clone());
                if let Err(error) = self.records.save(&record) {
                    return tracing::error!(task, %error, "cannot store a result, the work starts again");
                }
                result
            }
        };
        if self.deliver(&result, cancel).await {
            record.is_delivered = true;
            if let Err(error) = self.records.save(&record) {
                tracing::error!(task, %error, "cannot store that a result was delivered, it is sent again");
            }
        }
    }

    /// Does the work, retrying failed attempts. Returns its result or final failure, or `None` if it was cancelled.
    async fn attempt(&self, record: &mut Record, cancel: &CancellationToken, progress: &Progress) -> Option<Outgoing> {
        let (task, id) = (record.item.task.clone(), record.item.id.clone());
        let mut backoff = Backoff::new();
        for attempt in 1.. {
            progress.set_attempt(attempt);
            let mut run = Run { record, records: &self.records, cancel, progress };
            let reason = match self.service.perform(&mut run).await {
                Ok((kind, payload)) => return Some(Outgoing::result(&task, &id, kind, payload)),
                Err(_) if cancel.is_cancelled() => return None,
                Err(Failure::Cancelled) => return None,
                Err(Failure::Retry(reason)) if attempt < self.attempts => {
                    tracing::warn!(task, attempt, reason, "attempt failed");
                    if !backoff.wait(cancel).await {
                        return None;
                    }
                    continue;
                }
                Err(Failure::Retry(reason) | Failure::Final(reason)) => reason,
            };
            tracing::warn!(task, attempt, reason, "work failed");
            return Some(Outgoing::result(&task, &id, FAILED, json!({"motivo": reason})));
        }
        None
    }

    /// Sends a result until it is delivered. Returns `false` if the work was cancelled or the program is stopping.
    async fn deliver(&self, event: &Outgoing, cancel: &CancellationToken) -> bool {
        let mut backoff = Backoff::new();
        loop {
            match self.transport.send(event).await {
                Ok(Delivered::Accepted(outcome)) => {
                    tracing::info!(task = event.task, event = event.kind, outcome, "result delivered");
                    return true;
                }
                Ok(Delivered::Refused(reason)) => {
                    tracing::warn!(task = event.task, event = event.kind, reason, "result refused");
                    return true;
                }
                Err(outage) => {
                    tracing::warn!(task = event.task, event = event.kind, reason = %outage, "result not delivered, trying again");
                }
            }
            if !backoff.wait(cancel).await {
                return false;
            }
        }
    }

    /// Sends heartbeats, the first one immediately.
    async fn send_heartbeats(&self, task: &str, progress: &Progress) {
        loop {
            self.send_heartbeat(&Outgoing::heartbeat(task, progress.state(), None)).await;
            tokio::time::sleep(self.heartbeat).await;
        }
    }

    async fn send_heartbeat(&self, event: &Outgoing) {
        match self.transport.send(event).await {
            Ok(Delivered::Accepted(_)) => {}
            Ok(Delivered::Refused(reason)) => tracing::debug!(task = event.task, reason, "heartbeat refused"),
            Err(outage) => tracing::warn!(task = event.task, reason = %outage, "heartbeat not delivered"),
        }
    }
}

/// Why a message was not accepted.
#[derive(Debug, thiserror::Error)]
pub enum ReceiveError {
    #[error("{0}")]
    Invalid(String),
    #[error("cannot store the work")]
    Disk(#[source] io::Error),
}
