//! A worker on plain HTTP: claims jobs in a loop and sends one request per report.

use reqwest::{Client, StatusCode};
use serde_json::{Value, json};
use tokio::{sync::mpsc, task::AbortHandle};

use super::{Interruption, Job, ReportResult, TestWorker, WorkerOptions, heartbeat_period, within_timeout};
use crate::faena::{Faena, http};

pub struct HttpWorker {
    base: String,
    register: Value,
    http: Client,
    jobs: mpsc::UnboundedReceiver<Job>,
    cancels: mpsc::UnboundedReceiver<(String, i64)>,
    claims: AbortHandle,
}

impl HttpWorker {
    async fn open(base: &str, mut register: Value) -> (HttpWorker, bool) {
        let http = http();
        let answer = http.post(format!("{base}/register")).json(&register).send().await.unwrap();
        let (status, answer) = (answer.status(), answer.json::<Value>().await.unwrap());
        assert_eq!(status, StatusCode::CREATED, "{answer}");
        let id = answer["workerId"].as_str().unwrap();
        register["sessionToken"] = answer["sessionToken"].clone();
        let token = answer["sessionToken"].as_str().unwrap().to_owned();
        assert_eq!(register["workerId"], id);
        let wait_ms = heartbeat_period(answer["heartbeatIntervalMs"].as_u64().unwrap()).as_millis();
        let (job_sender, jobs) = mpsc::unbounded_channel();
        let (cancel_sender, cancels) = mpsc::unbounded_channel();
        let url = format!("{base}/{id}/claim");
        let claims =
            tokio::spawn(claim_jobs((http.clone(), url, token), wait_ms, job_sender, cancel_sender)).abort_handle();
        (HttpWorker { base: base.into(), register, http, jobs, cancels, claims }, answer["resumed"] == true)
    }

    fn token(&self) -> &str {
        self.register["sessionToken"].as_str().unwrap()
    }
}

/// Claims jobs in a loop. A claim counts as a heartbeat, and its answer contains the jobs to cancel.
async fn claim_jobs(
    (http, url, token): (Client, String, String),
    wait_ms: u128,
    job_sender: mpsc::UnboundedSender<Job>,
    cancel_sender: mpsc::UnboundedSender<(String, i64)>,
) {
    loop {
        let claim = http.post(&url).header("x-session-token", &token).json(&json!({ "waitMs": wait_ms }));
        let Ok(answer) = claim.send().await else { return };
        if answer.status() != StatusCode::OK {
            return;
        }
        let answer: Value = answer.json().await.unwrap();
        for job in answer["jobs"].as_array().unwrap() {
            let _ = job_sender.send(Job::from_frame(job));
        }
        for cancel in answer["cancel"].as_array().unwrap() {
            let _ = cancel_sender.send((cancel["jobId"].as_str().unwrap().into(), cancel["run"].as_i64().unwrap()));
        }
    }
}

impl TestWorker for HttpWorker {
    const HAS_CONNECTION: bool = false;

    async fn connect(faena: &Faena, options: WorkerOptions) -> Self {
        let base = format!("{}/api/v1/workers", faena.url);
        HttpWorker::open(&base, options.registration()).await.0
    }

    fn id(&self) -> &str {
        self.register["workerId"].as_str().unwrap()
    }

    fn session_token(&self) -> Option<String> {
        self.register["sessionToken"].as_str().map(str::to_owned)
    }

    async fn next_job(&mut self) -> Job {
        within_timeout("a job", self.jobs.recv()).await.expect("the claim loop has ended")
    }

    async fn report(&mut self, job: &Job, report: &str, mut body: Value) -> ReportResult {
        body["run"] = job.run.into();
        let url = format!("{}/{}/jobs/{}/{report}", self.base, self.id(), job.id);
        let answer = self.http.post(url).header("x-session-token", self.token()).json(&body).send().await.unwrap();
        let (status, answer) = (answer.status(), answer.json::<Value>().await.unwrap());
        match status {
            StatusCode::OK => Ok(()),
            _ => Err(answer["error"]["code"].as_str().unwrap().to_owned()),
        }
    }

    async fn next_cancel(&mut self) -> (String, i64) {
        within_timeout("a cancel", self.cancels.recv()).await.expect("the claim loop has ended")
    }

    /// Stops claiming. Nothing is open between two calls, so `Closed` and `Silent` are the same.
    async fn interrupt(&mut self, _how: Interruption) {
        self.claims.abort();
    }

    async fn reconnect(&mut self) -> Option<bool> {
        let (http, resumed) = HttpWorker::open(&self.base, self.register.clone()).await;
        *self = http;
        Some(resumed)
    }

    async fn crash(self) {
        self.claims.abort();
    }

    async fn leave(self) {
        let leave = self.http.delete(format!("{}/{}", self.base, self.id())).header("x-session-token", self.token());
        let answer = leave.send().await.unwrap();
        assert_eq!(answer.status(), StatusCode::OK);
    }
}

impl Drop for HttpWorker {
    fn drop(&mut self) {
        self.claims.abort();
    }
}
