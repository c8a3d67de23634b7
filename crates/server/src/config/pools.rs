//! `[[pool]]`: worker processes that the server starts and supervises.

use std::{collections::BTreeMap, time::Duration};

use faena_domain::parse_duration;
use faena_engine::PoolConfig;
use serde::Deserialize;

use super::{
    ConfigError,
    file::{Entry, Located, Problem, problem},
    names::{is_name, is_type_or_queue},
};

pub const EXAMPLE: &str = "
# Worker processes that the server starts, restarts and scales. Repeat the section for more pools.
# Each process connects to FAENA_URL as the worker FAENA_WORKER_ID with FAENA_SESSION_TOKEN (see docs/guides/workers.md).
#[[pool]]
#name = \"python\"
#command = [\"python3\", \"worker.py\"]
# Job types the processes run, and queues they take jobs from (empty: all queues).
#capabilities = [\"greet\"]
#queues = []
# Jobs that one process runs concurrently.
#concurrency = 1
# Number of processes: Faena starts more while jobs wait and stops a process after `idle` without work.
#min = 1
#max = 4
#idle = \"60s\"
# true: start one process per job.
#ephemeral = false
# Additional environment variables, and the working directory.
#env = {}
#cwd = \".\"
";

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Pool {
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

pub const MAX_POOLS: usize = 1_000;
const MAX_PROCESSES: usize = 1_000;

pub fn read(entries: &[Entry<'_, '_>]) -> Result<Vec<Located<PoolConfig>>, ConfigError> {
    let mut pools: Vec<Located<PoolConfig>> = Vec::new();
    for entry in entries {
        let pool = into_config(entry.read()?).map_err(|problem| entry.error(problem))?;
        if pools.iter().any(|known| known.value.name == pool.name) {
            return Err(entry.error(problem("name", format!("duplicate pool name {:?}", pool.name))));
        }
        pools.push(entry.located(pool));
    }
    Ok(pools)
}

fn into_config(entry: Pool) -> Result<PoolConfig, Problem> {
    let idle = match &entry.idle {
        None => Duration::from_secs(60),
        Some(text) => parse_duration(text)
            .ok_or_else(|| problem("idle", format!("{text:?} is not a duration like 500ms, 30s, 5m")))?,
    };
    let min = if entry.ephemeral { 0 } else { entry.min.unwrap_or(1.min(entry.max)) };
    if !is_name(&entry.name, 100) {
        return Err(problem("name", "must have 1 to 100 visible characters, without spaces at its beginning or end"));
    }
    if entry.command.first().is_none_or(String::is_empty) {
        return Err(problem("command", "must name a program, like [\"python3\", \"worker.py\"]"));
    }
    if entry.capabilities.is_empty() || entry.capabilities.iter().any(|name| !is_type_or_queue(name)) {
        return Err(problem("capabilities", "must name at least one job type, each with 1 to 100 visible characters"));
    }
    if entry.queues.iter().any(|name| !is_type_or_queue(name)) {
        return Err(problem("queues", "must name queues, each with 1 to 100 visible characters"));
    }
    if let Some(name) = entry.env.keys().find(|name| name.is_empty() || name.contains(['=', '\0'])) {
        return Err(problem("env", format!("{name:?} cannot be the name of a variable")));
    }
    if entry.cwd.as_deref().is_some_and(str::is_empty) {
        return Err(problem("cwd", "must name a folder"));
    }
    if !(1..=MAX_PROCESSES).contains(&entry.max) {
        return Err(problem("max", format!("must be between 1 and {MAX_PROCESSES}, got {}", entry.max)));
    }
    if min > entry.max {
        return Err(problem("min", format!("must be at most max ({}), is {min}", entry.max)));
    }
    if !(1..=10_000).contains(&entry.concurrency) {
        return Err(problem("concurrency", format!("must be between 1 and 10000, got {}", entry.concurrency)));
    }
    if entry.ephemeral && entry.concurrency != 1 {
        return Err(problem("concurrency", "must be 1, because an ephemeral process runs one job"));
    }
    if entry.ephemeral && entry.min.is_some_and(|min| min > 0) {
        return Err(problem("min", "must be 0, because an ephemeral pool has no process without a job"));
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
    use crate::config::file::File;

    fn error(text: &str) -> String {
        let file = File::new("faena.toml", text);
        let (_, value) = file.sections().expect("valid TOML").remove(0);
        let result = Entry::list(&file, "pool", value, MAX_POOLS).and_then(|entries| read(&entries));
        result.err().expect("rejected").to_string()
    }

    #[test]
    fn an_invalid_pool_is_rejected_with_its_line_and_key() {
        let good = "name = \"a\"\ncommand = [\"x\"]\ncapabilities = [\"t\"]\n";
        assert_eq!(
            error("[pool]\nname = \"a\""),
            "faena.toml, line 1: pool must be written [[pool]], with two brackets"
        );
        assert_eq!(
            error(&format!("[[pool]]\n{good}min = 3\nmax = 2")),
            "faena.toml, line 5: [[pool]] min: must be at most max (2), is 3"
        );
        assert_eq!(
            error(&format!("[[pool]]\n{good}[[pool]]\n{good}")),
            "faena.toml, line 6: [[pool]] name: duplicate pool name \"a\""
        );
        let unknown = error(&format!("[[pool]]\n{good}sise = 2"));
        assert!(unknown.starts_with("faena.toml, line 5: [[pool]] unknown field `sise`"), "{unknown}");
        for (line, expected) in [
            ("queues = [\"\"]", "line 5: [[pool]] queues: must name queues"),
            ("cwd = \"\"", "line 5: [[pool]] cwd: must name a folder"),
            ("env = { \"a=b\" = \"c\" }", "line 5: [[pool]] env: \"a=b\" cannot be"),
        ] {
            let found = error(&format!("[[pool]]\n{good}{line}"));
            assert!(found.contains(expected), "{found}");
        }
        let empty = error("[[pool]]\nname = \"a\"\ncommand = []\ncapabilities = [\"t\"]");
        assert_eq!(
            empty,
            "faena.toml, line 3: [[pool]] command: must name a program, like [\"python3\", \"worker.py\"]"
        );
    }
}
