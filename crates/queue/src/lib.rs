//! The queue in Redis: ready, delayed and running jobs under the key names of the task scheduler service.
//!
//! Redis only dispatches. The database is authoritative: a job that was taken from Redis starts only if its row is still ready, and
//! entries that are missing or wrong in Redis are restored from the database. So every operation may be repeated, and an error in
//! Redis never loses a job.
//!
//! `keys.rs` names the keys, `scripts/` contains one Lua script per move, `client.rs` connects, `redis_queue.rs`
//! contains the operations, and `inspect.rs` reads what `faena doctor` checks.

mod address;
mod client;
mod connection;
mod error;
mod inspect;
mod keys;
mod redis_queue;
mod scripts;

pub use address::{AddressError, RedisAddress};
pub use error::QueueError;
pub use inspect::ServerInfo;
pub use keys::{DEFAULT_PREFIX, is_valid_prefix};
pub use redis_queue::{
    FORMAT, FinishedJob, GrantedJob, LaneTake, Move, Placement, PrepareResult, QueueSet, QueueStats, ReadyEntry,
    RedisQueue, RedisQueueOptions, RunResult, TakeRequest, TakenJob, WorkerEntry,
};
