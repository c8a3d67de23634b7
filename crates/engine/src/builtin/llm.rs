//! The job type `llm.chat`: one question to a language model behind an OpenAI-compatible server.
//!
//! The answer is stored as a step of the job before the job ends, so a crash never repeats a call whose answer was
//! stored. A call that the server answered with success is repeated only if the connection broke before the whole
//! answer had arrived. An answer that is unusable was already charged, so its call is not repeated.

use std::{fmt, time::Duration};

use faena_domain::{Failure, TaskId, Timestamp};
use faena_store::TaskTokens;
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

/// Address and limits of a language model.
#[derive(Clone)]
pub struct LlmConfig {
    /// Such as `https://api.example.com/v1`.
    pub base_url: Url,
    pub model: String,
    /// Sent with each request; they contain the key.
    pub headers: HeaderMap,
    /// Maximum number of tokens in an answer.
    pub max_tokens: u64,
    /// Maximum size of a prompt, with its system message.
    pub max_prompt_bytes: usize,
    /// Maximum size of an answer.
    pub max_answer_bytes: usize,
    /// Time limit for one answer, unless the job's own limit is shorter.
    pub timeout: Duration,
    /// Tokens per UTC day, of all nodes together. `None`: no limit.
    pub daily_tokens: Option<u64>,
}

impl LlmConfig {
    pub fn new(base_url: Url, model: String) -> LlmConfig {
        LlmConfig {
            base_url,
            model,
            headers: HeaderMap::new(),
            max_tokens: 4_096,
            max_prompt_bytes: 256 << 10,
            max_answer_bytes: 1 << 20,
            timeout: Duration::from_secs(300),
            daily_tokens: None,
        }
    }

    /// Removes the values of the headers from a text, because a server may repeat them in an error.
    fn redact(&self, mut text: String) -> String {
        for value in self.headers.values().filter_map(|value| value.to_str().ok()) {
            let secret = value.rsplit(' ').next().unwrap_or(value);
            // A short value is not a secret, and could occur in any text by chance.
            for part in [value, secret].into_iter().filter(|part| part.len() >= 6) {
                text = text.replace(part, "…");
            }
        }
        text
    }
}

impl fmt::Debug for LlmConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LlmConfig").field("host", &self.base_url.host_str()).field("model", &self.model).finish()
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
    /// The model to use instead of the configured one.
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

/// Name of the step that keeps the answer.
const ANSWER_STEP: &str = "answer";

/// Delays before the first and the second retry. Every later retry waits as long as the second.
const RETRY_DELAYS: [Duration; 2] = [Duration::from_secs(10), Duration::from_secs(30)];

/// Longest delay that a server may ask for.
const MAX_RETRY_AFTER: Duration = Duration::from_secs(24 * 3_600);

/// Why a call has no answer.
struct CallError {
    failure: Failure,
    /// Whether the server may charge for the call, because it may have processed it.
    may_be_charged: bool,
}

impl LlmCaller {
    pub fn new(config: Option<LlmConfig>) -> LlmCaller {
        let client = |config: &LlmConfig| {
            Client::builder()
                .redirect(redirect::Policy::none())
                .no_proxy()
                .connect_timeout(Duration::from_secs(10))
                .timeout(config.timeout)
                .user_agent(concat!("faena/", env!("CARGO_PKG_VERSION")))
                .retry(reqwest::retry::never())
                .build()
                .expect("a client without files or system proxies can be built")
        };
        LlmCaller { server: config.map(|config| (client(&config), config)) }
    }

    pub async fn run(&self, context: &Context<'_>) -> Result<Option<String>, Failure> {
        let request: Request = payload(context, EXPECTED)?;
        let Some((client, config)) = &self.server else {
            return Err(Failure::fatal("no language model is configured; set llm.base_url and llm.model"));
        };
        if let Some(answer) = context.step(ANSWER_STEP).await? {
            return Ok(Some(answer));
        }
        let prompt_bytes = request.prompt.len() + request.system.as_ref().map_or(0, String::len);
        if prompt_bytes > config.max_prompt_bytes {
            let limit = config.max_prompt_bytes;
            return Err(Failure::fatal(format!(
                "the prompt has {prompt_bytes} bytes; the limit is {limit} (llm.max_prompt_bytes)"
            )));
        }
        let max_tokens = request.max_tokens.map_or(config.max_tokens, |tokens| tokens.min(config.max_tokens));
        // A token has at least one byte.
        let reserved = max_tokens.saturating_add(prompt_bytes as u64);
        let task = reserve_for_task(context, reserved).await?;
        let reserved_at = match reserve(context, config, reserved).await {
            Ok(reserved_at) => reserved_at,
            Err(failure) => {
                settle_for_task(context, task, reserved, 0).await;
                return Err(failure);
            }
        };
        let answer = call(client, config, request, max_tokens).await;
        let used = match &answer {
            Ok(answer) => answer.usage["total_tokens"].as_u64().unwrap_or(reserved),
            Err(error) if error.may_be_charged => reserved,
            Err(_) => 0,
        };
        settle(context, reserved_at, reserved, used).await;
        settle_for_task(context, task, reserved, used).await;
        let answer = answer.map_err(|error| with_delay(error.failure, context.retry_count()))?;
        let answer = serde_json::to_string(&answer).expect("an answer is JSON");
        context.store_step(ANSWER_STEP, answer.clone()).await;
        Ok(Some(answer))
    }
}

/// Reserves tokens of today's budget, if there is one. Returns the time of the reservation, which identifies its day.
async fn reserve(context: &Context<'_>, config: &LlmConfig, tokens: u64) -> Result<Option<Timestamp>, Failure> {
    let Some(limit) = config.daily_tokens else { return Ok(None) };
    let now = Timestamp::now();
    match context.worker.store.tokens_reserve(tokens, limit, now).await {
        Ok(true) => Ok(Some(now)),
        Ok(false) => Err(Failure::fatal(format!(
            "the budget of {limit} tokens per day is too small for this call of up to {tokens}; retry it after 00:00 UTC, \
             or raise llm.daily_tokens"
        ))),
        Err(error) => {
            tracing::warn!(job = %context.id(), %error, "cannot read the daily token budget, job will be retried");
            Err(Failure::error("the token budget cannot be read; the job will be retried"))
        }
    }
}

/// Reserves tokens of the task that the job belongs to, if its machine limits them. Returns the task.
async fn reserve_for_task(context: &Context<'_>, tokens: u64) -> Result<Option<TaskId>, Failure> {
    match context.worker.store.task_tokens_reserve(context.id(), tokens).await {
        Ok(TaskTokens::Unlimited) => Ok(None),
        Ok(TaskTokens::Reserved(task)) => Ok(Some(task)),
        Ok(TaskTokens::Exceeded { task, limit, used }) => Err(Failure::fatal(format!(
            "the budget of {limit} tokens of task {task} is too small for this call of up to {tokens}: {used} are used; raise \
             limits.llm_tokens in a new version of its machine"
        ))),
        Err(error) => {
            tracing::warn!(job = %context.id(), %error, "cannot read the token budget of a task, job will be retried");
            Err(Failure::error("the token budget of the task cannot be read; the job will be retried"))
        }
    }
}

async fn settle_for_task(context: &Context<'_>, task: Option<TaskId>, reserved: u64, used: u64) {
    let Some(task) = task else { return };
    if let Err(error) = context.worker.store.task_tokens_settle(task, reserved, used).await {
        tracing::warn!(job = %context.id(), %task, %error, reserved, used, "cannot store the tokens used, the whole reservation stays charged");
    }
}

async fn settle(context: &Context<'_>, reserved_at: Option<Timestamp>, reserved: u64, used: u64) {
    let Some(at) = reserved_at else { return };
    if let Err(error) = context.worker.store.tokens_settle(reserved, used, at).await {
        tracing::warn!(job = %context.id(), %error, reserved, used, "cannot store the tokens used, the whole reservation stays charged");
    }
}

/// Sets when a failed call is repeated: after the delay that the server asks for, or that of this retry, whichever is longer.
fn with_delay(failure: Failure, retry_count: u32) -> Failure {
    if !failure.retryable {
        return failure;
    }
    let position = usize::try_from(retry_count).unwrap_or(usize::MAX).min(RETRY_DELAYS.len() - 1);
    let millis = |duration: Duration| u64::try_from(duration.as_millis()).unwrap_or(u64::MAX);
    let requested = failure.retry_after_ms.unwrap_or(0).min(millis(MAX_RETRY_AFTER));
    Failure { retry_after_ms: Some(requested.max(millis(RETRY_DELAYS[position]))), ..failure }
}

async fn call(client: &Client, config: &LlmConfig, request: Request, max_tokens: u64) -> Result<Answer, CallError> {
    let unsent = |failure| CallError { failure, may_be_charged: false };
    let mut url = config.base_url.clone();
    url.path_segments_mut()
        .map_err(|()| unsent(Failure::fatal("llm.base_url cannot have a path")))?
        .pop_if_empty()
        .extend(["chat", "completions"]);
    let system = request.system.iter().map(|text| json!({"role": "system", "content": text}));
    let messages: Vec<Value> = system.chain([json!({"role": "user", "content": request.prompt})]).collect();
    let model = request.model.unwrap_or_else(|| config.model.clone());
    let body = json!({"model": model, "messages": messages, "max_tokens": max_tokens});
    let sent = client.post(url).headers(config.headers.clone()).json(&body).send().await;
    let response = sent.map_err(|error| CallError {
        may_be_charged: !error.is_connect(),
        failure: Failure::error(config.redact(describe(error))),
    })?;
    let answer = read(config, response).await?;
    let text = answer["choices"][0]["message"]["content"].as_str();
    let text = text.ok_or_else(|| unusable("the answer of the language model has no text"))?;
    Ok(Answer { text: text.to_owned(), model, usage: answer["usage"].clone() })
}

/// Returns the error for an answer that was charged and cannot be used. It is not retried: another call might get the same answer.
fn unusable(message: impl Into<String>) -> CallError {
    CallError { failure: Failure::fatal(message.into()), may_be_charged: true }
}

async fn read(config: &LlmConfig, mut answer: reqwest::Response) -> Result<Value, CallError> {
    let status = answer.status();
    let seconds = answer.headers().get(RETRY_AFTER).and_then(|value| value.to_str().ok()?.trim().parse::<u64>().ok());
    let mut body = Vec::new();
    loop {
        let part = answer.chunk().await.map_err(|error| CallError {
            failure: Failure::error(config.redact(describe(error))),
            may_be_charged: status.is_success(),
        })?;
        let Some(part) = part else { break };
        body.extend_from_slice(&part);
        if body.len() > config.max_answer_bytes {
            let limit = config.max_answer_bytes;
            return Err(unusable(format!(
                "the answer of the language model has more than {limit} bytes (llm.max_answer_bytes)"
            )));
        }
    }
    if !status.is_success() {
        let text: String = config.redact(String::from_utf8_lossy(&body).into_owned()).chars().take(500).collect();
        let is_permanent = status.is_client_error() && !matches!(status.as_u16(), 408 | 425 | 429);
        let message = format!("the language model answered HTTP {status}: {text}");
        let retry_after_ms = seconds.map(|seconds| seconds.saturating_mul(1_000));
        let failure = Failure { retryable: !is_permanent, retry_after_ms, ..Failure::error(message) };
        return Err(CallError { failure, may_be_charged: false });
    }
    serde_json::from_slice(&body).map_err(|_| unusable("the answer of the language model is not JSON"))
}
