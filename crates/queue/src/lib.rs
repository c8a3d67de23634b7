//! The queue in Redis: ready, delayed and running jobs under the key names of the task scheduler service.
//!
//! Redis only dispatches. The database is the truth: a job that was taken from here starts only if its row agrees, and whatever
//! is missing or wrong here is restored from the database. So every operation may be repeated, and none may lose more than
//! entries.
//!
//! `keys.rs` names the keys, `scripts/` has one Lua script per move, `client.rs` connects, `redis_queue.rs` has the operations.

mod address;
mod client;
mod connection;
mod error;
mod keys;
mod redis_queue;
mod scripts;

pub use address::{AddressError, RedisAddress};
pub use error::QueueError;
pub use keys::{DEFAULT_PREFIX, is_valid_prefix};
pub use redis_queue::{
    Begun, FORMAT, FinishedJob, GrantedJob, LaneTake, Move, Placement, QueueSet, QueueStats, ReadyEntry, RedisQueue,
    RedisQueueOptions, RunResult, ServerInfo, TakeRequest, TakenJob, WorkerEntry,
};
