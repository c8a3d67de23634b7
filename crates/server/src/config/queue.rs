//! `[queue]`: where jobs are dispatched from.

use faena_engine::RedisQueueConfig;
use faena_queue::{DEFAULT_PREFIX, RedisAddress, is_valid_prefix};

use super::{
    Config,
    keys::{Key, ValueKind},
};

pub const BACKEND: Key = Key {
    path: "queue.backend",
    env: "FAENA_QUEUE_BACKEND",
    kind: ValueKind::Choice(&["store", "redis"]),
    default: "store",
    doc: "Where jobs are dispatched from: the database, or a queue in Redis that is filled from it.",
};

pub const REDIS_URL: Key = Key {
    path: "queue.redis_url",
    env: "REDIS_URL",
    kind: ValueKind::Redis,
    default: "redis://127.0.0.1:6379",
    doc: "Redis of queue.backend = \"redis\": redis://, rediss:// or redis+sentinel://host:26379/master-name.",
};

pub const PREFIX: Key = Key {
    path: "queue.prefix",
    env: "QUEUE_PREFIX",
    kind: ValueKind::KeyPrefix,
    default: DEFAULT_PREFIX,
    doc: "Prefix of all key names in Redis; installations that share a Redis need different ones.",
};

pub const FALLBACK: Key = Key {
    path: "queue.fallback",
    env: "FAENA_QUEUE_FALLBACK",
    kind: ValueKind::Flag,
    default: "false",
    doc: "Whether the database dispatches while Redis is not available, including at startup.",
};

/// Checks an address of Redis. The error says what is wrong with it.
pub fn check_address(value: &str) -> Result<(), String> {
    value.parse::<RedisAddress>().map(drop).map_err(|error| error.to_string())
}

/// Checks a prefix of key names. The error says what is wrong with it.
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

#[cfg(test)]
mod tests {
    use super::*;

    fn load(file: &str) -> Result<Config, String> {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("faena.toml");
        std::fs::write(&path, file).expect("written");
        Config::load((&path, true), [], &[]).map_err(|error| error.to_string())
    }

    #[test]
    fn the_backend_and_settings_of_queues_share_a_file() {
        let file = "[queue]\nbackend = \"redis\"\nprefix = \"jobs\"\n\n[[queues]]\nname = \"mail\"\nconcurrency = 2\n";
        let config = load(file).expect("good");
        assert_eq!(config.redis_queue().map(|queue| queue.prefix).as_deref(), Some("jobs"));
        assert_eq!(config.rules.queues[0].0, "mail");
    }

    #[test]
    fn settings_of_one_queue_in_the_wrong_section_are_rejected_with_a_hint() {
        let hint = "settings of one queue belong to [[queues]]; [queue] says where jobs are dispatched from";
        for (file, line) in [
            ("[[queue]]\nname = \"mail\"\n", 1),
            ("[queue]\nbackend = \"redis\"\n[[queue]]\nname = \"mail\"\n", 3),
            ("[[queue]]\nname = \"mail\"\n[queue]\nbackend = \"redis\"\n", 3),
            ("[queue]\nconcurrency = 3\n", 2),
        ] {
            let error = load(file).err().expect("rejected");
            assert!(error.contains(&format!("line {line}: ")) && error.ends_with(hint), "{file}: {error}");
        }
        let error = load("[queues]\nname = \"mail\"\n").err().expect("rejected");
        assert!(error.ends_with("queues must be written [[queues]], with two brackets"), "{error}");
    }
}
