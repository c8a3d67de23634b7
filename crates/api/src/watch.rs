//! Streams events to a caller. Server-sent events (`rest/events.rs`) and gRPC (`grpc/events.rs`) share this code.

use std::time::Duration;

use faena_domain::{ErrorCode, FieldError, JobId, TaskId, Timestamp};
use faena_engine::event_reader::{EventFilter, MAX_SUBSCRIBERS, StreamItem, SubscribeError, Subscription};
use faena_store::EventPosition;

use crate::{Api, ApiError, ApiResult, KeyEnd, access, context, traffic::StreamPermit};

/// Time without an event after which the stream sends a heartbeat with the position it has reached.
const HEARTBEAT: Duration = Duration::from_secs(15);
/// Delay before the next attempt to read from a database that fails.
const RETRY_DELAY: Duration = Duration::from_secs(1);
const MAX_TYPES: usize = 32;
const MAX_TEXT_BYTES: usize = 255;

/// Filter and start position that a caller sent, not validated yet.
#[derive(Default)]
pub struct WatchRequest {
    pub types: Vec<String>,
    pub queue: Option<String>,
    pub correlation_id: Option<String>,
    pub job_id: Option<String>,
    pub task_id: Option<String>,
    /// Name of the parameter or header with the position to resume after, and its value.
    pub after: Option<(&'static str, String)>,
}

/// Item of an `EventStream`.
pub enum Item {
    Event(StreamItem),
    /// Has only a position. It is the first item, and is sent again when no event has matched for a while.
    Heartbeat,
}

/// Stream of the events that match a request.
pub struct EventStream {
    api: Api,
    subscription: Subscription,
    key_end: KeyEnd,
    has_begun: bool,
    _permit: StreamPermit,
}

impl EventStream {
    /// Subscribes to events. Fails if the request is not valid, or the caller or this node has too many streams.
    pub async fn open(api: &Api, request: WatchRequest) -> ApiResult<EventStream> {
        let (filter, after) = parse(request).map_err(ApiError::invalid)?;
        let permit = api.traffic.admit_stream()?;
        let subscription = api.engine.events.reader.subscribe(after, filter, Timestamp::now()).await?;
        let key_end = api.key_end(context::access()?.key());
        Ok(EventStream { api: api.clone(), subscription, key_end, has_begun: false, _permit: permit })
    }

    /// Returns the CloudEvents attribute `source` of the events.
    pub fn source(&self) -> &str {
        &self.api.engine.config.outbox.source
    }

    /// Waits for the next item and returns it with the position to resume after; `None` when the server stops or
    /// the caller's key is no longer valid.
    ///
    /// The first item is a heartbeat: from its position on, no event is missed.
    pub async fn next(&mut self) -> Option<(Item, EventPosition)> {
        if !std::mem::replace(&mut self.has_begun, true) {
            return Some((Item::Heartbeat, self.subscription.position()));
        }
        let heartbeat = tokio::time::sleep(HEARTBEAT);
        tokio::pin!(heartbeat);
        loop {
            let next = tokio::select! {
                () = self.api.closing.cancelled() => return None,
                () = &mut self.key_end => return None,
                next = self.subscription.next() => next,
                () = &mut heartbeat => return Some((Item::Heartbeat, self.subscription.position())),
            };
            match next {
                Ok(event) => return Some((Item::Event(event), self.subscription.position())),
                // The database is not available. No event is lost: the stream reads them when it is available again.
                Err(_) => tokio::select! {
                    () = self.api.closing.cancelled() => return None,
                    () = &mut self.key_end => return None,
                    () = tokio::time::sleep(RETRY_DELAY) => {}
                },
            }
        }
    }
}

impl From<SubscribeError> for ApiError {
    fn from(rejected: SubscribeError) -> ApiError {
        match rejected {
            SubscribeError::Store(error) => error.into(),
            SubscribeError::TooManySubscribers => {
                let message =
                    format!("this node already has {MAX_SUBSCRIBERS} subscribers; use another node or try again later");
                ApiError::new(ErrorCode::Unavailable, message)
            }
        }
    }
}

/// Validates a request. Returns all errors together.
fn parse(request: WatchRequest) -> Result<(EventFilter, Option<EventPosition>), Vec<FieldError>> {
    let mut errors = Vec::new();
    let mut check = |name: &str, text: &str| {
        if text.is_empty() || text.len() > MAX_TEXT_BYTES || text.contains(char::is_control) {
            let message = format!("must have 1 to {MAX_TEXT_BYTES} bytes and no control characters");
            errors.push(FieldError::new(name, message));
        }
    };
    request.types.iter().for_each(|kind| check("types", kind));
    request.queue.iter().for_each(|queue| check("queue", queue));
    request.correlation_id.iter().for_each(|id| check("correlationId", id));
    if request.types.len() > MAX_TYPES {
        let message = format!("must have at most {MAX_TYPES} types; use a pattern such as \"job.*\"");
        errors.push(FieldError::new("types", message));
    }
    let job = request.job_id.and_then(|text| {
        let id = text.parse::<JobId>().ok();
        if id.is_none() {
            errors.push(FieldError::new("jobId", "must be a UUID"));
        }
        id
    });
    let task = request.task_id.and_then(|text| {
        let id = text.parse::<TaskId>().ok();
        if id.is_none() {
            errors.push(FieldError::new("taskId", "must be a UUID"));
        }
        id
    });
    let after = request.after.and_then(|(name, text)| {
        let position = text.trim().parse::<EventPosition>().ok().filter(|position| *position >= 0);
        if position.is_none() {
            let message = "must be the id of an event of this stream, or 0 for the oldest; omit it to start now";
            errors.push(FieldError::new(name, message));
        }
        position
    });
    let queues = access::queues().unwrap_or(Some(Vec::new()));
    let WatchRequest { types, queue, correlation_id, .. } = request;
    let tasks_only = access::sees_tasks_only();
    let filter = EventFilter { types, queue, queues, correlation_id, job, task, tasks_only };
    if errors.is_empty() { Ok((filter, after)) } else { Err(errors) }
}
