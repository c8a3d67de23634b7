//! `[queue]`: where jobs are dispatched from.

use faena_engine::RedisQueueConfig;
use faena_queue::{DEFAULT_PREFIX, RedisAddress, is_valid_prefix};

use super::{
    Config,
    keys::{Key, Kind},
};

pub const BACKEND: Key = Key {
    path: "queue.backend",
    env: "FAENA_QUEUE_BACKEND",
    kind: Kind::Choice(&["store", "redis"]),
    default: "store",
    doc: "Where jobs are dispatched from: the database, or a queue in Redis that is filled from it.",
};

pub const REDIS_URL: Key = Key {
    path: "queue.redis_url",
    env: "REDIS_URL",
    kind: Kind::Redis,
    default: "redis://127.0.0.1:6379",
    doc: "Redis of queue.backend = \"redis\": redis://, rediss:// or redis+sentinel://host:26379/master-name.",
};

pub const PREFIX: Key = Key {
    path: "queue.prefix",
    env: "QUEUE_PREFIX",
    kind: Kind::KeyPrefix,
    default: DEFAULT_PREFIX,
    doc: "First part of the names of all keys in Redis; installations that share a Redis need different ones.",
};

pub const FALLBACK: Key = Key {
    path: "queue.fallback",
    env: "FAENA_QUEUE_FALLBACK",
    kind: Kind::Flag,
    default: "false",
    doc: "Whether the database dispatches while Redis is not available, also at the start.",
};

/// Returns what is wrong with an address of Redis.
pub fn check_address(value: &str) -> Result<(), String> {
    value.parse::<RedisAddress>().map(drop).map_err(|error| error.to_string())
}

/// Returns what is wrong with a prefix of keys.
pub fn check_prefix(value: &str) -> Result<(), String> {
    if is_valid_prefix(value) {
        Ok(())
    } else {
        Err("must be 1 to 100 visible ASCII characters without * ? [ ] \\, and braces only around one part of it"
            .into())
    }
}

impl Config {
    /// Returns the queue in Redis, if one is configured.
    pub fn redis_queue(&self) -> Option<RedisQueueConfig> {
        (self.text(BACKEND.path) == "redis").then(|| RedisQueueConfig {
            address: self.text(REDIS_URL.path).parse().expect("checked when it was set"),
            prefix: self.text(PREFIX.path).to_owned(),
            fallback: self.text(FALLBACK.path) == "true",
        })
    }

    /// Finds settings of the queue in Redis that have no effect because the database dispatches.
    pub(super) fn find_unused(&mut self) {
        if self.text(BACKEND.path) == "redis" {
            return;
        }
        for (key, name) in [(REDIS_URL, "REDIS_URL"), (PREFIX, "QUEUE_PREFIX")] {
            if self.settings[key.path].origin.starts_with("environment") {
                self.unused.push((name, "the database dispatches; set queue.backend to redis to use it"));
            }
        }
    }
}
