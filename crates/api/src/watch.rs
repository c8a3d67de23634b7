//! Watching what happens, whatever the door: what may be asked for, and what comes when.

use std::time::Duration;

use faena_domain::{ErrorCode, FieldError, JobId, Timestamp};
use faena_engine::live::{EventFilter, Refused, SUBSCRIBERS, Subscription, Told};
use faena_store::EventPosition;

use crate::{Api, ApiError};

/// Whoever is told nothing else is told this often that the line holds, and up to where it has come.
const HEARTBEAT: Duration = Duration::from_secs(15);
/// How soon a database that does not answer is asked again.
const ASK_AGAIN: Duration = Duration::from_secs(1);
const MAX_TYPES: usize = 32;
const MAX_TEXT: usize = 255;

/// What somebody wants to watch, as it was said.
#[derive(Default)]
pub struct Ask {
    pub types: Vec<String>,
    pub queue: Option<String>,
    pub correlation_id: Option<String>,
    pub job_id: Option<String>,
    /// The name of the place where it was said, and the place.
    pub from: Option<(&'static str, String)>,
}

pub enum Item {
    Told(Told),
    /// Nothing has happened that was asked for.
    Heartbeat,
}

pub struct Watch {
    api: Api,
    subscription: Subscription,
    greeted: bool,
}

impl Watch {
    pub async fn begin(api: &Api, ask: Ask) -> Result<Watch, ApiError> {
        let (filter, from) = read(ask).map_err(ApiError::invalid)?;
        let subscription = api.engine.live.subscribe(from, filter, Timestamp::now()).await?;
        Ok(Watch { api: api.clone(), subscription, greeted: false })
    }

    /// What events say where they come from.
    pub fn source(&self) -> &str {
        &self.api.engine.config.outbox.source
    }

    /// What comes next, and the place from which one may go on after it. A heartbeat comes first: it tells that nothing is missed from now
    /// on. `None`: the server closes.
    pub async fn next(&mut self) -> Option<(Item, EventPosition)> {
        if !std::mem::replace(&mut self.greeted, true) {
            return Some((Item::Heartbeat, self.subscription.place()));
        }
        let heartbeat = tokio::time::sleep(HEARTBEAT);
        tokio::pin!(heartbeat);
        loop {
            let told = tokio::select! {
                () = self.api.closing.cancelled() => return None,
                told = self.subscription.next() => told,
                () = &mut heartbeat => return Some((Item::Heartbeat, self.subscription.place())),
            };
            match told {
                Ok(told) => return Some((Item::Told(told), self.subscription.place())),
                // The database is away. Nothing is lost by that; it is read when it is back.
                Err(_) => tokio::select! {
                    () = self.api.closing.cancelled() => return None,
                    () = tokio::time::sleep(ASK_AGAIN) => {}
                },
            }
        }
    }
}

impl From<Refused> for ApiError {
    fn from(refused: Refused) -> ApiError {
        match refused {
            Refused::Store(error) => error.into(),
            Refused::Full => {
                let message = format!("this node already has {SUBSCRIBERS} subscribers; use another node or try later");
                ApiError::new(ErrorCode::Unavailable, message)
            }
        }
    }
}

fn read(ask: Ask) -> Result<(EventFilter, Option<EventPosition>), Vec<FieldError>> {
    let mut errors = Vec::new();
    let mut check = |name: &str, text: &str| {
        if text.is_empty() || text.len() > MAX_TEXT || text.contains(char::is_control) {
            errors.push(FieldError::new(name, format!("must have 1 to {MAX_TEXT} bytes and no control characters")));
        }
    };
    ask.types.iter().for_each(|kind| check("types", kind));
    ask.queue.iter().for_each(|queue| check("queue", queue));
    ask.correlation_id.iter().for_each(|id| check("correlationId", id));
    if ask.types.len() > MAX_TYPES {
        errors.push(FieldError::new("types", format!("must be at most {MAX_TYPES}; * stands for anything: job.*")));
    }
    let job = ask.job_id.and_then(|text| {
        let id = text.parse::<JobId>().ok();
        if id.is_none() {
            errors.push(FieldError::new("jobId", "must be the id of a job"));
        }
        id
    });
    let from = ask.from.and_then(|(name, text)| {
        let place = text.trim().parse::<EventPosition>().ok().filter(|place| *place >= 0);
        if place.is_none() {
            let message =
                "must be the id of an event of this stream; leave it out to begin now, or say 0 for all that is kept";
            errors.push(FieldError::new(name, message));
        }
        place
    });
    let filter = EventFilter { types: ask.types, queue: ask.queue, correlation_id: ask.correlation_id, job };
    if errors.is_empty() { Ok((filter, from)) } else { Err(errors) }
}
