//! Checks the queue in Redis, if jobs are dispatched from one.

use std::time::Duration;

use faena_queue::{QueueError, RedisQueue, RedisQueueOptions};
use faena_store::doctor::{Finding, Severity};

use super::finding;
use crate::config::Config;

const TIMEOUT: Duration = Duration::from_secs(3);

pub async fn check(config: &Config) -> Vec<Finding> {
    let Some(configured) = config.redis_queue() else { return Vec::new() };
    let queue = RedisQueue::new(RedisQueueOptions {
        address: configured.address,
        prefix: configured.prefix,
        timeout: TIMEOUT,
        round_trip: Box::new(|_| ()),
    });
    match queue.stats(&[]).await {
        Ok(_) => check_server(&queue).await.into_iter().collect(),
        Err(error) => {
            let mut findings = vec![describe(&error, configured.fallback)];
            findings.extend(check_server(&queue).await);
            findings
        }
    }
}

fn describe(error: &QueueError, fallback: bool) -> Finding {
    const FILL: &str =
        "start the server, or wait for one interval of its guardian: it fills the queue from the database";
    const START: &str =
        "start Redis or correct queue.redis_url; with queue.fallback = true the database dispatches meanwhile";
    let (code, severity, advice) = match error {
        QueueError::Unavailable { .. } if fallback => ("redis-unavailable", Severity::Warning, START),
        QueueError::Unavailable { .. } => ("redis-unavailable", Severity::Error, START),
        QueueError::NotFilled => ("redis-not-filled", Severity::Warning, FILL),
        QueueError::NewerFormat { .. } => {
            ("redis-format", Severity::Error, "update this Faena, or set another queue.prefix")
        }
        QueueError::ForeignKey { .. } => {
            ("redis-foreign-key", Severity::Error, "set a queue.prefix that no other program uses")
        }
        QueueError::Rejected { .. } => {
            ("redis-rejected", Severity::Error, "allow the user of queue.redis_url the commands that the guide lists")
        }
    };
    finding(code, severity, error.to_string(), advice)
}

/// Redis must not drop entries by itself. What it drops is restored, but jobs wait until then.
async fn check_server(queue: &RedisQueue) -> Option<Finding> {
    let info = queue.info().await.ok()?;
    let policy = info.eviction_policy.filter(|policy| policy != "noeviction")?;
    let text =
        format!("{} at {} may drop entries of the queue: maxmemory-policy is {policy}", info.version, queue.address());
    Some(finding("redis-eviction", Severity::Warning, text, "set maxmemory-policy to noeviction"))
}
