//! The job type `http.request`: one call to a permitted address.

use std::{collections::BTreeMap, time::Duration};

use faena_domain::{AddressRule, ErrorReason, Failure};
use reqwest::{
    Client, Method,
    header::{HeaderMap, HeaderName, HeaderValue, RETRY_AFTER},
    redirect,
};
use serde::{Deserialize, Serialize};
use serde_json::{Value, value::RawValue};

use super::{Context, run::payload};
use crate::address::{GuardedResolver, describe, is_forbidden};

#[derive(Clone)]
pub struct HttpCaller {
    client: Client,
    rule: AddressRule,
    answer_bytes: usize,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Request {
    #[serde(default)]
    method: Option<String>,
    url: String,
    #[serde(default)]
    headers: BTreeMap<String, String>,
    /// A string is sent unchanged, anything else as JSON.
    #[serde(default)]
    body: Option<Box<RawValue>>,
    #[serde(default)]
    expect_status: Option<Expected>,
    #[serde(default)]
    timeout_ms: Option<u64>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Expected {
    One(u16),
    Any(Vec<u16>),
}

#[derive(Serialize)]
struct Answer {
    status: u16,
    headers: BTreeMap<String, String>,
    body: Value,
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    truncated: bool,
}

const EXPECTED: &str = r#"{"method": "POST", "url": "https://example.org", "headers": {"accept": "*/*"}, "body": {}, "expectStatus": [200, 201], "timeoutMs": 5000}"#;

impl HttpCaller {
    pub fn new(rule: AddressRule, answer_bytes: usize) -> HttpCaller {
        let client = Client::builder()
            .redirect(redirect::Policy::none())
            .no_proxy()
            .dns_resolver(GuardedResolver(rule.clone()))
            .connect_timeout(Duration::from_secs(10))
            .pool_idle_timeout(Duration::from_secs(30))
            .user_agent(concat!("faena/", env!("CARGO_PKG_VERSION")))
            .retry(reqwest::retry::never())
            .build()
            .expect("a client without files or system proxies can be built");
        HttpCaller { client, rule, answer_bytes }
    }

    pub async fn run(&self, context: &Context<'_>) -> Result<Option<String>, Failure> {
        let request: Request = payload(context, EXPECTED)?;
        let invalid = |what: String| Failure::fatal(format!("the payload is not valid: {what}"));
        let url: url::Url = request.url.parse().map_err(|e| invalid(format!("url: {e}")))?;
        self.rule.check_url(&url).map_err(|e| invalid(format!("url: {e}")))?;
        let method = request.method.as_deref().unwrap_or("GET").to_uppercase();
        let method: Method = method.parse().map_err(|_| invalid(format!("method: \"{method}\" is not a method")))?;
        let mut call = self.client.request(method, url).headers(headers(&request, context)?);
        if let Some(ms) = request.timeout_ms {
            call = call.timeout(Duration::from_millis(ms));
        }
        if let Some(body) = &request.body {
            call = match serde_json::from_str::<String>(body.get()) {
                Ok(text) => call.body(text),
                Err(_) => call.body(body.get().to_owned()),
            };
        }
        let answer = call.send().await.map_err(failure)?;
        self.evaluate(answer, request.expect_status).await
    }

    async fn evaluate(
        &self,
        mut answer: reqwest::Response,
        expected: Option<Expected>,
    ) -> Result<Option<String>, Failure> {
        let status = answer.status();
        let is_expected = match &expected {
            None => status.is_success(),
            Some(Expected::One(code)) => status.as_u16() == *code,
            Some(Expected::Any(codes)) => codes.contains(&status.as_u16()),
        };
        let retry_after_ms = answer
            .headers()
            .get(RETRY_AFTER)
            .and_then(|value| value.to_str().ok()?.trim().parse::<u64>().ok())
            .map(|seconds| seconds.saturating_mul(1_000));
        let headers = answer
            .headers()
            .iter()
            .filter(|(name, _)| *name != reqwest::header::SET_COOKIE)
            .map(|(name, value)| (name.to_string(), String::from_utf8_lossy(value.as_bytes()).into_owned()))
            .collect();
        let mut body = Vec::new();
        let mut truncated = false;
        while let Some(part) = answer.chunk().await.map_err(failure)? {
            let room = self.answer_bytes.saturating_sub(body.len());
            body.extend_from_slice(&part[..part.len().min(room)]);
            if part.len() > room {
                truncated = true;
                break;
            }
        }
        if !is_expected {
            let text: String = String::from_utf8_lossy(&body).chars().take(500).collect();
            // A client error occurs again on a retry, unless the request was too early, too slow or too frequent.
            let is_permanent = status.is_client_error() && !matches!(status.as_u16(), 408 | 425 | 429);
            let message = format!("HTTP {status}: {text}");
            return Err(Failure { retryable: !is_permanent, retry_after_ms, ..Failure::error(message) });
        }
        let body = match serde_json::from_slice::<Value>(&body) {
            Ok(json) if !truncated => json,
            _ => Value::String(String::from_utf8_lossy(&body).into_owned()),
        };
        let answer = Answer { status: status.as_u16(), headers, body, truncated };
        Ok(Some(serde_json::to_string(&answer).expect("an answer is JSON")))
    }
}

fn headers(request: &Request, context: &Context<'_>) -> Result<HeaderMap, Failure> {
    let mut headers = HeaderMap::new();
    let own = [
        ("x-job-id", context.id().to_string()),
        ("x-job-run", context.run().to_string()),
        ("x-correlation-id", context.correlation_id()),
    ];
    let body_is_json = request.body.as_ref().is_some_and(|body| !body.get().starts_with('"'));
    let json = body_is_json.then(|| ("content-type", "application/json".to_owned()));
    let given = request.headers.iter().map(|(name, value)| (name.as_str(), value.clone()));
    // The headers that identify the run come last, so that a payload cannot replace them.
    let trace = context.traceparent().map(|trace| ("traceparent", trace));
    for (name, value) in json.into_iter().chain(given).chain(own).chain(trace) {
        let name: HeaderName = name
            .parse()
            .map_err(|_| Failure::fatal(format!("the payload is not valid: headers: {name:?} is not a header name")))?;
        let value = HeaderValue::from_str(&value).map_err(|_| {
            Failure::fatal(format!("the payload is not valid: headers: the value of \"{name}\" is not allowed"))
        })?;
        headers.insert(name, value);
    }
    Ok(headers)
}

/// Returns the failure of a call. A rejected address is a fatal failure.
fn failure(error: reqwest::Error) -> Failure {
    let (is_timeout, is_forbidden) = (error.is_timeout(), is_forbidden(&error));
    let text = describe(error);
    if is_forbidden {
        return Failure::fatal(text);
    }
    let failure = Failure::error(text);
    if is_timeout { failure.with_reason(ErrorReason::Timeout) } else { failure }
}
