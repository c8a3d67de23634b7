//! Webhooks about jobs and approvals: the store methods, deliveries and their outcome, the entries in the job's log.

use async_trait::async_trait;
use faena_domain::{
    AfterAttempt, JOB_STATUS, JobId, JobOptions, JobState, LogDetails, LogEvent, LogLine, NodeId, TaskId, Timestamp,
    WebhookBody, WebhookId, WebhookState, WebhookSubject, WebhookView,
};
use serde_json::value::RawValue;

use crate::{AuditEntry, Cause, Result, StoreError};

/// Takes webhooks for delivery, records the outcome of their attempts, and lists them.
#[async_trait]
pub trait WebhookStore: Send + Sync + 'static {
    /// Takes due webhooks, and those whose sender's lease has ended, for one attempt each: the most overdue first.
    ///
    /// `per_host` and `host_capacities` of the request limit the number per host, so that a slow host does not delay
    /// others. No attempt is taken twice.
    async fn webhook_take(&self, request: WebhookTakeRequest, now: Timestamp) -> Result<WebhookTaken>;

    /// Records the outcome of attempts. If a webhook is about a job, also adds an entry to the log of the job.
    ///
    /// Returns for each result whether its sender still held the attempt; a late result changes nothing.
    async fn webhook_settle(&self, results: Vec<WebhookResult>, now: Timestamp) -> Result<Vec<bool>>;

    /// Sends a settled webhook again, with new attempts and an entry in the audit log. Returns `None` if it does not exist.
    async fn webhook_redeliver(&self, id: WebhookId, by: &str, now: Timestamp) -> Result<Option<WebhookSubject>>;

    /// Returns a webhook with its attempts.
    async fn webhook_get(&self, id: WebhookId) -> Result<Option<WebhookView>>;

    /// Lists matching webhooks whose id is below `after`, newest first, without bodies and attempts.
    async fn webhook_list(
        &self,
        filter: WebhookFilter,
        after: Option<WebhookId>,
        limit: usize,
    ) -> Result<Vec<WebhookView>>;

    /// Returns how many webhooks match, counted up to [`crate::COUNT_LIMIT`].
    async fn webhook_total(&self, filter: WebhookFilter) -> Result<u64>;

    /// Returns how many webhooks are waiting, being sent and failed, each counted up to 100 000.
    async fn webhook_counts(&self) -> Result<Vec<(WebhookState, u64)>>;
}

/// A request for due webhooks.
#[derive(Clone, Debug)]
pub struct WebhookTakeRequest {
    pub node: NodeId,
    pub limit: usize,
    /// Limit per host.
    pub per_host: usize,
    /// Hosts that may receive fewer webhooks now, with their number, which may be 0.
    pub host_capacities: Vec<(String, usize)>,
    /// Number of attempts allowed. A webhook whose senders die gets up to `EXTRA_ATTEMPTS` more.
    pub allowed: u32,
    /// How long the sender has to report the outcome; then another attempt starts.
    pub lease_ms: i64,
}

#[derive(Clone, Debug, Default)]
pub struct WebhookTaken {
    pub deliveries: Vec<Delivery>,
    /// When the next webhook is due.
    pub next_at: Option<Timestamp>,
}

/// One attempt that a sender has taken.
#[derive(Clone, Debug)]
pub struct Delivery {
    pub id: WebhookId,
    pub subject: WebhookSubject,
    /// Event type, for the header `X-Webhook-Event`.
    pub event: String,
    pub correlation_id: String,
    pub traceparent: Option<String>,
    pub url: String,
    pub host: String,
    pub body: String,
    /// Counts all attempts ever started. Identifies this attempt, so that a late result of an earlier one is ignored.
    pub number: u32,
    /// Counts the attempts since the last manual redelivery.
    pub attempt: u32,
}

/// Outcome of an attempt.
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
    pub task: Option<TaskId>,
    /// With its port.
    pub host: Option<String>,
}

/// Number of attempts of a webhook that are kept: the newest ones. There is a limit because callers may redeliver a
/// webhook any number of times.
pub const KEPT_ATTEMPTS: u32 = 100;

/// Number of attempts without an outcome that are repeated in addition to the allowed attempts.
pub const EXTRA_ATTEMPTS: u32 = 3;

pub const LOST: &str = "no outcome was reported; it may have been delivered";

/// What happens when the lease of an attempt has ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum AfterLoss {
    SendAgain,
    Abandon,
}

impl AfterLoss {
    /// Decides by the attempts since the last redelivery, `lost` of them without an outcome.
    pub fn of(attempts: u32, lost: u32, allowed: u32) -> AfterLoss {
        if attempts >= allowed && lost > EXTRA_ATTEMPTS { AfterLoss::Abandon } else { AfterLoss::SendAgain }
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
    /// Returns the entry in the job's log.
    pub(crate) fn log_line(&self, url: &str) -> LogLine {
        let url = without_query(url);
        let outcome = match (self.status, &self.error) {
            (_, Some(error)) => error.clone(),
            (Some(status), None) => format!("HTTP {status}"),
            (None, None) => String::new(),
        };
        let (event, next) = match self.next {
            WebhookNext::Delivered => (LogEvent::WebhookSent, AfterAttempt::Delivered { took_ms: self.took_ms }),
            WebhookNext::Again { due_at } => (LogEvent::WebhookFailed, AfterAttempt::Again { at: due_at }),
            WebhookNext::Failed => (LogEvent::WebhookFailed, AfterAttempt::Abandoned),
        };
        let (attempt, attempts) = (self.attempt, self.allowed);
        let details = LogDetails::Webhook { url, outcome: &outcome, attempt, attempts, next };
        LogLine::new(self.at, event, details.to_string())
    }
}

/// Returns the entry in the log of a job whose webhook was lost too often.
pub(crate) fn lost_line(url: &str, at: Timestamp) -> LogLine {
    LogLine::new(at, LogEvent::WebhookFailed, format!("{}: {LOST}; abandoned", without_query(url)))
}

/// Returns a URL without its query and fragment, which may contain a token.
pub fn without_query(url: &str) -> &str {
    url.split(['?', '#']).next().unwrap_or(url)
}

/// How a job ended, from its row in `done` or `ended`.
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
    pub subject: WebhookSubject,
    pub event: String,
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
            subject: WebhookSubject::Job(ended.id),
            event: JOB_STATUS.to_owned(),
            correlation: ended.correlation.unwrap_or_else(|| ended.id.to_string()),
            traceparent: options.traceparent.clone(),
            host: host_of(&url),
            body: serde_json::to_string(&body).map_err(|e| StoreError::Internal(Cause::new("a webhook's body", e)))?,
            url,
            created_at: ended.finished_at,
        })
    }
}

pub(crate) fn raw(text: String) -> Result<Box<RawValue>> {
    RawValue::from_string(text).map_err(|e| StoreError::Internal(Cause::new("stored JSON", e)))
}

/// Returns host and port. Empty if the URL is not valid; the sender reports that.
pub fn host_of(url: &str) -> String {
    let host = |url: url::Url| Some(format!("{}:{}", url.host_str()?, url.port_or_known_default()?));
    url::Url::parse(url).ok().and_then(host).unwrap_or_default()
}

pub(crate) fn redeliver_audit(
    id: WebhookId,
    subject: WebhookSubject,
    url: &str,
    was: WebhookState,
    by: &str,
) -> AuditEntry {
    let about = if subject.job().is_some() { "jobId" } else { "taskId" };
    AuditEntry {
        actor: by.into(),
        action: "webhook.redeliver".into(),
        target: id.to_string(),
        details: serde_json::json!({about: subject.id(), "url": without_query(url), "was": was}),
        count: 1,
    }
}

pub(crate) fn unsettled(id: WebhookId, state: WebhookState) -> StoreError {
    StoreError::Conflict {
        message: format!("webhook {id} is {} and will be sent anyway", state.as_str()),
        existing_job: None,
    }
}

pub(crate) fn state_of(code: i16) -> Result<WebhookState> {
    WebhookState::from_code(code).ok_or_else(|| StoreError::Internal(format!("webhook state {code} is unknown").into()))
}

/// Maximum number of webhooks that are counted per state.
pub(crate) const COUNTED: i64 = 100_000;

/// The states that are counted. Delivered webhooks are the great majority, and are not counted.
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
    fn a_webhook_whose_senders_keep_dying_fails_after_a_few_extra_attempts() {
        assert_eq!(AfterLoss::of(1, 1, 3), AfterLoss::SendAgain);
        assert_eq!(AfterLoss::of(3, 1, 3), AfterLoss::SendAgain);
        assert_eq!(AfterLoss::of(5, 3, 3), AfterLoss::SendAgain);
        assert_eq!(AfterLoss::of(6, 4, 3), AfterLoss::Abandon);
        assert_eq!(AfterLoss::of(4, 4, 12), AfterLoss::SendAgain);
    }
}
