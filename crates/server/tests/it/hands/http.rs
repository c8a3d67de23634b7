//! A worker that calls: claims jobs in a loop, reports with one request each.

use reqwest::{Client, StatusCode};
use serde_json::{Value, json};
use tokio::{sync::mpsc, task::AbortHandle};

use super::{Answer, Away, Failure, Hand, Job, Who, beat, in_time};
use crate::faena::{Faena, http};

pub struct Http {
    base: String,
    register: Value,
    http: Client,
    jobs: mpsc::UnboundedReceiver<Job>,
    cancels: mpsc::UnboundedReceiver<(String, i64)>,
    claims: AbortHandle,
}

impl Http {
    async fn open(base: &str, register: Value) -> (Http, bool) {
        let http = http();
        let answer = http.post(format!("{base}/register")).json(&register).send().await.unwrap();
        let (status, answer) = (answer.status(), answer.json::<Value>().await.unwrap());
        assert_eq!(status, StatusCode::CREATED, "{answer}");
        let id = answer["workerId"].as_str().unwrap();
        assert_eq!(register["workerId"], id);
        let wait_ms = beat(answer["heartbeatIntervalMs"].as_u64().unwrap()).as_millis();
        let (give, jobs) = mpsc::unbounded_channel();
        let (stop, cancels) = mpsc::unbounded_channel();
        let url = format!("{base}/{id}/claim");
        let claims = tokio::spawn(claims(http.clone(), url, wait_ms, give, stop)).abort_handle();
        (Http { base: base.into(), register, http, jobs, cancels, claims }, answer["resumed"] == true)
    }

    async fn report(&self, job: &Job, what: &str, mut body: Value) -> Answer {
        body["run"] = job.run.into();
        let url = format!("{}/{}/jobs/{}/{what}", self.base, self.id(), job.id);
        let answer = self.http.post(url).json(&body).send().await.unwrap();
        let (status, answer) = (answer.status(), answer.json::<Value>().await.unwrap());
        match status {
            StatusCode::OK => Ok(()),
            _ => Err(answer["error"]["code"].as_str().unwrap().to_owned()),
        }
    }
}

/// Asks for as many as it has room for, again and again: a claim is a sign of life, and brings the orders to stop.
async fn claims(
    http: Client,
    url: String,
    wait_ms: u128,
    give: mpsc::UnboundedSender<Job>,
    stop: mpsc::UnboundedSender<(String, i64)>,
) {
    loop {
        let Ok(answer) = http.post(&url).json(&json!({ "waitMs": wait_ms })).send().await else { return };
        if answer.status() != StatusCode::OK {
            return;
        }
        let answer: Value = answer.json().await.unwrap();
        for job in answer["jobs"].as_array().unwrap() {
            let _ = give.send(Job::of_frame(job));
        }
        for told in answer["cancel"].as_array().unwrap() {
            let _ = stop.send((told["jobId"].as_str().unwrap().into(), told["run"].as_i64().unwrap()));
        }
    }
}

impl Hand for Http {
    const HAS_A_CONNECTION: bool = false;

    async fn connect(faena: &Faena, who: Who) -> Self {
        let base = format!("{}/api/v1/workers", faena.url);
        let mut register =
            json!({"workerId": who.id, "capabilities": who.capabilities, "concurrency": who.concurrency});
        if !who.queues.is_empty() {
            register["queues"] = who.queues.into();
        }
        Http::open(&base, register).await.0
    }

    fn id(&self) -> &str {
        self.register["workerId"].as_str().unwrap()
    }

    async fn next_job(&mut self) -> Job {
        in_time("a job", self.jobs.recv()).await.expect("the claims go on")
    }

    async fn started(&mut self, job: &Job) -> Answer {
        self.report(job, "started", json!({})).await
    }

    async fn progress(&mut self, job: &Job, progress: Value) -> Answer {
        self.report(job, "progress", json!({ "progress": progress })).await
    }

    async fn log(&mut self, job: &Job, message: &str) -> Answer {
        self.report(job, "log", json!({ "message": message })).await
    }

    async fn step(&mut self, job: &Job, name: &str, result: Value, total: Option<u32>) -> Result<Value, String> {
        if let Some((_, stored)) = job.steps.iter().find(|(known, _)| known == name) {
            return Ok(stored.clone());
        }
        let mut body = json!({"name": name, "result": result});
        if let Some(total) = total {
            body["totalSteps"] = total.into();
        }
        self.report(job, "step", body).await.map(|()| result)
    }

    async fn complete(&mut self, job: &Job, result: Value) -> Answer {
        self.report(job, "complete", json!({ "result": result })).await
    }

    async fn fail(&mut self, job: &Job, failure: Failure) -> Answer {
        let mut body = json!({"error": failure.error});
        if let Some(retryable) = failure.retryable {
            body["retryable"] = retryable.into();
        }
        if let Some(ms) = failure.retry_after_ms {
            body["retryAfterMs"] = ms.into();
        }
        self.report(job, "fail", body).await
    }

    async fn next_cancel(&mut self) -> (String, i64) {
        in_time("an order to stop", self.cancels.recv()).await.expect("the claims go on")
    }

    /// Nothing is open between two calls: closed and silent are the same.
    async fn away(&mut self, _how: Away) {
        self.claims.abort();
    }

    async fn back(&mut self) -> Option<bool> {
        let (http, resumed) = Http::open(&self.base, self.register.clone()).await;
        *self = http;
        Some(resumed)
    }

    async fn cut(self) {
        self.claims.abort();
    }

    async fn leave(self) {
        let answer = self.http.delete(format!("{}/{}", self.base, self.id())).send().await.unwrap();
        assert_eq!(answer.status(), StatusCode::OK);
    }
}

impl Drop for Http {
    fn drop(&mut self) {
        self.claims.abort();
    }
}
