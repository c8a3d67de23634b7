//! Operations below `/webhooks`.

use faena_domain::{
    WebhookState, WebhookView,
    parse::schema::{one_of, uuid},
};
use faena_wire::WebhookList;

use crate::openapi::{
    operation::{Operation, Tag},
    requests::filter_text,
};

pub fn list() -> Operation {
    Operation::new(Tag::Webhooks, "listWebhooks", "List webhooks, newest first")
        .query("state", one_of(WebhookState::ALL.map(WebhookState::as_str)), "State of the delivery.")
        .query("jobId", uuid(), "Webhooks of this job.")
        .query("taskId", uuid(), "Webhooks about the approvals of this task.")
        .query("host", filter_text(), "Host of the receiver, with its port.")
        .list::<WebhookList>("A page of webhooks, without bodies.")
}

fn on_webhook(id: &'static str, summary: &'static str) -> Operation {
    Operation::new(Tag::Webhooks, id, summary).path("id", uuid(), "Id of the webhook.")
}

pub fn show() -> Operation {
    on_webhook("getWebhook", "Show a webhook with its body and attempts").ok::<WebhookView>("The webhook.")
}

pub fn redeliver() -> Operation {
    on_webhook("redeliverWebhook", "Redeliver a webhook")
        .ok::<WebhookView>("It is due now.")
        .conflict("Its delivery is still pending.")
}
