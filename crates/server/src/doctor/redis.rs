//! Checks the queue in Redis, if jobs are dispatched from one.

use std::{collections::HashSet, time::Duration};

use faena_queue::{FORMAT, QueueError, QueueSet, RedisQueue, RedisQueueOptions};
use faena_store::doctor::{Finding, QueueEntries, Severity, queue_entries};

use super::{finding, number};
use crate::config::Config;

const TIMEOUT: Duration = Duration::from_secs(3);
/// Number of comparisons. A server may change the database and Redis while they are read, so only differences that
/// every comparison finds are reported.
const COMPARISONS: usize = 3;
const PAUSE: Duration = Duration::from_millis(500);
/// Entries per round trip.
const PAGE: usize = 1_000;
/// Most entries or keys that a finding names.
const EXAMPLES: usize = 5;
const FILL: &str = "start the server, or wait for one guardian.interval: it fills the queue from the database";

pub async fn check(config: &Config) -> Vec<Finding> {
    let Some(configured) = config.redis_queue() else { return Vec::new() };
    let queue = RedisQueue::new(RedisQueueOptions {
        address: configured.address,
        prefix: configured.prefix,
        timeout: TIMEOUT,
        round_trip: Box::new(|_| ()),
    });
    let mut findings = match check_queue(&queue, config.text("database.url")).await {
        Ok(findings) => findings,
        Err(error) => vec![describe(&error, configured.fallback)],
    };
    findings.extend(check_keys(&queue).await);
    findings.extend(check_server(&queue).await);
    findings
}

fn describe(error: &QueueError, fallback: bool) -> Finding {
    const START: &str =
        "start Redis or correct queue.redis_url; with queue.fallback = true the database dispatches meanwhile";
    let (code, severity, advice) = match error {
        QueueError::Unavailable { .. } if fallback => ("redis-unavailable", Severity::Warning, START),
        QueueError::Unavailable { .. } => ("redis-unavailable", Severity::Error, START),
        QueueError::NotFilled => ("redis-not-filled", Severity::Warning, FILL),
        QueueError::NewerFormat { .. } => {
            ("redis-format", Severity::Error, "use a newer version of faena, or set another queue.prefix")
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

/// Checks the format of the data, and compares the entries with the database.
async fn check_queue(queue: &RedisQueue, url: &str) -> Result<Vec<Finding>, QueueError> {
    match queue.format().await? {
        None => return Err(QueueError::NotFilled),
        Some(found) if found > FORMAT => return Err(QueueError::NewerFormat { found, known: FORMAT }),
        Some(found) if found < FORMAT => {
            let text =
                format!("the queue in Redis has the older format {found}, but this version of faena uses {FORMAT}");
            let advice =
                "stop servers of older versions and start this one: it fills the queue again from the database";
            return Ok(vec![finding("redis-format", Severity::Warning, text, advice)]);
        }
        Some(_) => {}
    }
    let mut differences: Option<Differences> = None;
    for comparison in 0..COMPARISONS {
        if comparison > 0 {
            tokio::time::sleep(PAUSE).await;
        }
        // A database that cannot be read is reported already.
        let Ok(stored) = queue_entries(url).await else { return Ok(Vec::new()) };
        if stored.is_truncated {
            return Ok(Vec::new());
        }
        let found = Differences::find(&stored, queue).await?;
        let lasting = match differences {
            Some(before) => before.lasting(&found),
            None => found,
        };
        if lasting.missing.is_empty() && lasting.extra.is_empty() {
            return Ok(Vec::new());
        }
        differences = Some(lasting);
    }
    Ok(differences.map(|lasting| lasting.findings()).unwrap_or_default())
}

/// An entry: the end of the name of its key, and the member.
type Entry = (String, String);

/// What differs between the database and Redis.
#[derive(Default)]
struct Differences {
    missing: HashSet<Entry>,
    extra: HashSet<Entry>,
}

impl Differences {
    async fn find(stored: &QueueEntries, queue: &RedisQueue) -> Result<Differences, QueueError> {
        // Fails if a key has a value of another type.
        queue.stats(&stored.lanes).await?;
        let in_flight: HashSet<String> = queue.in_flight().await?.into_iter().collect();
        let mut found: HashSet<Entry> = HashSet::new();
        add_members(queue, QueueSet::Priority, "queue:priority", &mut found).await?;
        add_members(queue, QueueSet::Delayed, "queue:delayed", &mut found).await?;
        for lane in &stored.lanes {
            add_members(queue, QueueSet::Lane(*lane), &lane_name(*lane), &mut found).await?;
        }
        let mut expected: HashSet<Entry> = HashSet::new();
        for (id, lane) in &stored.ready {
            expected.insert(("queue:priority".into(), id.to_string()));
            expected.insert((lane_name(*lane), id.to_string()));
        }
        expected.extend(stored.delayed.iter().map(|id| ("queue:delayed".into(), id.to_string())));
        let is_missing = |entry: &&Entry| !found.contains(*entry) && !in_flight.contains(&entry.1);
        Ok(Differences {
            missing: expected.iter().filter(is_missing).cloned().collect(),
            extra: found.difference(&expected).cloned().collect(),
        })
    }

    /// Returns the differences that were found before and are found again now.
    fn lasting(self, now: &Differences) -> Differences {
        Differences {
            missing: self.missing.intersection(&now.missing).cloned().collect(),
            extra: self.extra.intersection(&now.extra).cloned().collect(),
        }
    }

    fn findings(&self) -> Vec<Finding> {
        const REMOVE: &str = "start the server, or wait for one guardian.interval: it removes them; if they come back, \
                              another program uses the prefix";
        let missing = "missing in the queue in Redis";
        let extra = "in the queue in Redis, but not in the database";
        let all = [("redis-missing", &self.missing, missing, FILL), ("redis-extra", &self.extra, extra, REMOVE)];
        let some = all.into_iter().filter(|(_, entries, ..)| !entries.is_empty());
        some.map(|(code, entries, what, advice)| {
            let jobs: HashSet<&str> = entries.iter().map(|(_, member)| member.as_str()).collect();
            let count = jobs.len() as u64;
            let text = format!("{what}: {} ({})", number(count, "job"), examples(entries));
            Finding { count, ..finding(code, Severity::Warning, text, advice) }
        })
        .collect()
    }
}

fn lane_name(lane: i32) -> String {
    format!("queue:lane:{lane}")
}

async fn add_members(
    queue: &RedisQueue,
    set: QueueSet,
    name: &str,
    found: &mut HashSet<Entry>,
) -> Result<(), QueueError> {
    let mut from = 0;
    loop {
        let page = queue.page(set, from, PAGE).await?;
        from += page.len();
        let is_last = page.len() < PAGE;
        found.extend(page.into_iter().map(|(member, _)| (name.to_owned(), member)));
        if is_last {
            return Ok(());
        }
    }
}

/// Names the first entries. A foreign member may be long.
fn examples(entries: &HashSet<Entry>) -> String {
    let mut names: Vec<String> = entries
        .iter()
        .map(|(set, member)| format!("{} in {set}", member.chars().take(64).collect::<String>()))
        .collect();
    names.sort();
    shorten(names)
}

fn shorten(mut names: Vec<String>) -> String {
    let has_more = names.len() > EXAMPLES;
    names.truncate(EXAMPLES);
    names.join(", ") + if has_more { ", …" } else { "" }
}

/// Finds keys of other programs. A user who may not search for keys gets no finding.
async fn check_keys(queue: &RedisQueue) -> Option<Finding> {
    let unknown = queue.unknown_keys(EXAMPLES + 1).await.ok().filter(|keys| !keys.is_empty())?;
    let text = format!("keys under the prefix of the queue in Redis do not belong to Faena: {}", shorten(unknown));
    Some(finding(
        "redis-foreign-key",
        Severity::Warning,
        text,
        "delete them, or set a queue.prefix that no other program uses",
    ))
}

/// Warns if Redis may evict entries. Faena restores them, but their jobs wait until then.
async fn check_server(queue: &RedisQueue) -> Option<Finding> {
    let info = queue.info().await.ok()?;
    let policy = info.eviction_policy.filter(|policy| policy != "noeviction")?;
    let text =
        format!("{} at {} may drop entries of the queue: maxmemory-policy is {policy}", info.version, queue.address());
    Some(finding("redis-eviction", Severity::Warning, text, "set maxmemory-policy to noeviction"))
}
