//! One who watches: what of it, up to where, and what comes next.

use std::{borrow::Cow, collections::VecDeque, sync::Arc};

use faena_domain::{JobId, event_type_matches};
use faena_store::{EventPosition, EventQuery, StoreError, StoredEvent};
use serde::Deserialize;
use tokio::sync::broadcast::{self, error::RecvError};

use super::{BATCH, Batch, Seat};

/// What somebody wants to know. Everything that is said must hold.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct EventFilter {
    /// `job.*`, `schedule.missed`; none: all.
    pub types: Vec<String>,
    pub queue: Option<String>,
    pub correlation_id: Option<String>,
    pub job: Option<JobId>,
}

impl EventFilter {
    pub fn lets_through(&self, event: &StoredEvent) -> bool {
        (self.types.is_empty() || self.types.iter().any(|pattern| event_type_matches(pattern, &event.kind)))
            && self.correlation_id.as_ref().is_none_or(|id| *id == event.correlation_id)
            && self.job.is_none_or(|id| id.0 == event.subject)
            && self.queue.as_ref().is_none_or(|queue| queue_of(event).is_some_and(|of| of == queue.as_str()))
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

/// Of what happened between these something is lost: it is kept no more, or was not kept because nobody wanted it. What is kept of it follows.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Gap {
    /// Up to here nothing is missing.
    pub after: EventPosition,
    /// From here on nothing is missing.
    pub first: EventPosition,
}

#[derive(Clone, PartialEq, Debug)]
pub enum Told {
    Event(Arc<StoredEvent>),
    Lost(Gap),
}

pub struct Subscription {
    seat: Seat,
    news: broadcast::Receiver<Arc<Batch>>,
    filter: EventFilter,
    /// Everything up to here was told, or is not wanted.
    place: EventPosition,
    /// Everything up to here was read; what of it is to be told stands in `line`.
    read: EventPosition,
    line: VecDeque<Told>,
    /// Gaps up to here were told, or nobody wants to know of them.
    gaps_upto: EventPosition,
    /// From where one goes on after the last gap: behind it, or at what is kept of it.
    after_gap: EventPosition,
    /// What comes next is read from the store, not heard.
    behind: bool,
}

impl Subscription {
    pub(super) fn new(
        seat: Seat,
        news: broadcast::Receiver<Arc<Batch>>,
        filter: EventFilter,
        from: EventPosition,
        gaps_upto: EventPosition,
    ) -> Subscription {
        Subscription {
            seat,
            news,
            filter,
            place: from,
            read: from,
            line: VecDeque::new(),
            gaps_upto,
            after_gap: from,
            behind: true,
        }
    }

    /// Whoever goes on from here misses nothing and is told nothing twice.
    pub fn place(&self) -> EventPosition {
        self.place
    }

    /// What comes next. Safe to be dropped while it waits: nothing is lost by that. `Err`: the store does not answer at the moment; it may
    /// be asked again.
    pub async fn next(&mut self) -> Result<Told, StoreError> {
        loop {
            if let Some(told) = self.line.pop_front() {
                self.place = match &told {
                    Told::Event(event) => event.position,
                    Told::Lost(_) => self.after_gap,
                };
                return Ok(told);
            }
            self.place = self.read;
            if self.behind {
                self.catch_up().await?;
                continue;
            }
            match self.news.recv().await {
                Ok(batch) if batch.after > self.read => self.behind = true,
                Ok(batch) => {
                    let new: Vec<_> = batch.events.iter().filter(|event| event.position > self.read).cloned().collect();
                    self.take(new, batch.upto);
                }
                Err(RecvError::Lagged(_)) => self.behind = true,
                Err(RecvError::Closed) => std::future::pending().await,
            }
        }
    }

    /// Reads what comes next from the store.
    async fn catch_up(&mut self) -> Result<(), StoreError> {
        let live = self.seat.0.clone();
        let Ok(_turn) = live.catching_up.acquire().await else { return Ok(()) };
        let events = live.store.event_list(EventQuery::After(self.read), BATCH).await?;
        // Looked at afterwards: what is old may be removed at any moment.
        if self.read >= self.gaps_upto
            && let Some(gap) = live.gap_after(self.read).await?
        {
            self.line.push_back(Told::Lost(gap));
            self.gaps_upto = gap.first - 1;
            if events.first().is_none_or(|event| event.position >= gap.first) {
                self.read = gap.first - 1;
            }
            self.after_gap = self.read;
        }
        self.behind = events.len() == BATCH;
        if let Some(upto) = events.last().map(|event| event.position) {
            self.take(events.into_iter().map(Arc::new).collect(), upto);
        }
        Ok(())
    }

    fn take(&mut self, events: Vec<Arc<StoredEvent>>, upto: EventPosition) {
        self.line.extend(events.into_iter().filter(|event| self.filter.lets_through(event)).map(Told::Event));
        self.read = self.read.max(upto);
    }
}
