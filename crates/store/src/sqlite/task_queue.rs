//! Inputs for tasks that wait for the writer. The first call that the writer runs applies all of them together.
//!
//! A savepoint copies every page that is changed in it. One savepoint per input costs as much as a third of its writes (20 of
//! 60 us in a bare loop with the same statements outside of Faena), so all waiting inputs share one. If they cannot be applied
//! together, each gets its own.

use std::sync::atomic::{AtomicU64, Ordering};

use faena_domain::Timestamp;
use parking_lot::Mutex;
use tokio::sync::oneshot;

use super::{Sqlite, tasks, writer::Tx};
use crate::{Result, StoreError, TaskAnswer, TaskInput};

/// Maximum number of calls that are applied together.
const MAX_GROUP_CALLS: usize = 512;

/// Inputs of one caller, with its time.
pub type TimedInputs = (Vec<TaskInput>, Timestamp);

type Answers = Vec<Option<TaskAnswer>>;

/// The calls in the order of their arrival. The writer has a wake-up for each of them.
#[derive(Default)]
pub struct TaskQueue {
    waiting: Mutex<Vec<WaitingCall>>,
    next_number: AtomicU64,
}

struct WaitingCall {
    number: u64,
    inputs: TimedInputs,
    sender: oneshot::Sender<Result<Answers>>,
}

impl Sqlite {
    /// Applies inputs, together with those of other callers.
    pub(super) async fn apply_queued(&self, inputs: Vec<TaskInput>, now: Timestamp) -> Result<Answers> {
        let (sender, receiver) = oneshot::channel();
        let shared = self.shared.clone();
        let number = self.shared.task_queue.next_number.fetch_add(1, Ordering::Relaxed);
        let call = WaitingCall { number, inputs: (inputs, now), sender };
        let push = || self.shared.task_queue.waiting.lock().push(call);
        let applied = async {
            self.writer.wake(push, move |tx| shared.task_queue.run(tx, number)).await?;
            receiver.await.map_err(|_| lost())?
        };
        self.writer.with_timeout(applied).await
    }
}

impl TaskQueue {
    /// Applies the waiting inputs. The callers get their answers after the commit. Fails if the transaction is lost.
    ///
    /// `number` identifies the call that woke the writer. If the transaction was lost before, only this call fails: the
    /// other calls wake the writer in a later transaction.
    fn run(&self, tx: Option<&Tx>, number: u64) -> Result<()> {
        let Some(tx) = tx else {
            let mut waiting = self.waiting.lock();
            if let Some(position) = waiting.iter().position(|call| call.number == number) {
                let _ = waiting.remove(position).sender.send(Err(lost()));
            }
            return Ok(());
        };
        let (calls, senders): (Vec<TimedInputs>, Vec<_>) = {
            let mut waiting = self.waiting.lock();
            let count = waiting.len().min(MAX_GROUP_CALLS);
            waiting.drain(..count).map(|call| (call.inputs, call.sender)).unzip()
        };
        if calls.is_empty() {
            return Ok(());
        }
        let mut results = match tx.attempt(|tx| tasks::apply_to(tx, &calls, None))? {
            Ok((answers, _)) => {
                let mut answers = answers.into_iter();
                calls.iter().map(|(inputs, _)| Ok(answers.by_ref().take(inputs.len()).collect())).collect()
            }
            Err(error) if calls.len() == 1 => vec![Err(error)],
            Err(_) => apply_each(tx, &calls)?,
        }
        .into_iter();
        for sender in senders {
            let result: Result<Answers> = results.next().unwrap_or_else(|| Err(lost()));
            tx.answer(move |commit| {
                let result = commit.map_err(StoreError::Unavailable).and(result);
                // The caller may no longer wait; its work is committed anyway.
                let _ = sender.send(result);
            });
        }
        Ok(())
    }
}

fn lost() -> StoreError {
    StoreError::Unavailable("the transaction was rolled back".into())
}

/// Applies the inputs of each call alone, so that none fails because of another.
fn apply_each(tx: &Tx, calls: &[TimedInputs]) -> Result<Vec<Result<Answers>>> {
    let apply =
        |call| tx.attempt(|tx| tasks::apply_to(tx, std::slice::from_ref(call), None).map(|(answers, _)| answers));
    calls.iter().map(apply).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lost_transaction_fails_only_the_calls_that_were_in_it() {
        let queue = TaskQueue::default();
        let push = |number| {
            let (sender, receiver) = oneshot::channel();
            queue.waiting.lock().push(WaitingCall { number, inputs: (Vec::new(), Timestamp::from_ms(0)), sender });
            receiver
        };
        let (mut lost, mut waiting) = (push(1), push(2));
        queue.run(None, 1).expect("the wake-up of a lost transaction does nothing");
        assert!(matches!(lost.try_recv(), Ok(Err(StoreError::Unavailable(_)))));
        assert!(waiting.try_recv().is_err(), "its own wake-up applies it");
        queue.run(None, 1).expect("the call is already answered");
        assert_eq!(queue.waiting.lock().len(), 1);
    }
}
