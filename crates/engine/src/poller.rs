//! Looks once a second for what no signal has told: the fallback that makes every signal dispensable.

use faena_domain::{NodeId, Timestamp};
use faena_store::{Store, StoreError};
use tokio::sync::Notify;

use crate::{Round, dispatcher::ReadyLanes, held::Hands};

pub async fn run_once(
    store: &dyn Store,
    node: NodeId,
    lanes: &ReadyLanes,
    hands: &Hands,
    promoter: &Notify,
    recovery: &Notify,
    now: Timestamp,
) -> Result<Round, StoreError> {
    let poll = store.poll(node, now).await?;
    for lane in &poll.ready_lanes {
        lanes.add(*lane);
    }
    for (id, reason) in &poll.cancels {
        if let Some(held) = hands.find(*id) {
            held.ask_to_stop(reason, now);
        }
    }
    if poll.next_due_at.is_some_and(|at| at <= now) {
        promoter.notify_one();
    }
    if poll.orphans {
        recovery.notify_one();
    }
    Ok(Round::done(0))
}
