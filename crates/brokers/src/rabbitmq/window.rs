//! The messages of one call that are on their way.
//!
//! A message that no queue takes is returned *and* acknowledged. The library hangs the returned message on whichever acknowledgement it handles next, which with
//! acknowledgements of many at once is another's. So returned messages are matched by their `message_id`, after everything is settled.

use std::collections::{HashMap, VecDeque};

use futures_util::FutureExt;
use lapin::{Confirmation, PublisherConfirm};

use super::protocol_error;
use crate::{Message, Verdict};

#[derive(Default)]
pub(super) struct Window {
    on_their_way: VecDeque<(usize, PublisherConfirm)>,
    settled: Vec<(usize, Confirmed)>,
    /// The id of a returned message, and the broker's reason.
    returned: HashMap<String, String>,
    pub(super) broken: Option<lapin::Error>,
}

enum Confirmed {
    Ack,
    Nack,
}

impl Window {
    pub(super) fn push(&mut self, index: usize, confirm: PublisherConfirm) {
        self.on_their_way.push_back((index, confirm));
    }

    pub(super) fn len(&self) -> usize {
        self.on_their_way.len()
    }

    /// Waits for the oldest. Dropping the wait leaves it where it was.
    pub(super) async fn settle_one(&mut self) {
        let Some((index, confirm)) = self.on_their_way.front_mut() else { return };
        let (index, outcome) = (*index, confirm.await);
        self.on_their_way.pop_front();
        self.note(index, outcome);
    }

    /// Takes what is known by now, without waiting.
    pub(super) fn settle_known(&mut self) {
        while let Some((index, confirm)) = self.on_their_way.pop_front() {
            if let Some(outcome) = confirm.now_or_never() {
                self.note(index, outcome);
            }
        }
    }

    pub(super) fn break_with(&mut self, error: lapin::Error) {
        // The broker's own words are worth more than the news that the channel is closed, wherever they come up.
        if self.broken.as_ref().is_none_or(|known| protocol_error(known).is_none()) {
            self.broken = Some(error);
        }
    }

    fn note(&mut self, index: usize, outcome: lapin::Result<Confirmation>) {
        let (confirmed, returned) = match outcome {
            Ok(Confirmation::Ack(returned)) => (Confirmed::Ack, returned),
            Ok(Confirmation::Nack(returned)) => (Confirmed::Nack, returned),
            Ok(Confirmation::NotRequested) => return,
            Err(error) => return self.break_with(error),
        };
        if let Some(returned) = returned
            && let Some(id) = returned.delivery.properties.message_id()
        {
            self.returned
                .insert(id.to_string(), format!("no queue is bound for routing key {}", returned.delivery.routing_key));
        }
        self.settled.push((index, confirmed));
    }

    /// Writes down what is known of each message.
    pub(super) fn judge(&self, messages: &[Message], verdicts: &mut [Option<Verdict>]) {
        for (index, confirmed) in &self.settled {
            let verdict = match (self.returned.get(&messages[*index].id), confirmed) {
                (Some(reason), _) => Verdict::Refused(reason.clone()),
                (None, Confirmed::Nack) => Verdict::Refused("the broker refused to take it (nack)".into()),
                (None, Confirmed::Ack) => Verdict::Confirmed,
            };
            verdicts[*index] = Some(verdict);
        }
    }
}
