//! The demo's calls to its own server.

use std::{sync::Arc, time::Duration};

use anyhow::{Context, bail};
use serde_json::Value;

use super::receiver::Receiver;

/// Client of the demo. Clones share one connection pool.
#[derive(Clone)]
pub struct Api {
    http: reqwest::Client,
    url: Arc<str>,
    pub receiver: Receiver,
}

const TIMEOUT: Duration = Duration::from_secs(10);

impl Api {
    pub fn new(url: &str, receiver: &Receiver) -> anyhow::Result<Api> {
        let http = reqwest::Client::builder().no_proxy().timeout(TIMEOUT).build().context("the HTTP client")?;
        Ok(Api { http, url: url.into(), receiver: receiver.clone() })
    }

    pub async fn get(&self, path: &str) -> anyhow::Result<Value> {
        self.send(self.http.get(format!("{}/api/v1{path}", self.url)), path).await
    }

    pub async fn post(&self, path: &str, body: Value) -> anyhow::Result<Value> {
        self.send(self.http.post(format!("{}/api/v1{path}", self.url)).json(&body), path).await
    }

    pub async fn patch(&self, path: &str, body: Value) -> anyhow::Result<Value> {
        self.send(self.http.patch(format!("{}/api/v1{path}", self.url)).json(&body), path).await
    }

    async fn send(&self, request: reqwest::RequestBuilder, path: &str) -> anyhow::Result<Value> {
        let answer = request.send().await.with_context(|| format!("no answer to {path}"))?;
        let status = answer.status();
        let body: Value = answer.json().await.with_context(|| format!("no answer to {path}"))?;
        if !status.is_success() {
            bail!("{path} was answered with {status}: {body}");
        }
        Ok(body)
    }
}
