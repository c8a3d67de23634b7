//! Submitting jobs, and reading and changing them.

use std::{fmt, time::Duration};

use serde::{Deserialize, Serialize};

use crate::{
    ChangedJob, Error, Job, JobId, JobRequest, Method, SubmittedJob,
    address::{Address, ensure_crypto},
};

const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
const CALL_TIMEOUT: Duration = Duration::from_secs(30);

/// A client of one server. Cheap to clone; clones share their connections.
///
/// ```no_run
/// # async fn example() -> Result<(), faena::Error> {
/// let client = faena::Client::new("http://127.0.0.1:3000")?;
/// let job = client.submit(&faena::JobRequest::new("noop")).await?;
/// println!("job {} is {}", job.id, client.job(job.id).await?.status);
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct Client {
    pub(crate) http: reqwest::Client,
    pub(crate) address: Address,
    pub(crate) timeout: Duration,
}

impl fmt::Debug for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Client").field("url", &self.address).field("timeout", &self.timeout).finish_non_exhaustive()
    }
}

/// The settings of a [`Client`]. Created by [`Client::builder`].
#[derive(Default)]
#[must_use]
pub struct ClientBuilder {
    url: Option<String>,
    token: Option<String>,
    timeout: Option<Duration>,
    user_agent: Option<String>,
}

impl ClientBuilder {
    /// Sets the address of the server. Default: `FAENA_URL`, or `http://127.0.0.1:3000`.
    pub fn url(mut self, url: impl Into<String>) -> Self {
        self.url = Some(url.into());
        self
    }

    /// Sets the API key. Default: `FAENA_TOKEN`.
    pub fn token(mut self, token: impl Into<String>) -> Self {
        self.token = Some(token.into());
        self
    }

    /// Sets how long one call may take. Default: 30 s.
    pub fn timeout(mut self, limit: Duration) -> Self {
        self.timeout = Some(limit);
        self
    }

    /// Sets the header `User-Agent`. Default: the name and version of this crate.
    pub fn user_agent(mut self, user_agent: impl Into<String>) -> Self {
        self.user_agent = Some(user_agent.into());
        self
    }

    /// Builds the client. Does not connect.
    ///
    /// # Errors
    ///
    /// Returns [`Error::Invalid`] if the URL, the token or the user agent is not valid.
    pub fn build(self) -> Result<Client, Error> {
        let address = Address::new(self.url, self.token.or_else(|| std::env::var("FAENA_TOKEN").ok()))?;
        ensure_crypto();
        let mut http = reqwest::Client::builder();
        if address.is_loopback() {
            // A proxy cannot reach the loopback of this machine.
            http = http.no_proxy();
        }
        let default_user_agent = || concat!("faena-sdk/", env!("CARGO_PKG_VERSION")).to_owned();
        let http = http
            .connect_timeout(CONNECT_TIMEOUT)
            .user_agent(self.user_agent.unwrap_or_else(default_user_agent))
            .build()
            .map_err(|error| Error::Invalid(format!("cannot build the HTTP client: {error}")))?;
        Ok(Client { http, address, timeout: self.timeout.unwrap_or(CALL_TIMEOUT) })
    }
}

impl Client {
    /// Creates a client of the server at `FAENA_URL`, with the API key in `FAENA_TOKEN`.
    ///
    /// # Errors
    ///
    /// Returns [`Error::Invalid`] if the URL or the key is not valid.
    pub fn from_env() -> Result<Client, Error> {
        Client::builder().build()
    }

    /// Creates a client of the server at `url`, with the API key in `FAENA_TOKEN`.
    ///
    /// # Errors
    ///
    /// Returns [`Error::Invalid`] if the URL or the key is not valid.
    pub fn new(url: impl Into<String>) -> Result<Client, Error> {
        Client::builder().url(url).build()
    }

    /// Returns a builder with the default settings.
    pub fn builder() -> ClientBuilder {
        ClientBuilder::default()
    }

    /// Submits a job. When it returns, the job is stored.
    ///
    /// # Errors
    ///
    /// After [`Error::Unreachable`] the job may or may not be stored. Set [`JobRequest::idempotency_key`] to submit it again
    /// safely.
    pub async fn submit(&self, job: &JobRequest) -> Result<SubmittedJob, Error> {
        let mut request = self.request(Method::POST, "/api/v1/jobs").json(job.validated()?);
        if let Some(trace) = &job.traceparent {
            request = request.header("traceparent", trace);
        }
        request.send().await
    }

    /// Submits several jobs, all or none, and returns their ids in the same order.
    ///
    /// They may depend on each other by [`JobRequest::reference`].
    pub async fn submit_batch(&self, jobs: &[JobRequest]) -> Result<Vec<JobId>, Error> {
        #[derive(Serialize)]
        struct Batch<'a> {
            jobs: &'a [JobRequest],
        }
        #[derive(Deserialize)]
        struct SubmittedBatch {
            ids: Vec<JobId>,
        }
        for job in jobs {
            job.validated()?;
        }
        let submitted: SubmittedBatch =
            self.request(Method::POST, "/api/v1/jobs/batch").json(&Batch { jobs }).send().await?;
        Ok(submitted.ids)
    }

    /// Returns the job as it is now.
    pub async fn job(&self, id: JobId) -> Result<Job, Error> {
        self.request(Method::GET, &format!("/api/v1/jobs/{id}")).send().await
    }

    /// Cancels a job. The worker of a running job is asked to stop; see [`ChangedJob::cancel_requested`].
    pub async fn cancel(&self, id: JobId) -> Result<ChangedJob, Error> {
        self.request(Method::POST, &format!("/api/v1/jobs/{id}/cancel")).send().await
    }

    /// Retries a failed or cancelled job, or lets a retrying job make its next attempt now.
    pub async fn retry(&self, id: JobId) -> Result<ChangedJob, Error> {
        self.request(Method::POST, &format!("/api/v1/jobs/{id}/retry")).send().await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_invalid_url_is_rejected_before_any_call() {
        assert!(matches!(Client::new("localhost:3000"), Err(Error::Invalid(_))));
    }

    #[test]
    fn the_token_is_never_shown() {
        let client = Client::builder().url("http://here").token("fna_secret").build().expect("a client");
        assert!(!format!("{client:?}").contains("fna_secret"));
    }
}
