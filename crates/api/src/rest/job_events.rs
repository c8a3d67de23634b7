//! `GET /jobs/:id/events`: the changes of one job as server-sent events.
//!
//! The first event carries the whole job, each further one what has changed since. The stream ends when the job finishes.

use std::{convert::Infallible, time::Duration};

use axum::{
    body::{Body, Bytes},
    extract::State,
    http::{HeaderValue, header},
    response::{IntoResponse, Response},
};
use futures_util::{StreamExt, stream};

use crate::{
    Api, ApiResult,
    job_watch::JobWatches,
    request::{Segment, parse_job_id},
};

/// How often a stream without changes sends a comment, so that neither side assumes that the connection is dead.
const KEEP_ALIVE: Duration = Duration::from_secs(15);

/// Streams the changes of a job.
///
/// Writes the events without the event type of axum, which copies its data: the watchers of a large job share one copy.
pub async fn stream_job_events(State(api): State<Api>, Segment(id): Segment) -> ApiResult<Response> {
    let watcher = JobWatches::open(&api, parse_job_id(&id)?).await?;
    let events = stream::unfold(watcher, |mut watcher| async move {
        let parts = match tokio::time::timeout(KEEP_ALIVE, watcher.next()).await {
            Ok(change) => {
                let change = change?;
                let name = Bytes::from(format!("event: {}\n", change.kind.as_str()));
                vec![name, change.data, Bytes::from_static(b"\n")]
            }
            Err(_) => vec![Bytes::from_static(b":\n\n")],
        };
        Some((stream::iter(parts.into_iter().map(Ok::<_, Infallible>)), watcher))
    });
    let mut response = Body::from_stream(events.flatten()).into_response();
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream"));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    Ok(response)
}
