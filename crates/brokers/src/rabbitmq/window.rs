//! The messages of one call: those sent and not yet confirmed, and the broker's replies so far.
//!
//! A message that no queue accepts is returned *and* acknowledged. The client library attaches the returned message to
//! whichever acknowledgement it handles next; if the broker acknowledges several messages together, that can be the
//! acknowledgement of another message. So this module matches returned messages by their `message_id`, after all
//! confirmations.

use std::collections::{HashMap, VecDeque};

use futures_util::FutureExt;
use lapin::{Confirmation, PublisherConfirm};

use super::protocol_error;
use crate::{Message, PublishOutcome};

#[derive(Default)]
pub(super) struct Window {
    unconfirmed: VecDeque<(usize, PublisherConfirm)>,
    replies: Vec<(usize, BrokerReply)>,
    /// Ids of returned messages, with the reason.
    returned: HashMap<String, String>,
    /// The error that broke the channel.
    pub(super) channel_error: Option<lapin::Error>,
}

enum BrokerReply {
    Ack,
    Nack,
}

impl Window {
    pub(super) fn push(&mut self, index: usize, confirm: PublisherConfirm) {
        self.unconfirmed.push_back((index, confirm));
    }

    pub(super) fn unconfirmed(&self) -> usize {
        self.unconfirmed.len()
    }

    /// Waits for the oldest confirmation. Dropping the future leaves the message unconfirmed.
    pub(super) async fn wait_for_oldest(&mut self) {
        let Some((index, confirm)) = self.unconfirmed.front_mut() else { return };
        let (index, result) = (*index, confirm.await);
        self.unconfirmed.pop_front();
        self.record(index, result);
    }

    /// Records the confirmations that have arrived, without waiting. Drops the others: the outcome of their messages
    /// stays unknown.
    pub(super) fn collect_arrived(&mut self) {
        while let Some((index, confirm)) = self.unconfirmed.pop_front() {
            if let Some(result) = confirm.now_or_never() {
                self.record(index, result);
            }
        }
    }

    /// Records why the channel broke, preferring the broker's reason over a mere "channel closed".
    pub(super) fn record_channel_error(&mut self, error: lapin::Error) {
        if self.channel_error.as_ref().is_none_or(|known| protocol_error(known).is_none()) {
            self.channel_error = Some(error);
        }
    }

    fn record(&mut self, index: usize, result: lapin::Result<Confirmation>) {
        let (reply, returned) = match result {
            Ok(Confirmation::Ack(returned)) => (BrokerReply::Ack, returned),
            Ok(Confirmation::Nack(returned)) => (BrokerReply::Nack, returned),
            Ok(Confirmation::NotRequested) => return,
            Err(error) => return self.record_channel_error(error),
        };
        if let Some(returned) = returned
            && let Some(id) = returned.delivery.properties.message_id()
        {
            let reason = format!("no queue is bound for routing key {:?}", returned.delivery.routing_key.as_str());
            self.returned.insert(id.to_string(), reason);
        }
        self.replies.push((index, reply));
    }

    /// Writes the outcome of every message that the broker replied to.
    pub(super) fn write_outcomes(&self, messages: &[Message], outcomes: &mut [Option<PublishOutcome>]) {
        for (index, reply) in &self.replies {
            let outcome = match (self.returned.get(&messages[*index].id), reply) {
                (Some(reason), _) => PublishOutcome::Rejected(reason.clone()),
                (None, BrokerReply::Nack) => {
                    PublishOutcome::Rejected("the broker negatively acknowledged the message (nack)".into())
                }
                (None, BrokerReply::Ack) => PublishOutcome::Confirmed,
            };
            outcomes[*index] = Some(outcome);
        }
    }
}
