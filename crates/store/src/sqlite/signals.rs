//! Collects the signals of a transaction, which are sent after its commit.

use std::collections::HashSet;

use tokio::sync::broadcast;

use super::Shared;
use crate::{QueueChange, Signal};

/// Signals to send after the commit, each once, in order.
#[derive(Default)]
pub struct Signals {
    pub all: Vec<Signal>,
    known: HashSet<Signal>,
    pub queue_changes: Vec<QueueChange>,
}

impl Signals {
    pub fn add(&mut self, signal: Signal) {
        match signal {
            // Only the earliest of several due times is sent.
            Signal::TaskDue(_) => {
                signal.add_to(&mut self.all);
            }
            _ => {
                if self.known.insert(signal) {
                    self.all.push(signal);
                }
            }
        }
    }

    /// Returns the current position, for [`Signals::truncate`].
    pub fn position(&self) -> (usize, usize) {
        (self.all.len(), self.queue_changes.len())
    }

    /// Removes everything that was added after a position.
    pub fn truncate(&mut self, (signals, queue_changes): (usize, usize)) {
        for signal in self.all.drain(signals..) {
            self.known.remove(&signal);
        }
        self.queue_changes.truncate(queue_changes);
    }

    /// Sends everything, after the commit: first to the external queue, then to the subscribers of the signals.
    pub fn send(self, shared: &Shared, signals: &broadcast::Sender<Signal>) {
        shared.queue_feed.add(self.queue_changes);
        for signal in self.all {
            let _ = signals.send(signal);
        }
    }
}
