//! Inputs for tasks that wait for the writer. The first call that the writer runs applies all of them together.
//!
//! A savepoint copies every page that is changed in it. One savepoint per input costs as much as a third of its writes (20 of
//! 60 us in a bare loop with the same statements outside of Faena), so all waiting inputs share one. If they cannot be applied
//! together, each gets its own.

use faena_domain::Timestamp;
use parking_lot::Mutex;
use tokio::sync::oneshot;

use super::{Sqlite, tasks, writer::Tx};
use crate::{Result, StoreError, TaskAnswer, TaskInput};

/// Number of calls that are applied together.
const MAX_GROUP_CALLS: usize = 512;

/// Inputs of one caller, with its time.
pub type TimedInputs = (Vec<TaskInput>, Timestamp);

type Answers = Vec<Option<TaskAnswer>>;

/// The calls in the order of their arrival. The writer has a wake-up for each of them.
#[derive(Default)]
pub struct TaskQueue(Mutex<Vec<(TimedInputs, oneshot::Sender<Result<Answers>>)>>);

impl Sqlite {
    /// Applies inputs, together with those of other callers.
    pub(super) async fn apply_queued(&self, inputs: Vec<TaskInput>, now: Timestamp) -> Result<Answers> {
        let (sender, receiver) = oneshot::channel();
        let shared = self.shared.clone();
        let push = || self.shared.task_queue.0.lock().push(((inputs, now), sender));
        let applied = async {
            self.writer.wake(push, move |tx| shared.task_queue.run(tx)).await?;
            receiver.await.map_err(|_| lost())?
        };
        self.writer.with_timeout(applied).await
    }
}

impl TaskQueue {
    /// Applies the waiting inputs. The callers get their answers after the commit. Fails if the transaction is lost.
    fn run(&self, tx: Option<&Tx>) -> Result<()> {
        let (calls, senders): (Vec<TimedInputs>, Vec<_>) = {
            let mut waiting = self.0.lock();
            let count = waiting.len().min(MAX_GROUP_CALLS);
            waiting.drain(..count).unzip()
        };
        let Some(tx) = tx.filter(|_| !calls.is_empty()) else {
            for sender in senders {
                let _ = sender.send(Err(lost()));
            }
            return Ok(());
        };
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
