//! `GET /jobs/:id/events`: the job's live changes, as server-sent events.
//!
//! Each event carries the whole job. It is sent when this process hears of a change, and a look once a second finds what
//! other nodes did. The stream ends with the job.

use std::{convert::Infallible, time::Duration};

use axum::{
    extract::State,
    response::sse::{Event as SseEvent, KeepAlive, Sse},
};
use faena_domain::{EventKind, JobId, JobView, Timestamp};
use faena_store::StoreError;
use futures_util::Stream;
use tokio::sync::{broadcast, mpsc};

use crate::{
    Api, ApiResult,
    request::{Segment, parse_job_id},
};

const LOOK_AGAIN: Duration = Duration::from_secs(1);

pub async fn events(
    State(api): State<Api>,
    Segment(id): Segment,
) -> ApiResult<Sse<impl Stream<Item = Result<SseEvent, Infallible>>>> {
    let id = parse_job_id(&id)?;
    let changes = api.engine.bus.subscribe();
    let first = api.engine.store.job_get(id).await?.ok_or(StoreError::NotFound(id))?;
    let (sender, receiver) = mpsc::channel(16);
    tokio::spawn(follow(api, id, first, changes, sender));
    let stream = futures_util::stream::unfold(receiver, |mut receiver| async move {
        let (kind, job) = receiver.recv().await?;
        let event = SseEvent::default().event(kind.as_str()).json_data(job).ok()?;
        Some((Ok(event), receiver))
    });
    Ok(Sse::new(stream).keep_alive(KeepAlive::new().interval(Duration::from_secs(15))))
}

/// Sends the job, and again after each change, until it has finished or nobody listens.
pub async fn follow(
    api: Api,
    id: JobId,
    first: JobView,
    mut changes: broadcast::Receiver<faena_domain::Event>,
    sender: mpsc::Sender<(EventKind, JobView)>,
) {
    let mut seen: Option<(Timestamp, usize, String)> = None;
    let mut job = Some(first);
    while let Some(view) = job {
        let mark = (view.updated_at, view.execution_log.len(), view.status.to_string());
        if seen.as_ref() != Some(&mark) {
            let kind =
                if view.status == faena_domain::JobState::Processing && seen.as_ref().is_some_and(|s| s.2 == mark.2) {
                    EventKind::JobProgress
                } else {
                    EventKind::of_state(view.status)
                };
            seen = Some(mark);
            if sender.send((kind, api.shown(view.clone()))).await.is_err() {
                return;
            }
        }
        if view.status.is_terminal() {
            return;
        }
        tokio::select! {
            () = api.closing.cancelled() => return,
            () = sender.closed() => return,
            () = heard(&mut changes, id) => {}
            () = tokio::time::sleep(LOOK_AGAIN) => {}
        }
        job = match api.engine.store.job_get(id).await {
            Ok(found) => found,
            // The database is away; the next look may find it.
            Err(_) => Some(view),
        };
    }
}

async fn heard(changes: &mut broadcast::Receiver<faena_domain::Event>, id: JobId) {
    loop {
        match changes.recv().await {
            Ok(event) if event.job_id != id => {}
            Err(broadcast::error::RecvError::Closed) => std::future::pending().await,
            _ => return,
        }
    }
}
