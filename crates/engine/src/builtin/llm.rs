//! The job type `llm.chat`: one question to a language model behind an OpenAI-compatible server.
//!
//! The answer is the result of the job, stored with its end, so a crash never repeats a call whose answer was stored.

use std::{fmt, time::Duration};

use faena_domain::Failure;
use reqwest::{
    Client,
    header::{HeaderMap, RETRY_AFTER},
    redirect,
};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use url::Url;

use super::{Context, run::payload};
use crate::address::describe;

/// Where a language model answers.
#[derive(Clone)]
pub struct LlmConfig {
    /// Such as `https://api.example.com/v1`.
    pub base_url: Url,
    pub model: String,
    /// Sent with each request; they contain the key.
    pub headers: HeaderMap,
    /// Most tokens of an answer.
    pub max_tokens: u64,
}

impl fmt::Debug for LlmConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LlmConfig").field("base_url", &self.base_url.as_str()).field("model", &self.model).finish()
    }
}

#[derive(Clone)]
pub struct LlmCaller {
    server: Option<(Client, LlmConfig)>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Request {
    prompt: String,
    #[serde(default)]
    system: Option<String>,
    /// Another model than the configured one.
    #[serde(default)]
    model: Option<String>,
    #[serde(default)]
    max_tokens: Option<u64>,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Answer {
    text: String,
    model: String,
    #[serde(skip_serializing_if = "Value::is_null")]
    usage: Value,
}

const EXPECTED: &str = r#"{"prompt": "…", "system": "…", "model": "…", "maxTokens": 500}"#;

/// Longest answer that is read.
const MAX_BYTES: usize = 4 << 20;

/// How long a server may take for one answer, unless the job's own limit is shorter.
const TIMEOUT: Duration = Duration::from_secs(300);

impl LlmCaller {
    pub fn new(config: Option<LlmConfig>) -> LlmCaller {
        let client = || {
            Client::builder()
                .redirect(redirect::Policy::none())
                .no_proxy()
                .connect_timeout(Duration::from_secs(10))
                .timeout(TIMEOUT)
                .user_agent(concat!("faena/", env!("CARGO_PKG_VERSION")))
                .retry(reqwest::retry::never())
                .build()
                .expect("a client without files or system proxies can be built")
        };
        LlmCaller { server: config.map(|config| (client(), config)) }
    }

    pub async fn run(&self, context: &Context<'_>) -> Result<Option<String>, Failure> {
        let request: Request = payload(context, EXPECTED)?;
        let Some((client, config)) = &self.server else {
            return Err(Failure::fatal("no language model is configured; set llm.base_url and llm.model"));
        };
        let mut url = config.base_url.clone();
        url.path_segments_mut()
            .map_err(|()| Failure::fatal("llm.base_url cannot have a path"))?
            .pop_if_empty()
            .extend(["chat", "completions"]);
        let system = request.system.iter().map(|text| json!({"role": "system", "content": text}));
        let messages: Vec<Value> = system.chain([json!({"role": "user", "content": request.prompt})]).collect();
        let model = request.model.unwrap_or_else(|| config.model.clone());
        let max_tokens = request.max_tokens.map_or(config.max_tokens, |tokens| tokens.min(config.max_tokens));
        let body = json!({"model": model, "messages": messages, "max_tokens": max_tokens});
        let call = client.post(url).headers(config.headers.clone()).json(&body).send();
        let answer = read(call.await.map_err(|error| Failure::error(describe(error)))?).await?;
        let text = answer["choices"][0]["message"]["content"].as_str();
        let text = text.ok_or_else(|| Failure::fatal("the answer of the language model has no text"))?;
        let answer = Answer { text: text.to_owned(), model, usage: answer["usage"].clone() };
        Ok(Some(serde_json::to_string(&answer).expect("an answer is JSON")))
    }
}

async fn read(mut answer: reqwest::Response) -> Result<Value, Failure> {
    let status = answer.status();
    let seconds = answer.headers().get(RETRY_AFTER).and_then(|value| value.to_str().ok()?.trim().parse::<u64>().ok());
    let mut body = Vec::new();
    while let Some(part) = answer.chunk().await.map_err(|error| Failure::error(describe(error)))? {
        body.extend_from_slice(&part);
        if body.len() > MAX_BYTES {
            return Err(Failure::fatal(format!("the answer of the language model has more than {MAX_BYTES} bytes")));
        }
    }
    if !status.is_success() {
        let text: String = String::from_utf8_lossy(&body).chars().take(500).collect();
        let is_permanent = status.is_client_error() && !matches!(status.as_u16(), 408 | 425 | 429);
        let message = format!("the language model answered HTTP {status}: {text}");
        let retry_after_ms = seconds.map(|seconds| seconds.saturating_mul(1_000));
        return Err(Failure { retryable: !is_permanent, retry_after_ms, ..Failure::error(message) });
    }
    serde_json::from_slice(&body).map_err(|_| Failure::error("the answer of the language model is not JSON"))
}
