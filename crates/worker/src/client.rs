//! Handing jobs in, and asking after them.

use std::time::Duration;

use faena_domain::{JobId, JobView};
use faena_wire::{Changed, Created, CreatedBatch, ErrorBody};
use reqwest::{Method, RequestBuilder, Response};
use serde::de::DeserializeOwned;

use crate::{Error, JobRequest, address::Address};

const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
const CALL_TIMEOUT: Duration = Duration::from_secs(30);

/// Talks to one server. Cheap to clone; clones share their connections.
#[derive(Clone)]
pub struct Client {
    http: reqwest::Client,
    address: Address,
    timeout: Duration,
}

/// How a [`Client`] is made when its defaults do not fit.
#[derive(Debug, Default)]
#[must_use]
pub struct ClientBuilder {
    url: Option<String>,
    token: Option<String>,
    timeout: Option<Duration>,
}

impl ClientBuilder {
    /// Where the server is: `http://host:port`. Without it, `FAENA_URL`, or else `http://127.0.0.1:3000`.
    pub fn url(mut self, url: impl Into<String>) -> Self {
        self.url = Some(url.into());
        self
    }

    /// An API key. Without it, `FAENA_TOKEN`, if that is set.
    pub fn token(mut self, token: impl Into<String>) -> Self {
        self.token = Some(token.into());
        self
    }

    /// How long one call may take; 30 s when nothing is said.
    pub fn timeout(mut self, limit: Duration) -> Self {
        self.timeout = Some(limit);
        self
    }

    pub fn build(self) -> Result<Client, Error> {
        let address = Address::new(self.url, self.token.or_else(|| std::env::var("FAENA_TOKEN").ok()))?;
        crate::address::ensure_crypto();
        let mut http = reqwest::Client::builder();
        if address.is_loopback() {
            // A proxy cannot reach this machine's own loopback.
            http = http.no_proxy();
        }
        let http = http
            .connect_timeout(CONNECT_TIMEOUT)
            .user_agent(concat!("faena-sdk/", env!("CARGO_PKG_VERSION")))
            .build()
            .map_err(|error| Error::Invalid(error.to_string()))?;
        Ok(Client { http, address, timeout: self.timeout.unwrap_or(CALL_TIMEOUT) })
    }
}

impl Client {
    /// A client of the server that `FAENA_URL` names.
    pub fn from_env() -> Result<Client, Error> {
        Client::builder().build()
    }

    /// A client of the server at this address.
    pub fn new(url: impl Into<String>) -> Result<Client, Error> {
        Client::builder().url(url).build()
    }

    pub fn builder() -> ClientBuilder {
        ClientBuilder::default()
    }

    /// Hands a job in. When it returns, the job is stored.
    pub async fn submit(&self, job: &JobRequest) -> Result<Created, Error> {
        let mut request = self.request(Method::POST, "/api/v1/jobs").json(job.checked()?);
        if let Some(trace) = &job.traceparent {
            request = request.header("traceparent", trace);
        }
        self.call(request).await
    }

    /// Hands several in, all or none. They may depend on each other by [`JobRequest::reference`].
    pub async fn submit_batch(&self, jobs: &[JobRequest]) -> Result<Vec<JobId>, Error> {
        #[derive(serde::Serialize)]
        struct Batch<'a> {
            jobs: &'a [JobRequest],
        }
        for job in jobs {
            job.checked()?;
        }
        let request = self.request(Method::POST, "/api/v1/jobs/batch").json(&Batch { jobs });
        self.call::<CreatedBatch>(request).await.map(|created| created.ids)
    }

    /// The job as it is now.
    pub async fn get(&self, id: JobId) -> Result<JobView, Error> {
        self.call(self.request(Method::GET, &format!("/api/v1/jobs/{id}"))).await
    }

    /// Cancels it. One that runs is told to stop, which `cancel_requested` says.
    pub async fn cancel(&self, id: JobId) -> Result<Changed, Error> {
        self.call(self.request(Method::POST, &format!("/api/v1/jobs/{id}/cancel"))).await
    }

    /// Gives a failed or cancelled job new tries.
    pub async fn retry(&self, id: JobId) -> Result<Changed, Error> {
        self.call(self.request(Method::POST, &format!("/api/v1/jobs/{id}/retry"))).await
    }

    pub(crate) fn request(&self, method: Method, path: &str) -> RequestBuilder {
        let request = self.http.request(method, self.address.http(path));
        match self.address.token() {
            Some(token) => request.bearer_auth(token),
            None => request,
        }
    }

    async fn call<T: DeserializeOwned>(&self, request: RequestBuilder) -> Result<T, Error> {
        let answer = self.send(request.timeout(self.timeout)).await?;
        let body = answer.bytes().await.map_err(|error| self.unreachable(error))?;
        serde_json::from_slice(&body)
            .map_err(|error| Error::NotUnderstood { what: "the answer of the server", source: error.into() })
    }

    /// Sends; a refusal of the server is an error.
    pub(crate) async fn send(&self, request: RequestBuilder) -> Result<Response, Error> {
        let answer = request.send().await.map_err(|error| self.unreachable(error))?;
        if answer.status().is_success() {
            return Ok(answer);
        }
        let status = answer.status().as_u16();
        let body = answer.bytes().await.map_err(|error| self.unreachable(error))?;
        Err(refusal(status, &body))
    }

    pub(crate) fn unreachable(&self, error: reqwest::Error) -> Error {
        Error::Unreachable { url: self.address.http(""), source: error.without_url().into() }
    }
}

/// What a body says that came with an error status; also one that something in between has written.
pub(crate) fn refusal(status: u16, body: &[u8]) -> Error {
    match serde_json::from_slice::<ErrorBody>(body) {
        Ok(ErrorBody { error }) => {
            Error::Refused { status, code: error.code, message: error.message, details: error.details }
        }
        Err(_) => {
            let message = format!("answered {status}; is that a Faena server?");
            Error::Refused { status, code: "UNKNOWN".into(), message, details: Vec::new() }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_is_told_by_its_code() {
        let body = br#"{"error":{"code":"NOT_FOUND","message":"no such job","requestId":"1"}}"#;
        assert_eq!(refusal(404, body).to_string(), "no such job (NOT_FOUND)");
        let Error::Refused { status: 502, code, .. } = refusal(502, b"<html>") else { panic!("refused") };
        assert_eq!(code, "UNKNOWN");
    }

    #[test]
    fn what_is_no_address_is_refused_at_once() {
        assert!(matches!(Client::new("localhost:3000"), Err(Error::Invalid(_))));
    }
}
