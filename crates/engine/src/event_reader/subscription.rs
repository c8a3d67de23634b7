//! One subscriber: its filter, its position, and the next event for it.

use std::{borrow::Cow, collections::VecDeque, sync::Arc};

use faena_domain::{JobId, TaskId, event_type_matches};
use faena_store::{EventPosition, EventQuery, StoreError, StoredEvent};
use serde::Deserialize;
use tokio::sync::broadcast::{self, error::RecvError};
use uuid::Uuid;

use super::{BATCH, Batch, SubscriberPermit};

/// Which events a subscriber receives. All conditions must hold.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct EventFilter {
    /// Patterns such as `job.*` or `schedule.missed`. Empty: all types.
    pub types: Vec<String>,
    pub queue: Option<String>,
    /// Queues that the subscriber is restricted to: events of other queues, and those without a queue, are hidden.
    /// `None`: all queues.
    pub queues: Option<Vec<String>>,
    pub correlation_id: Option<String>,
    pub job: Option<JobId>,
    pub task: Option<TaskId>,
    /// Whether only events of tasks are shown.
    pub tasks_only: bool,
}

impl EventFilter {
    pub fn matches(&self, event: &StoredEvent) -> bool {
        (self.types.is_empty() || self.types.iter().any(|pattern| event_type_matches(pattern, &event.kind)))
            && self.correlation_id.as_ref().is_none_or(|id| *id == event.correlation_id)
            && self.job.is_none_or(|id| id.0 == event.subject)
            && self.task.is_none_or(|id| id.0 == event.subject)
            && self.queue.as_ref().is_none_or(|queue| queue_of(event).is_some_and(|name| name == queue.as_str()))
            && self
                .queues
                .as_ref()
                .is_none_or(|queues| queue_of(event).is_some_and(|name| queues.iter().any(|queue| name == *queue)))
            && (!self.tasks_only || is_of_task(event))
    }
}

fn queue_of(event: &StoredEvent) -> Option<Cow<'_, str>> {
    #[derive(Deserialize)]
    struct Data<'a> {
        #[serde(borrow)]
        queue: Option<Cow<'a, str>>,
    }
    serde_json::from_str::<Data>(&event.data).ok()?.queue
}

/// Returns whether a task published the event. Machines choose the types of their events, so the type does not show
/// this.
fn is_of_task(event: &StoredEvent) -> bool {
    #[derive(Deserialize)]
    struct Data {
        metadata: Metadata,
    }
    #[derive(Deserialize)]
    #[serde(rename_all = "camelCase")]
    struct Metadata {
        task_id: Uuid,
    }
    serde_json::from_str::<Data>(&event.data).is_ok_and(|data| data.metadata.task_id == event.subject)
}

/// A gap: some events in this range were pruned or never recorded. The events of this range that still exist follow.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Gap {
    /// Up to this position nothing is missing.
    pub after: EventPosition,
    /// From this position on nothing is missing.
    pub first: EventPosition,
}

/// What a subscriber receives.
#[derive(Clone, PartialEq, Debug)]
pub enum StreamItem {
    Event(Arc<StoredEvent>),
    Gap(Gap),
}

pub struct Subscription {
    permit: SubscriberPermit,
    batches: broadcast::Receiver<Arc<Batch>>,
    filter: EventFilter,
    /// Everything up to here was delivered or does not match the filter.
    position: EventPosition,
    /// Everything up to here was read; what matches is in `queue`.
    read_up_to: EventPosition,
    queue: VecDeque<StreamItem>,
    /// Gaps up to here were reported or must not be reported.
    gaps_up_to: EventPosition,
    /// Position after the last gap: its end, or the first event in it that is kept.
    after_gap: EventPosition,
    /// The next events have to be read from the store.
    is_behind: bool,
}

impl Subscription {
    pub(super) fn new(
        permit: SubscriberPermit,
        batches: broadcast::Receiver<Arc<Batch>>,
        filter: EventFilter,
        from: EventPosition,
        gaps_up_to: EventPosition,
    ) -> Subscription {
        Subscription {
            permit,
            batches,
            filter,
            position: from,
            read_up_to: from,
            queue: VecDeque::new(),
            gaps_up_to,
            after_gap: from,
            is_behind: true,
        }
    }

    /// Returns the position from which another subscription continues without a gap or a repetition.
    pub fn position(&self) -> EventPosition {
        self.position
    }

    /// Waits for the next item. Dropping the future loses nothing.
    ///
    /// # Errors
    /// Fails if the store does not answer. The caller may repeat the call.
    pub async fn next(&mut self) -> Result<StreamItem, StoreError> {
        loop {
            if let Some(item) = self.queue.pop_front() {
                self.position = match &item {
                    StreamItem::Event(event) => event.position,
                    StreamItem::Gap(_) => self.after_gap,
                };
                return Ok(item);
            }
            self.position = self.read_up_to;
            if self.is_behind {
                self.catch_up().await?;
                continue;
            }
            match self.batches.recv().await {
                Ok(batch) if batch.after > self.read_up_to => self.is_behind = true,
                Ok(batch) => {
                    let new = batch.events.iter().filter(|event| event.position > self.read_up_to).cloned().collect();
                    self.enqueue(new, batch.up_to);
                }
                Err(RecvError::Lagged(_)) => self.is_behind = true,
                Err(RecvError::Closed) => std::future::pending().await,
            }
        }
    }

    /// Reads the next events from the store.
    async fn catch_up(&mut self) -> Result<(), StoreError> {
        let reader = self.permit.0.clone();
        let Ok(_permit) = reader.catching_up.acquire().await else { return Ok(()) };
        let events = reader.store.event_list(EventQuery::After(self.read_up_to), BATCH).await?;
        // Checked after the read, because old events may be deleted at any moment.
        if self.read_up_to >= self.gaps_up_to
            && let Some(gap) = reader.gap_after(self.read_up_to).await?
        {
            self.queue.push_back(StreamItem::Gap(gap));
            self.gaps_up_to = gap.first - 1;
            if events.first().is_none_or(|event| event.position >= gap.first) {
                self.read_up_to = gap.first - 1;
            }
            self.after_gap = self.read_up_to;
        }
        self.is_behind = events.len() == BATCH;
        if let Some(up_to) = events.last().map(|event| event.position) {
            self.enqueue(events.into_iter().map(Arc::new).collect(), up_to);
        }
        Ok(())
    }

    fn enqueue(&mut self, events: Vec<Arc<StoredEvent>>, up_to: EventPosition) {
        self.queue.extend(events.into_iter().filter(|event| self.filter.matches(event)).map(StreamItem::Event));
        self.read_up_to = self.read_up_to.max(up_to);
    }
}
