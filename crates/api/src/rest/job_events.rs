//! `GET /jobs/:id/events`: the changes of one job as server-sent events.
//!
//! The first event carries the whole job, each further one what has changed since. The stream ends when the job finishes.

use std::{convert::Infallible, time::Duration};

use axum::{
    extract::State,
    response::sse::{Event as SseEvent, KeepAlive, Sse},
};
use futures_util::Stream;

use crate::{
    Api, ApiResult,
    job_watch::JobWatches,
    request::{Segment, parse_job_id},
};

pub async fn stream_job_events(
    State(api): State<Api>,
    Segment(id): Segment,
) -> ApiResult<Sse<impl Stream<Item = Result<SseEvent, Infallible>>>> {
    let watcher = JobWatches::open(&api, parse_job_id(&id)?).await?;
    let stream = futures_util::stream::unfold(watcher, |mut watcher| async move {
        let change = watcher.next().await?;
        Some((Ok(SseEvent::default().event(change.kind.as_str()).data(change.json)), watcher))
    });
    Ok(Sse::new(stream).keep_alive(KeepAlive::new().interval(Duration::from_secs(15))))
}
