//! Waiting for a job to end: by the stream of its changes, and by looking again when there is no stream.

use std::time::Duration;

use faena_domain::{JobId, JobState, JobView};
use futures_util::StreamExt;
use reqwest::Method;
use serde::de::DeserializeOwned;
use tokio::time::{Instant, sleep, timeout};

use crate::{Client, Error, backoff::Backoff};

/// The server says something every 15 s; silent for so long means that the stream is dead.
const STREAM_SILENCE: Duration = Duration::from_secs(45);
/// A server that is away for longer than this is told to the caller.
const PATIENCE: Duration = Duration::from_secs(60);
/// One event is one job; nothing larger is collected.
const LARGEST_EVENT_BYTES: usize = 64 * 1024 * 1024;

impl Client {
    /// Waits until the job has ended, however long it takes, and gives it whole. A server that goes away and comes back
    /// within a minute is not noticed.
    pub async fn wait(&self, id: JobId) -> Result<JobView, Error> {
        let mut backoff = Backoff::new();
        let mut answered = Instant::now();
        loop {
            match self.follow(id, &mut answered).await {
                Ok(Some(job)) => return Ok(job),
                Ok(None) => backoff.reset(),
                // Also one that is starting, stopping or busy is only away.
                Err(Error::Refused { status: 429 | 500.., .. }) if answered.elapsed() < PATIENCE => {}
                Err(Error::Unreachable { .. }) if answered.elapsed() < PATIENCE => {}
                Err(error) => return Err(error),
            }
            sleep(backoff.next_delay()).await;
            // The stream may be cut by something in between; a plain look always works.
            if let Ok(job) = self.get(id).await {
                answered = Instant::now();
                if job.status.is_terminal() {
                    return Ok(job);
                }
            }
        }
    }

    /// As [`wait`](Self::wait), for so long at most.
    pub async fn wait_at_most(&self, id: JobId, limit: Duration) -> Result<JobView, Error> {
        timeout(limit, self.wait(id)).await.unwrap_or(Err(Error::StillRunning { id, limit }))
    }

    /// Waits, and gives the result. A job that ends in another way than completed is [`Error::NotCompleted`].
    pub async fn wait_for<T: DeserializeOwned>(&self, id: JobId) -> Result<T, Error> {
        let job = self.wait(id).await?;
        if job.status != JobState::Completed {
            return Err(Error::NotCompleted { id, status: job.status, error: job.error });
        }
        let result = job.result.as_ref().map_or("null", |raw| raw.get());
        serde_json::from_str(result)
            .map_err(|error| Error::NotUnderstood { what: "the result of the job", source: error.into() })
    }

    /// `None`: the stream has ended before the job.
    async fn follow(&self, id: JobId, answered: &mut Instant) -> Result<Option<JobView>, Error> {
        let request = self.request(Method::GET, &format!("/api/v1/jobs/{id}/events"));
        let Ok(opened) = timeout(STREAM_SILENCE, self.send(request)).await else { return Ok(None) };
        let mut stream = opened?.bytes_stream();
        let mut events = Events::default();
        while let Ok(Some(Ok(part))) = timeout(STREAM_SILENCE, stream.next()).await {
            *answered = Instant::now();
            events.feed(&part);
            while let Some(data) = events.next() {
                // What this version does not understand, the plain look will.
                let Ok(job) = serde_json::from_str::<JobView>(&data) else { return Ok(None) };
                if job.status.is_terminal() {
                    return Ok(Some(job));
                }
            }
            if events.bytes.len() > LARGEST_EVENT_BYTES {
                return Ok(None);
            }
        }
        Ok(None)
    }
}

/// Cuts a stream of server-sent events into the data of its events.
#[derive(Default)]
struct Events {
    bytes: Vec<u8>,
    /// Up to here no end of an event was found.
    searched: usize,
}

impl Events {
    fn feed(&mut self, part: &[u8]) {
        self.bytes.extend_from_slice(part);
    }

    fn next(&mut self) -> Option<String> {
        loop {
            let from = self.searched.saturating_sub(1);
            let Some(end) = self.bytes[from..].windows(2).position(|pair| pair == b"\n\n") else {
                self.searched = self.bytes.len();
                return None;
            };
            let event: Vec<u8> = self.bytes.drain(..from + end + 2).collect();
            self.searched = 0;
            let text = String::from_utf8_lossy(&event);
            let data: Vec<&str> =
                text.lines().filter_map(|line| line.strip_prefix("data:")).map(str::trim_start).collect();
            // A comment keeps the connection alive and says nothing.
            if !data.is_empty() {
                return Some(data.join("\n"));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_are_found_wherever_the_stream_is_cut() {
        let stream = ": alive\n\nevent: job.completed\ndata: {\"a\":\"é\"}\n\ndata: one\ndata: two\n\nrest".as_bytes();
        for size in 1..stream.len() {
            let mut events = Events::default();
            let mut found = Vec::new();
            for part in stream.chunks(size) {
                events.feed(part);
                while let Some(data) = events.next() {
                    found.push(data);
                }
            }
            assert_eq!(found, ["{\"a\":\"é\"}", "one\ntwo"], "in parts of {size}");
        }
    }
}
