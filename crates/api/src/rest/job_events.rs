//! `GET /jobs/:id/events`: the changes of one job as server-sent events.
//!
//! Each event carries the whole job. It is sent when this process makes a change; a poll once a second finds the changes of
//! other nodes. The stream ends when the job finishes.

use std::{convert::Infallible, time::Duration};

use axum::{
    extract::State,
    response::sse::{Event as SseEvent, KeepAlive, Sse},
};
use faena_domain::{Event, EventKind, JobId, JobState, JobView, Timestamp};
use faena_store::StoreError;
use futures_util::Stream;
use tokio::sync::{broadcast, mpsc};

use crate::{
    Api, ApiResult, KeyEnd, context,
    request::{Segment, parse_job_id},
};

const POLL_INTERVAL: Duration = Duration::from_secs(1);

pub async fn stream_job_events(
    State(api): State<Api>,
    Segment(id): Segment,
) -> ApiResult<Sse<impl Stream<Item = Result<SseEvent, Infallible>>>> {
    let id = parse_job_id(&id)?;
    let changes = api.engine.bus.subscribe();
    let first = api.engine.store.job_get(id).await?.ok_or(StoreError::NotFound(id))?;
    let (sender, receiver) = mpsc::channel(16);
    let key_end = api.key_end(context::access()?.key());
    tokio::spawn(follow(api, id, first, changes, sender, key_end));
    let stream = futures_util::stream::unfold(receiver, |mut receiver| async move {
        let (kind, job) = receiver.recv().await?;
        let event = SseEvent::default().event(kind.as_str()).json_data(job).ok()?;
        Some((Ok(event), receiver))
    });
    Ok(Sse::new(stream).keep_alive(KeepAlive::new().interval(Duration::from_secs(15))))
}

/// What tells two versions of a job apart.
#[derive(PartialEq)]
struct Version {
    updated_at: Timestamp,
    log_entries: usize,
    state: JobState,
}

/// Sends the job now and after each change, until it has finished, the receiver is dropped or the caller's key is no longer
/// valid.
pub async fn follow(
    api: Api,
    id: JobId,
    first: JobView,
    mut changes: broadcast::Receiver<Event>,
    sender: mpsc::Sender<(EventKind, JobView)>,
    mut key_end: KeyEnd,
) {
    let mut sent: Option<Version> = None;
    let mut job = Some(first);
    while let Some(view) = job {
        let version =
            Version { updated_at: view.updated_at, log_entries: view.execution_log.len(), state: view.status };
        if sent.as_ref() != Some(&version) {
            let is_same_state = sent.as_ref().is_some_and(|sent| sent.state == version.state);
            let kind = if view.status == JobState::Processing && is_same_state {
                EventKind::JobProgress
            } else {
                EventKind::of_state(view.status)
            };
            sent = Some(version);
            if sender.send((kind, api.with_default_timeout(view.clone()))).await.is_err() {
                return;
            }
        }
        if view.status.is_terminal() {
            return;
        }
        tokio::select! {
            () = api.closing.cancelled() => return,
            () = sender.closed() => return,
            () = &mut key_end => return,
            () = changed(&mut changes, id) => {}
            () = tokio::time::sleep(POLL_INTERVAL) => {}
        }
        job = match api.engine.store.job_get(id).await {
            Ok(found) => found,
            // The database is not available; the next poll may succeed.
            Err(_) => Some(view),
        };
    }
}

/// Waits until this process changes the job, or has made so many changes that some were missed.
async fn changed(changes: &mut broadcast::Receiver<Event>, id: JobId) {
    loop {
        match changes.recv().await {
            Ok(event) if event.job_id != id => {}
            Err(broadcast::error::RecvError::Closed) => std::future::pending().await,
            _ => return,
        }
    }
}
