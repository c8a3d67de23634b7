//! Webhooks, as far as both engines agree: what is sent, what is handed to a sender, what it tells, what the job's log says.

use faena_domain::{
    JobId, JobOptions, JobState, LogEvent, LogLine, NodeId, Timestamp, WebhookBody, WebhookId, WebhookState,
};
use serde_json::value::RawValue;

use crate::{AuditEntry, Result, StoreError};

/// What a sender wants to send now.
#[derive(Clone, Debug)]
pub struct WebhookTakeRequest {
    pub node: NodeId,
    pub limit: usize,
    /// To how many of one host at most.
    pub per_host: usize,
    /// Hosts that have less room than that, or none.
    pub rooms: Vec<(String, usize)>,
    /// How many attempts there may be. A webhook whose senders die gets up to `LOST_FORGIVEN` more.
    pub allowed: u32,
    /// How long the sender has to tell how it went; after that the next one sends it again.
    pub lease_ms: i64,
}

#[derive(Clone, Debug, Default)]
pub struct WebhookTaken {
    pub deliveries: Vec<Delivery>,
    /// When the next one is due that is not due yet.
    pub next_at: Option<Timestamp>,
}

/// One attempt, in its sender's hands.
#[derive(Clone, Debug)]
pub struct Delivery {
    pub id: WebhookId,
    pub job: JobId,
    pub correlation_id: String,
    pub traceparent: Option<String>,
    pub url: String,
    pub host: String,
    pub body: String,
    /// Counts all attempts ever begun: the fence of this one.
    pub number: u32,
    /// Counts those since it was last asked for.
    pub attempt: u32,
}

/// How an attempt went.
#[derive(Clone, Debug)]
pub struct WebhookResult {
    pub id: WebhookId,
    pub number: u32,
    pub attempt: u32,
    pub allowed: u32,
    pub at: Timestamp,
    pub took_ms: u64,
    pub status: Option<u16>,
    pub error: Option<String>,
    pub answer: Option<String>,
    pub next: WebhookNext,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum WebhookNext {
    Delivered,
    Again { due_at: Timestamp },
    Failed,
}

#[derive(Clone, PartialEq, Debug, Default)]
pub struct WebhookFilter {
    pub state: Option<WebhookState>,
    pub job: Option<JobId>,
    /// With its port.
    pub host: Option<String>,
}

/// How many attempts without an outcome cost no try when they were the last ones.
pub const LOST_FORGIVEN: u32 = 3;

pub const LOST: &str = "its sender did not tell how it went; it may have arrived";

/// What an attempt that ran out of its lease means.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum AfterLoss {
    SendAgain,
    GiveUp,
}

impl AfterLoss {
    /// `attempts` of the `allowed` ones have begun since it was asked for, `lost` of them without an outcome.
    pub fn of(attempts: u32, lost: u32, allowed: u32) -> AfterLoss {
        if attempts >= allowed && lost > LOST_FORGIVEN { AfterLoss::GiveUp } else { AfterLoss::SendAgain }
    }
}

impl WebhookNext {
    pub fn state(self) -> WebhookState {
        match self {
            WebhookNext::Delivered => WebhookState::Delivered,
            WebhookNext::Again { .. } => WebhookState::Waiting,
            WebhookNext::Failed => WebhookState::Failed,
        }
    }

    pub fn due_at_ms(self) -> Option<i64> {
        match self {
            WebhookNext::Again { due_at } => Some(due_at.as_ms()),
            WebhookNext::Delivered | WebhookNext::Failed => None,
        }
    }
}

impl WebhookResult {
    /// The line in the job's log.
    pub(crate) fn line(&self, url: &str) -> LogLine {
        let url = without_query(url);
        let count = format!("attempt {} of {}", self.attempt, self.allowed);
        let what = match (self.status, &self.error) {
            (_, Some(error)) => error.clone(),
            (Some(status), None) => format!("HTTP {status}"),
            (None, None) => String::new(),
        };
        match self.next {
            WebhookNext::Delivered => {
                LogLine::new(self.at, LogEvent::WebhookSent, format!("{url}: {what} in {} ms, {count}", self.took_ms))
            }
            WebhookNext::Again { due_at } => {
                LogLine::new(self.at, LogEvent::WebhookFailed, format!("{url}: {what}, {count}; again at {due_at}"))
            }
            WebhookNext::Failed => {
                LogLine::new(self.at, LogEvent::WebhookFailed, format!("{url}: {what}, {count}; given up"))
            }
        }
    }
}

/// The line in the log of a job whose webhook was lost too often.
pub(crate) fn lost_line(url: &str, at: Timestamp) -> LogLine {
    LogLine::new(at, LogEvent::WebhookFailed, format!("{}: {LOST}; given up", without_query(url)))
}

/// What may be shown of an address: its query may carry a token.
pub fn without_query(url: &str) -> &str {
    url.split(['?', '#']).next().unwrap_or(url)
}

/// How a job ended, as its row in `done` or `ended` says.
pub(crate) struct Ended {
    pub id: JobId,
    pub kind: String,
    pub state: JobState,
    pub finished_at: Timestamp,
    pub result: Option<String>,
    pub error: Option<String>,
    pub correlation: Option<String>,
}

/// A row for `webhook`.
pub(crate) struct NewWebhook {
    pub id: WebhookId,
    pub job: JobId,
    pub correlation: String,
    pub traceparent: Option<String>,
    pub url: String,
    pub host: String,
    pub body: String,
    pub created_at: Timestamp,
}

impl NewWebhook {
    pub fn new(ended: Ended, url: String, options: &JobOptions) -> Result<NewWebhook> {
        let result = ended.result.map(raw).transpose()?;
        let body = WebhookBody {
            job_id: ended.id,
            job_type: &ended.kind,
            status: &ended.state.as_str().to_lowercase(),
            result: result.as_deref(),
            error: ended.error.as_deref(),
            completed_at: ended.finished_at,
        };
        Ok(NewWebhook {
            id: WebhookId::new(),
            job: ended.id,
            correlation: ended.correlation.unwrap_or_else(|| ended.id.to_string()),
            traceparent: options.traceparent.clone(),
            host: host_of(&url),
            body: serde_json::to_string(&body).map_err(|e| StoreError::Broken(format!("a webhook's body: {e}")))?,
            url,
            created_at: ended.finished_at,
        })
    }
}

pub(crate) fn raw(text: String) -> Result<Box<RawValue>> {
    RawValue::from_string(text).map_err(|e| StoreError::Broken(format!("stored JSON: {e}")))
}

/// Host and port; nothing of what is no address, which is then found out by whoever sends it.
pub fn host_of(url: &str) -> String {
    let host = |url: url::Url| Some(format!("{}:{}", url.host_str()?, url.port_or_known_default()?));
    url::Url::parse(url).ok().and_then(host).unwrap_or_default()
}

pub(crate) fn redelivered(id: WebhookId, job: JobId, url: &str, was: WebhookState, by: &str) -> AuditEntry {
    AuditEntry {
        actor: by.into(),
        action: "webhook.redeliver".into(),
        target: id.to_string(),
        details: serde_json::json!({"jobId": job, "url": without_query(url), "was": was}),
        count: 1,
    }
}

pub(crate) fn unsettled(id: WebhookId, state: WebhookState) -> StoreError {
    StoreError::Conflict {
        message: format!("webhook {id} is {} and will be sent anyway", state.as_str()),
        holder: None,
    }
}

pub(crate) fn state_of(code: i16) -> Result<WebhookState> {
    WebhookState::from_code(code).ok_or_else(|| StoreError::Broken(format!("a webhook's state {code} is not known")))
}

/// Counting stops here: nobody needs to know more exactly how bad it is.
pub(crate) const COUNTED: i64 = 100_000;

/// The states that are counted. The delivered ones are most of them and no news.
pub(crate) const COUNTED_STATES: [WebhookState; 3] =
    [WebhookState::Waiting, WebhookState::Sending, WebhookState::Failed];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_is_named_with_its_port() {
        assert_eq!(host_of("https://Example.org/a?b"), "example.org:443");
        assert_eq!(host_of("http://10.0.0.1:8080/"), "10.0.0.1:8080");
        assert_eq!(host_of("http://[::1]/"), "[::1]:80");
        assert_eq!(host_of("nonsense"), "");
    }

    #[test]
    fn senders_that_die_do_not_use_up_the_last_try_but_not_for_ever() {
        assert_eq!(AfterLoss::of(1, 1, 3), AfterLoss::SendAgain);
        assert_eq!(AfterLoss::of(3, 1, 3), AfterLoss::SendAgain);
        assert_eq!(AfterLoss::of(5, 3, 3), AfterLoss::SendAgain);
        assert_eq!(AfterLoss::of(6, 4, 3), AfterLoss::GiveUp);
        assert_eq!(AfterLoss::of(4, 4, 12), AfterLoss::SendAgain);
    }
}
