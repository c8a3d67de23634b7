//! Waits for a job to finish: follows the stream of its changes, and polls if the stream is interrupted.

use std::time::Duration;

use serde::{Deserialize, de::DeserializeOwned};
use tokio::time::{Instant, sleep, timeout};

use crate::{Client, Error, Job, JobId, JobState, Method, backoff::Backoff};

/// Longest server outage that [`Client::wait`] tolerates. It returns the error if the outage lasts longer.
const OUTAGE_LIMIT: Duration = Duration::from_secs(60);

impl Client {
    /// Waits until the job has finished, however long that takes, and returns it.
    ///
    /// Survives an outage of the server of up to a minute.
    ///
    /// # Errors
    ///
    /// Returns the error of the server or of the connection if the outage lasts longer, and [`Error::Decode`] if a
    /// response of the server cannot be decoded.
    pub async fn wait(&self, id: JobId) -> Result<Job, Error> {
        let mut backoff = Backoff::new();
        let mut last_answer_at = Instant::now();
        loop {
            let outage = match self.follow(id, &mut last_answer_at).await {
                Ok(Some(job)) => return Ok(job),
                Ok(None) => {
                    backoff.reset();
                    None
                }
                Err(error) if is_outage(&error) && last_answer_at.elapsed() < OUTAGE_LIMIT => Some(error),
                Err(error) => return Err(error),
            };
            sleep(backoff.delay_after(outage.as_ref())).await;
            // A proxy may interrupt streams, but it passes plain requests.
            match self.job(id).await {
                Ok(job) if job.is_finished() => return Ok(job),
                Ok(_) => last_answer_at = Instant::now(),
                // Every further attempt would fail in the same way.
                Err(error @ Error::Decode { .. }) => return Err(error),
                // The next call of `follow` decides whether the outage lasts too long.
                Err(_) => {}
            }
        }
    }

    /// Waits like [`wait`](Self::wait), but not longer than `limit`.
    ///
    /// # Errors
    ///
    /// Returns [`Error::StillRunning`] after `limit`. The job is not affected.
    pub async fn wait_timeout(&self, id: JobId, limit: Duration) -> Result<Job, Error> {
        timeout(limit, self.wait(id)).await.unwrap_or(Err(Error::StillRunning { id, limit }))
    }

    /// Waits like [`wait`](Self::wait) and returns the result of the job.
    ///
    /// # Errors
    ///
    /// Returns [`Error::NotCompleted`] if the job fails or is cancelled, and [`Error::Decode`] if its result is not a
    /// `T`.
    pub async fn wait_for_result<T: DeserializeOwned>(&self, id: JobId) -> Result<T, Error> {
        let job = self.wait(id).await?;
        if job.status != JobState::Completed {
            return Err(Error::NotCompleted { id, status: job.status, error: job.error });
        }
        let result = job.result.as_ref().map_or("null", |raw| raw.get());
        serde_json::from_str(result)
            .map_err(|error| Error::Decode { what: "the result of the job", source: error.into() })
    }

    /// Follows the changes of a job until it has finished. Returns `None` if the stream ends before that.
    async fn follow(&self, id: JobId, last_answer_at: &mut Instant) -> Result<Option<Job>, Error> {
        let mut stream = self.request(Method::GET, &format!("/api/v1/jobs/{id}/events")).stream().await?;
        while let Some(event) = stream.next().await {
            *last_answer_at = Instant::now();
            if event.data.is_empty() {
                continue;
            }
            // The first event has the whole job, later ones what has changed. If an event cannot be decoded, the caller
            // requests the job itself.
            if let Ok(job) = serde_json::from_str::<Job>(&event.data) {
                if job.is_finished() {
                    return Ok(Some(job));
                }
                continue;
            }
            let Ok(change) = serde_json::from_str::<Change>(&event.data) else { return Ok(None) };
            if change.is_finished() {
                return self.job(id).await.map(Some);
            }
        }
        Ok(None)
    }
}

/// The part of a change that tells whether the job has finished.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Change {
    status: JobState,
    completed_at: Option<String>,
}

impl Change {
    /// Returns whether the job has finished. A state that this version does not know counts as final if the server also
    /// says when the job ended.
    fn is_finished(&self) -> bool {
        self.status.is_final() || (matches!(self.status, JobState::Unknown(_)) && self.completed_at.is_some())
    }
}

/// Returns whether the server is unreachable, starting, stopping or overloaded, so that waiting may help.
fn is_outage(error: &Error) -> bool {
    matches!(error, Error::Unreachable { .. } | Error::Response { status: 429 | 500.., .. })
}
