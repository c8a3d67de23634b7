//! A webhook: the news of a job's end, on its way to whoever wanted it (SPEC 8).

use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use crate::{JobId, Timestamp, WebhookId};

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "UPPERCASE")]
pub enum WebhookState {
    /// Its time to be sent (again) is set.
    Waiting,
    /// A node is sending it, and has until its due time to tell how that went.
    Sending,
    Delivered,
    /// Every allowed attempt failed. It can be sent again by hand.
    Failed,
}

impl WebhookState {
    pub const ALL: [WebhookState; 4] =
        [WebhookState::Waiting, WebhookState::Sending, WebhookState::Delivered, WebhookState::Failed];

    pub fn is_terminal(self) -> bool {
        matches!(self, WebhookState::Delivered | WebhookState::Failed)
    }

    /// Every legal move. What is over begins again only because a person wants it.
    pub fn can_transition_to(self, next: WebhookState) -> bool {
        use WebhookState::*;
        match self {
            Waiting => next == Sending,
            Sending => matches!(next, Waiting | Delivered | Failed),
            Delivered | Failed => next == Waiting,
        }
    }

    pub fn as_str(self) -> &'static str {
        match self {
            WebhookState::Waiting => "WAITING",
            WebhookState::Sending => "SENDING",
            WebhookState::Delivered => "DELIVERED",
            WebhookState::Failed => "FAILED",
        }
    }

    /// The number by which it is stored.
    pub fn code(self) -> i16 {
        self as i16
    }

    pub fn from_code(code: i16) -> Option<WebhookState> {
        WebhookState::ALL.into_iter().find(|state| state.code() == code)
    }
}

/// One attempt to deliver, as it went.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct WebhookAttempt {
    pub number: u32,
    pub at: Timestamp,
    pub took_ms: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub status: Option<u16>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// The first KiB of what the receiver answered.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub answer: Option<String>,
}

/// What is sent.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
pub struct WebhookBody<'a> {
    pub job_id: JobId,
    pub job_type: &'a str,
    /// `completed`, `failed` or `cancelled`.
    pub status: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub result: Option<&'a RawValue>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<&'a str>,
    pub completed_at: Timestamp,
}

/// As `GET /api/v1/webhooks/:id` shows it; a list shows it without body and history.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct WebhookView {
    pub id: WebhookId,
    pub job_id: JobId,
    pub correlation_id: String,
    pub url: String,
    pub state: WebhookState,
    pub created_at: Timestamp,
    /// When it is sent next, or until when its sender must have told how it went.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub due_at: Option<Timestamp>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub settled_at: Option<Timestamp>,
    /// Why it is not sent although it is due.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub held_back: Option<String>,
    /// Attempts begun so far, those included of which nobody told how they went.
    pub attempts: u32,
    /// To the letter what is sent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub body: Option<Box<RawValue>>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub history: Vec<WebhookAttempt>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn these_moves_are_legal_and_no_others() {
        use WebhookState::*;
        let legal = [
            (Waiting, Sending),
            (Sending, Waiting),
            (Sending, Delivered),
            (Sending, Failed),
            (Delivered, Waiting),
            (Failed, Waiting),
        ];
        for from in WebhookState::ALL {
            for to in WebhookState::ALL {
                assert_eq!(from.can_transition_to(to), legal.contains(&(from, to)), "{from:?} to {to:?}");
            }
        }
    }
}
