//! `llm.chat` against a real server on loopback with an OpenAI-compatible chat completions API.

use std::{sync::Arc, time::Duration};

use axum::{
    Router,
    body::{Body, Bytes},
    extract::{Request, State},
    http::StatusCode,
    response::{IntoResponse, Response},
};
use faena_domain::{JobState, JobView, LogEvent, NewJob, TaskId, Timestamp};
use faena_engine::{EngineConfig, LlmConfig};
use faena_machine::{Definition, create};
use faena_store::{NewMachine, NewTask};
use parking_lot::Mutex;
use serde_json::{Value, json};

use crate::fixture::{Fixture, job, once, result, serve};

const KEY: &str = "sk-very-secret-0123456789";

/// A language model that records its requests and answers according to the prompt.
struct Model {
    url: String,
    calls: Arc<Mutex<Vec<Value>>>,
}

impl Model {
    async fn start() -> Model {
        let calls = Arc::new(Mutex::new(Vec::new()));
        let url = serve(Router::new().fallback(answer).with_state(calls.clone())).await;
        Model { url: format!("{url}/v1/"), calls }
    }

    fn calls(&self) -> Vec<Value> {
        self.calls.lock().clone()
    }

    fn config(&self) -> LlmConfig {
        let mut config = LlmConfig::new(self.url.parse().unwrap(), "small".into());
        config.headers.insert("authorization", format!("Bearer {KEY}").parse().unwrap());
        config.max_answer_bytes = 64 << 10;
        config
    }

    async fn fixture(&self, change: impl FnOnce(&mut LlmConfig)) -> Fixture {
        let mut config = self.config();
        change(&mut config);
        Fixture::with(EngineConfig { llm: Some(config), ..EngineConfig::default() }).await
    }
}

fn completion(text: &str) -> Response {
    let usage = json!({"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7});
    let choice = json!({"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"});
    let body = json!({"id": "c1", "object": "chat.completion", "model": "small", "choices": [choice], "usage": usage});
    axum::Json(body).into_response()
}

async fn answer(State(calls): State<Arc<Mutex<Vec<Value>>>>, request: Request) -> Response {
    let (parts, body) = request.into_parts();
    let body = axum::body::to_bytes(body, 1 << 20).await.unwrap();
    let body: Value = serde_json::from_slice(&body).unwrap();
    let key = parts.headers["authorization"].to_str().unwrap().to_owned();
    let prompt = body["messages"].as_array().unwrap().last().unwrap()["content"].as_str().unwrap().to_owned();
    let earlier = {
        let mut calls = calls.lock();
        let earlier = calls.len();
        calls.push(json!({"path": parts.uri.path(), "key": key, "body": body}));
        earlier
    };
    match prompt.as_str() {
        "busy" if earlier == 0 => (StatusCode::TOO_MANY_REQUESTS, [("retry-after", "7")], "slow down").into_response(),
        "down" => (StatusCode::SERVICE_UNAVAILABLE, [("retry-after", "45")], "later").into_response(),
        "wrong key" => (StatusCode::UNAUTHORIZED, format!("Incorrect API key provided: {KEY} ({key})")).into_response(),
        "large" => completion(&"x".repeat(128 << 10)),
        "endless" => {
            let parts =
                futures_util::stream::repeat_with(|| Ok::<_, std::io::Error>(Bytes::from_static(&[b'x'; 1024])));
            Body::from_stream(parts).into_response()
        }
        "html" => "<html>welcome</html>".into_response(),
        "no text" => axum::Json(json!({"choices": []})).into_response(),
        "silent" => std::future::pending().await,
        _ => completion("an answer"),
    }
}

fn chat(prompt: &str) -> NewJob {
    job("llm.chat", json!({ "prompt": prompt }).to_string())
}

fn error(job: &JobView) -> &str {
    job.error.as_deref().unwrap()
}

/// Returns how long the job waits after its last failure.
fn delay_ms(job: &JobView) -> i64 {
    let failed = job.execution_log.iter().rev().find(|entry| entry.event == LogEvent::Failed).unwrap();
    job.next_attempt_at.unwrap().ms_since(failed.timestamp)
}

#[tokio::test(flavor = "multi_thread")]
async fn the_answer_is_the_result_and_a_step_of_the_job() {
    let model = Model::start().await;
    let fixture = model.fixture(|_| ()).await;
    let payload = json!({"prompt": "why?", "system": "Be brief.", "maxTokens": 1_000_000});
    let job = fixture.run_to(once("llm.chat", payload.to_string()), JobState::Completed).await;
    let answer = result(&job);
    assert_eq!((&answer["text"], &answer["usage"]["total_tokens"]), (&json!("an answer"), &json!(7)));
    assert_eq!((job.steps.len(), job.steps[0].name.as_str()), (1, "answer"));
    let step: Value = serde_json::from_str(job.steps[0].result.get()).unwrap();
    assert_eq!(step, answer);
    let call = &model.calls()[0];
    assert_eq!((&call["path"], &call["key"]), (&json!("/v1/chat/completions"), &json!(format!("Bearer {KEY}"))));
    let messages = json!([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "why?"}]);
    assert_eq!(
        call["body"],
        json!({"model": "small", "messages": messages, "max_tokens": 4_096}),
        "the configured limit applies"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_busy_model_is_asked_again_after_ten_seconds_or_later_if_it_says_so() {
    let model = Model::start().await;
    let fixture = model.fixture(|_| ()).await;
    let id = fixture.submit(chat("busy")).await;
    let waiting = fixture.wait_for_state(id, JobState::Retrying).await;
    assert_eq!(delay_ms(&waiting), 10_000, "Retry-After is shorter");
    fixture.engine.run_loop("promoter", waiting.next_attempt_at.unwrap()).await.unwrap();
    let done = fixture.wait_for_state(id, JobState::Completed).await;
    assert_eq!((done.retry_count, model.calls().len()), (1, 2));

    let id = fixture.submit(chat("down")).await;
    let waiting = fixture.wait_for_state(id, JobState::Retrying).await;
    assert_eq!(delay_ms(&waiting), 45_000, "Retry-After is longer");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_second_retry_waits_thirty_seconds() {
    let fixture = {
        let mut config = Model::start().await.config();
        // A port on which nothing listens.
        let port = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap().port();
        config.base_url.set_port(Some(port)).unwrap();
        Fixture::with(EngineConfig { llm: Some(config), ..EngineConfig::default() }).await
    };
    let id = fixture.submit(chat("hello")).await;
    let first = fixture.wait_for_state(id, JobState::Retrying).await;
    assert_eq!(delay_ms(&first), 10_000);
    fixture.engine.run_loop("promoter", first.next_attempt_at.unwrap()).await.unwrap();
    let second = crate::fixture::eventually("the second failure", async || {
        let job = fixture.job(id).await;
        (job.status == JobState::Retrying && job.retry_count == 2).then_some(job)
    })
    .await;
    assert_eq!(delay_ms(&second), 30_000);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_answer_that_cannot_be_used_is_not_paid_for_twice() {
    let model = Model::start().await;
    let fixture = model.fixture(|_| ()).await;
    for (prompt, part) in [
        ("large", "more than 65536 bytes"),
        ("endless", "more than 65536 bytes"),
        ("html", "is not JSON"),
        ("no text", "has no text"),
        ("wrong key", "HTTP 401"),
    ] {
        let before = model.calls().len();
        let job = fixture.run_to(chat(prompt), JobState::Failed).await;
        assert!(error(&job).contains(part), "{prompt}: {}", error(&job));
        assert_eq!((job.retry_count, model.calls().len() - before), (0, 1), "{prompt}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_model_that_does_not_answer_is_abandoned_after_the_time_limit() {
    let model = Model::start().await;
    let fixture = model.fixture(|config| config.timeout = Duration::from_millis(200)).await;
    let job = fixture.run_to(once("llm.chat", json!({"prompt": "silent"}).to_string()), JobState::Failed).await;
    assert!(error(&job).contains("timed out"), "{}", error(&job));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_prompt_that_is_too_large_is_not_sent() {
    let model = Model::start().await;
    let fixture = model.fixture(|config| config.max_prompt_bytes = 10).await;
    let job = fixture.run_to(chat("more than ten bytes"), JobState::Failed).await;
    assert!(error(&job).contains("the prompt has 19 bytes; the limit is 10"), "{}", error(&job));
    assert!(model.calls().is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn the_budget_of_a_day_is_never_exceeded() {
    let model = Model::start().await;
    let fixture = model
        .fixture(|config| {
            (config.daily_tokens, config.max_tokens) = (Some(100), 50);
        })
        .await;
    fixture.run_to(chat("hello"), JobState::Completed).await;
    let used = fixture.store.tokens_used(Timestamp::now()).await.unwrap();
    assert_eq!(used, 7, "what the model reports, not what was reserved");
    let job = fixture.run_to(chat(&"x".repeat(60)), JobState::Failed).await;
    assert!(error(&job).starts_with("the budget of 100 tokens per day is too small"), "{}", error(&job));
    assert_eq!((job.retry_count, model.calls().len()), (0, 1), "it was not sent");
    fixture.run_to(chat("wrong key"), JobState::Failed).await;
    assert_eq!(fixture.store.tokens_used(Timestamp::now()).await.unwrap(), 7, "a refused call costs nothing");
    fixture.run_to(chat("html"), JobState::Failed).await;
    assert_eq!(
        fixture.store.tokens_used(Timestamp::now()).await.unwrap(),
        61,
        "an answer without usage figures counts as all reserved tokens"
    );
}

const ASKING: &str = "
machine: asking
version: 1
limits: {llm_tokens: 70}
counters: {questions: {max: 5, exceeded: DONE}}
initial: ASKING
states:
  ASKING:
    deadline: {total: 1h, to: DONE}
    entry: [{llm: answer, data: {prompt: \"'hello'\", maxTokens: 50}}]
    on:
      job.answer.completed: {to: ASKING, loop: questions, set: {answers: 'ctx.answers + 1'}}
      job.answer.failed: {to: OVER, set: {error: event.error.message}}
  DONE: {final: true}
  OVER: {final: true, ends: failure}
";

#[tokio::test(flavor = "multi_thread")]
async fn a_task_that_has_used_its_tokens_takes_its_failure_transition() {
    let model = Model::start().await;
    let fixture = model.fixture(|config| config.daily_tokens = Some(10_000)).await;
    let (store, now) = (&fixture.store, Timestamp::now());
    let definition = Arc::new(Definition::parse(ASKING).unwrap());
    store.machine_register(NewMachine { definition: definition.clone() }, "ops", now).await.unwrap();
    let id = TaskId::new();
    let first = create(&definition, id.to_string(), "ana".into(), json!({"answers": 0}), now).unwrap();
    let correlation = id.to_string();
    let new = NewTask { id, definition, title: None, correlation, tags: Vec::new(), first, audit: None };
    store.task_create(new, now).await.unwrap();
    let task = crate::fixture::eventually("the task has ended", async || {
        Some(store.task_get(id).await.unwrap()?.task).filter(|task| task.status.has_ended())
    })
    .await;
    // Each call reserves 55 tokens and uses 7: after two calls, 14 are used, and 55 more fit; after three they do not.
    assert_eq!((task.state().as_str(), &task.data["answers"], model.calls().len()), ("OVER", &json!(3), 3));
    let error = task.data["error"].as_str().unwrap();
    let expected =
        format!("the budget of 70 tokens of task {id} is too small for this call of up to 55: 21 are used; raise");
    assert!(error.starts_with(&expected), "{error}");
    assert_eq!(store.tokens_used(Timestamp::now()).await.unwrap(), 21, "the daily budget counts the used tokens only");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_key_is_in_no_error_log_or_description() {
    let model = Model::start().await;
    assert!(!format!("{:?}", model.config()).contains(KEY));
    let fixture = model.fixture(|_| ()).await;
    let job = fixture.run_to(chat("wrong key"), JobState::Failed).await;
    assert!(error(&job).contains("Incorrect API key provided: …"), "{}", error(&job));
    assert!(!serde_json::to_string(&job).unwrap().contains(KEY));
}
