//! `[[pool]]`: worker processes that this server starts and looks after.

use std::{collections::BTreeMap, time::Duration};

use faena_domain::parse_duration;
use faena_engine::PoolConfig;
use serde::Deserialize;

use super::ConfigError;

pub const EXAMPLE: &str = "
# Worker processes that this server starts, watches, grows, shrinks and restarts; as many sections as you like.
# Each process connects as a worker (see docs/guides/workers.md) to FAENA_URL under the name FAENA_WORKER_ID.
#[[pool]]
#name = \"python\"
#command = [\"python3\", \"worker.py\"]
# The job types it runs, and the queues it takes them from (none: from all).
#capabilities = [\"greet\"]
#queues = []
# Jobs that one process runs at once.
#concurrency = 1
# How many processes there are: more while jobs wait, fewer after `idle` without work.
#min = 1
#max = 4
#idle = \"60s\"
# true: one process per job.
#ephemeral = false
# Further variables of its environment, and its folder.
#env = {}
#cwd = \".\"
";

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    name: String,
    command: Vec<String>,
    capabilities: Vec<String>,
    #[serde(default)]
    queues: Vec<String>,
    #[serde(default = "one")]
    concurrency: u32,
    min: Option<usize>,
    #[serde(default = "one_process")]
    max: usize,
    #[serde(default)]
    ephemeral: bool,
    idle: Option<String>,
    #[serde(default)]
    env: BTreeMap<String, String>,
    cwd: Option<String>,
}

fn one() -> u32 {
    1
}

fn one_process() -> usize {
    1
}

const MOST: usize = 1_000;

pub fn read(content: toml::Value, place: &str) -> Result<Vec<PoolConfig>, ConfigError> {
    let toml::Value::Array(list) = content else {
        return Err(ConfigError(format!("{place}: pool must be written [[pool]], with two brackets")));
    };
    let mut pools: Vec<PoolConfig> = Vec::new();
    for (at, value) in list.into_iter().enumerate() {
        let number = at + 1;
        let wrong = |what: String| ConfigError(format!("{place}, [[pool]] number {number}: {what}"));
        let entry: Entry = value.try_into().map_err(|error: toml::de::Error| wrong(error.message().to_owned()))?;
        let pool = check(entry).map_err(wrong)?;
        if pools.iter().any(|known| known.name == pool.name) {
            return Err(wrong(format!("there is another pool named {:?}", pool.name)));
        }
        pools.push(pool);
    }
    Ok(pools)
}

fn check(entry: Entry) -> Result<PoolConfig, String> {
    let idle = match &entry.idle {
        None => Duration::from_secs(60),
        Some(text) => {
            parse_duration(text).ok_or_else(|| format!("idle: {text:?} must be a duration like 500ms, 30s, 5m"))?
        }
    };
    let min = if entry.ephemeral { 0 } else { entry.min.unwrap_or(1.min(entry.max)) };
    if entry.name.is_empty() || entry.name.len() > 100 {
        return Err("name: must have 1 to 100 characters".into());
    }
    if entry.command.first().is_none_or(String::is_empty) {
        return Err("command: must name a program, like [\"python3\", \"worker.py\"]".into());
    }
    if entry.capabilities.is_empty() || entry.capabilities.iter().any(String::is_empty) {
        return Err("capabilities: must name at least one job type".into());
    }
    if !(1..=MOST).contains(&entry.max) {
        return Err(format!("max: must be from 1 to {MOST}, is {}", entry.max));
    }
    if min > entry.max {
        return Err(format!("min: must not be more than max ({}), is {min}", entry.max));
    }
    if !(1..=10_000).contains(&entry.concurrency) {
        return Err(format!("concurrency: must be from 1 to 10000, is {}", entry.concurrency));
    }
    if entry.ephemeral && entry.concurrency != 1 {
        return Err("concurrency: an ephemeral process runs one job".into());
    }
    if entry.ephemeral && entry.min.is_some_and(|min| min > 0) {
        return Err("min: an ephemeral pool has no process without a job".into());
    }
    Ok(PoolConfig {
        name: entry.name,
        command: entry.command,
        capabilities: entry.capabilities,
        queues: entry.queues,
        concurrency: entry.concurrency,
        min,
        max: entry.max,
        ephemeral: entry.ephemeral,
        idle,
        env: entry.env,
        cwd: entry.cwd,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(text: &str) -> String {
        let table: toml::Table = text.parse().expect("toml");
        read(table["pool"].clone(), "faena.toml").expect_err("refused").to_string()
    }

    #[test]
    fn what_is_wrong_with_a_pool_is_said() {
        let good = "name = \"a\"\ncommand = [\"x\"]\ncapabilities = [\"t\"]\n";
        assert_eq!(error("[pool]\nname = \"a\""), "faena.toml: pool must be written [[pool]], with two brackets");
        assert_eq!(
            error(&format!("[[pool]]\n{good}min = 3\nmax = 2")),
            "faena.toml, [[pool]] number 1: min: must not be more than max (2), is 3"
        );
        assert_eq!(
            error(&format!("[[pool]]\n{good}[[pool]]\n{good}")),
            "faena.toml, [[pool]] number 2: there is another pool named \"a\""
        );
        assert!(error(&format!("[[pool]]\n{good}sise = 2")).contains("unknown field `sise`"));
        assert!(error("[[pool]]\nname = \"a\"\ncommand = []\ncapabilities = [\"t\"]").contains("must name a program"));
    }
}
