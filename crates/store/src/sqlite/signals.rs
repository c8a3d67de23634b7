//! What a transaction announces after its commit.

use std::collections::HashSet;

use tokio::sync::broadcast;

use super::Shared;
use crate::{QueueChange, Signal};

/// Signals to send after the commit, each once, in order.
#[derive(Default)]
pub struct Signals {
    pub all: Vec<Signal>,
    known: HashSet<Signal>,
    /// If a call is undone, its changes stay: another queue finds that the rows do not agree.
    pub queue_changes: Vec<QueueChange>,
}

impl Signals {
    pub fn add(&mut self, signal: Signal) {
        match signal {
            // Of several due times only the earliest is sent.
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

    pub fn truncate(&mut self, len: usize) {
        for signal in self.all.drain(len..) {
            self.known.remove(&signal);
        }
    }

    /// Sends everything, after the commit. Another queue learns of jobs before those that wait for them.
    pub fn send(self, shared: &Shared, signals: &broadcast::Sender<Signal>) {
        shared.queue_feed.add(self.queue_changes);
        for signal in self.all {
            let _ = signals.send(signal);
        }
    }
}
