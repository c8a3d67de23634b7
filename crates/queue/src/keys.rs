//! Names of the keys in Redis.

/// The prefix that the task scheduler service uses. Programs written for that service find their keys under it.
pub const DEFAULT_PREFIX: &str = "scheduler";

/// Returns whether a text can be the prefix of the keys: 1 to 100 visible ASCII characters without glob characters, and braces only
/// as one hash tag.
pub fn is_valid_prefix(prefix: &str) -> bool {
    let plain = |c: char| c.is_ascii_graphic() && !matches!(c, '*' | '?' | '[' | ']' | '\\' | '{' | '}');
    let rest = match (prefix.find('{'), prefix.find('}')) {
        (None, None) => prefix.to_owned(),
        (Some(open), Some(close)) if open + 1 < close => {
            format!("{}{}{}", &prefix[..open], &prefix[open + 1..close], &prefix[close + 1..])
        }
        _ => return false,
    };
    !rest.is_empty() && prefix.len() <= 100 && rest.chars().all(plain)
}

/// The keys under one prefix. All of them are in one slot of a Redis Cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Keys {
    prefix: String,
}

impl Keys {
    /// Returns the keys under a prefix. In a cluster, a prefix without a hash tag becomes one: the moves change several
    /// keys atomically, which a cluster allows only within one slot.
    pub fn new(prefix: &str, is_cluster: bool) -> Keys {
        let prefix = if is_cluster && !prefix.contains('{') { format!("{{{prefix}}}") } else { prefix.to_owned() };
        Keys { prefix }
    }

    fn of(&self, name: &str) -> String {
        format!("{}:{name}", self.prefix)
    }

    /// Returns the key that contains the format of the data and the time at which the queue was filled from the
    /// database. If this key is absent, the data was lost.
    pub fn meta(&self) -> String {
        self.of("faena")
    }

    /// Returns the key of the ready jobs of all lanes, by score.
    pub fn priority(&self) -> String {
        self.of("queue:priority")
    }

    /// Returns the key of the jobs that wait for a time, by that time.
    pub fn delayed(&self) -> String {
        self.of("queue:delayed")
    }

    /// Returns the key of the failed jobs, by the time of their failure.
    pub fn dead_letters(&self) -> String {
        self.of("queue:dlq")
    }

    /// Returns the key of the jobs in flight with their workers.
    pub fn processing(&self) -> String {
        self.of("processing")
    }

    /// Returns the key of the jobs in flight, by the time until which their entry is valid without asking the database.
    pub fn leases(&self) -> String {
        self.of("processing:lease")
    }

    /// Returns the key of the jobs in flight with their run numbers; 0 until the database has granted one.
    pub fn runs(&self) -> String {
        self.of("processing:run")
    }

    pub fn workers(&self) -> String {
        self.of("workers")
    }

    pub fn processed(&self) -> String {
        self.of("metrics:processed")
    }

    pub fn failed(&self) -> String {
        self.of("metrics:failed")
    }

    /// Returns the key of the ready jobs of one lane, by score.
    pub fn lane(&self, lane: i32) -> String {
        self.of(&format!("queue:lane:{lane}"))
    }

    /// Returns the key of the node that compares Redis with the database.
    pub fn reconciler(&self) -> String {
        self.of("reconciler")
    }

    /// Returns a pattern that matches every key under the prefix. A prefix contains no characters that are special in
    /// patterns.
    pub fn pattern(&self) -> String {
        self.of("*")
    }

    /// Returns whether a key under the prefix belongs to the queue.
    pub fn is_known(&self, key: &str) -> bool {
        let lane = self.of("queue:lane:");
        let others = [self.workers(), self.processed(), self.failed(), self.reconciler()];
        key.strip_prefix(&lane).is_some_and(|number| number.parse::<i32>().is_ok())
            || others.iter().any(|known| known == key)
            || self.script_keys().iter().any(|known| known == key)
    }

    /// Returns the keys that every script receives, in this order. Keys of lanes and counters follow.
    pub fn script_keys(&self) -> Vec<String> {
        vec![
            self.meta(),
            self.priority(),
            self.delayed(),
            self.processing(),
            self.leases(),
            self.runs(),
            self.dead_letters(),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_default_keys_are_those_of_the_task_scheduler_service() {
        let keys = Keys::new(DEFAULT_PREFIX, false);
        assert_eq!(keys.priority(), "scheduler:queue:priority");
        assert_eq!(keys.delayed(), "scheduler:queue:delayed");
        assert_eq!(keys.dead_letters(), "scheduler:queue:dlq");
        assert_eq!(keys.processing(), "scheduler:processing");
        assert_eq!(keys.workers(), "scheduler:workers");
        assert_eq!(keys.processed(), "scheduler:metrics:processed");
        assert_eq!(keys.failed(), "scheduler:metrics:failed");
    }

    #[test]
    fn a_cluster_gets_a_hash_tag_unless_the_prefix_has_one() {
        assert_eq!(Keys::new("scheduler", true).priority(), "{scheduler}:queue:priority");
        assert_eq!(Keys::new("{jobs}:eu", true).priority(), "{jobs}:eu:queue:priority");
    }

    #[test]
    fn only_keys_of_the_queue_are_known() {
        let keys = Keys::new("jobs", false);
        for known in ["jobs:queue:priority", "jobs:queue:lane:12", "jobs:workers", "jobs:metrics:failed", "jobs:faena"]
        {
            assert!(keys.is_known(known), "{known}");
        }
        for unknown in ["jobs:queue:lane:x", "jobs:cache", "jobs", "other:workers", "jobs:eu:workers"] {
            assert!(!keys.is_known(unknown), "{unknown}");
        }
    }

    #[test]
    fn a_prefix_without_a_clear_slot_or_with_a_pattern_is_invalid() {
        for good in ["scheduler", "a:b", "{jobs}", "{jobs}:eu", "x{y}z"] {
            assert!(is_valid_prefix(good), "{good}");
        }
        for bad in ["", "{}", "{", "}", "a}b{", "a b", "a*", "{a}{b}", "ü", &"x".repeat(101)] {
            assert!(!is_valid_prefix(bad), "{bad}");
        }
    }
}
