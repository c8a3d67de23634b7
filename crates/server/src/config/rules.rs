//! `[[queues]]` and `[[limit]]`: settings of queues, concurrency limits and rates.

use faena_domain::{Fairness, FieldError, Limit, QueueRule, Rate, Scope};
use faena_store::ConfiguredRules;
use serde::Deserialize;

use super::{
    ConfigError,
    file::{Entry, Problem, problem},
};

pub const EXAMPLE: &str = "
# Settings of a queue. Repeat the section for more queues. Changes made at run time take precedence and persist.
#[[queues]]
#name = \"mail\"
# Jobs of the queue that run concurrently on all nodes together, and starts per period.
#concurrency = 10
#rate = \"100/1m\"
# true: a higher priority always goes first. Environment, for several queues: FAENA_QUEUE_STRICT=mail,orders
#strict = false
# \"key\": round robin over concurrency keys; \"none\": the longest waiting job goes first.
#fairness = \"none\"

# A limit for a job type, or for concurrency keys by name or prefix (each key has its own count).
#[[limit]]
#type = \"email.send\"
#concurrency = 5
#[[limit]]
#key = \"tenant-*\"
#concurrency = 2
#rate = \"1000/1h\"
";

/// What to do about a section `[[queue]]`, and about keys of one queue in `[queue]`.
pub const QUEUES_HINT: &str = "settings of one queue belong to [[queues]]; [queue] says where jobs are dispatched from";

/// Returns whether a key of `[queue]` belongs in `[[queues]]`.
pub fn is_key_of_one_queue(path: &str) -> bool {
    ["queue.name", "queue.concurrency", "queue.rate", "queue.fairness"].contains(&path)
}

pub const MAX_RULES: usize = 10_000;
/// Maximum length, in characters, of the queue and the type of a job: a longer name would match no job.
const MAX_QUEUE_OR_TYPE: usize = 100;
/// Maximum length of a concurrency key, in characters.
const MAX_KEY: usize = 255;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct QueueEntry {
    name: String,
    concurrency: Option<u32>,
    rate: Option<String>,
    strict: Option<bool>,
    fairness: Option<Fairness>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct LimitEntry {
    #[serde(rename = "type")]
    kind: Option<String>,
    key: Option<String>,
    concurrency: Option<u32>,
    rate: Option<String>,
}

pub fn read_queues(entries: &[Entry<'_, '_>], into: &mut ConfiguredRules) -> Result<(), ConfigError> {
    for entry in entries {
        add_queue(entry.read()?, into).map_err(|problem| entry.error(problem))?;
    }
    Ok(())
}

pub fn read_limits(entries: &[Entry<'_, '_>], into: &mut ConfiguredRules) -> Result<(), ConfigError> {
    for entry in entries {
        add_limit(entry.read()?, into).map_err(|problem| entry.error(problem))?;
    }
    Ok(())
}

fn add_queue(entry: QueueEntry, into: &mut ConfiguredRules) -> Result<(), Problem> {
    check_name("name", &entry.name, MAX_QUEUE_OR_TYPE)?;
    if into.queues.iter().any(|(known, _)| *known == entry.name) {
        return Err(problem("name", format!("another section configures the queue {:?}", entry.name)));
    }
    put(Scope::Queue(entry.name.clone()), parse_limit(entry.concurrency, entry.rate)?, into)?;
    let rule = QueueRule { strict: entry.strict, fairness: entry.fairness, paused: None };
    into.queues.push((entry.name, rule));
    Ok(())
}

fn add_limit(entry: LimitEntry, into: &mut ConfiguredRules) -> Result<(), Problem> {
    let scope = match (entry.kind, entry.key) {
        (Some(kind), None) => {
            check_name("type", &kind, MAX_QUEUE_OR_TYPE)?;
            Scope::Type(kind)
        }
        (None, Some(key)) => {
            check_name("key", &key, MAX_KEY)?;
            Scope::Key(key)
        }
        _ => return Err(problem("type", "set either type or key; for a queue use [[queues]]")),
    };
    let limit = parse_limit(entry.concurrency, entry.rate)?;
    if limit.is_none() {
        return Err(problem("concurrency", "set concurrency, rate or both"));
    }
    put(scope, limit, into)
}

fn put(scope: Scope, limit: Limit, into: &mut ConfiguredRules) -> Result<(), Problem> {
    if into.limits.iter().any(|(known, _)| *known == scope) {
        return Err(problem("type", format!("{scope} already has a limit")));
    }
    if !limit.is_none() {
        into.limits.push((scope, limit));
    }
    Ok(())
}

fn parse_limit(concurrency: Option<u32>, rate: Option<String>) -> Result<Limit, Problem> {
    let rate = match rate {
        Some(text) => {
            let rate = Rate::parse(&text).ok_or_else(|| problem("rate", format!("{text:?} is not a rate like 100/1m")));
            Some(rate?)
        }
        None => None,
    };
    let limit = Limit { concurrency, rate };
    let mut errors: Vec<FieldError> = Vec::new();
    limit.check(&mut errors);
    match errors.into_iter().next() {
        Some(error) => Err(problem(error.path, error.message)),
        None => Ok(limit),
    }
}

fn check_name(path: &str, value: &str, max: usize) -> Result<(), Problem> {
    if value.is_empty() || value.chars().count() > max || value.chars().any(char::is_control) {
        return Err(problem(path, format!("must have 1 to {max} visible characters")));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::file::File;

    fn parse(text: &str) -> Result<ConfiguredRules, String> {
        let file = File::new("faena.toml", text);
        let mut configured = ConfiguredRules::default();
        for (section, value) in file.sections().expect("valid TOML") {
            let read = match section.get_ref().as_str() {
                "queues" => {
                    Entry::list(&file, "queues", value, MAX_RULES).and_then(|e| read_queues(&e, &mut configured))
                }
                _ => Entry::list(&file, "limit", value, MAX_RULES).and_then(|e| read_limits(&e, &mut configured)),
            };
            read.map_err(|error| error.to_string())?;
        }
        Ok(configured)
    }

    #[test]
    fn queues_and_limits_are_read() {
        let text = "[[queues]]\nname = \"mail\"\nconcurrency = 2\nrate = \"100/1m\"\nfairness = \"key\"\n\
                    [[limit]]\nkey = \"tenant-*\"\nconcurrency = 3";
        let rules = parse(text).expect("good");
        let rate = Some(Rate { count: 100, period_ms: 60_000 });
        assert!(rules.limits.contains(&(Scope::Queue("mail".into()), Limit { concurrency: Some(2), rate })));
        assert!(rules.limits.contains(&(Scope::Key("tenant-*".into()), Limit { concurrency: Some(3), rate: None })));
        assert_eq!(rules.queues[0].1.fairness, Some(Fairness::Key));
    }

    #[test]
    fn an_invalid_queue_or_limit_is_rejected_with_its_line_and_key() {
        for (text, error) in [
            ("[[queues]]\nname = \"a\"\nconcurrency = 0", "line 3: [[queues]] concurrency: must be between 1"),
            (
                "[[queues]]\nname = \"a\"\nrate = \"fast\"",
                "line 3: [[queues]] rate: \"fast\" is not a rate like 100/1m",
            ),
            (
                "[[limit]]\ntype = \"\"\nconcurrency = 1",
                "line 2: [[limit]] type: must have 1 to 100 visible characters",
            ),
            ("[[queues]]\nname = \"a\"\nspeed = 1", "line 3: [[queues]] unknown field `speed`"),
            ("[[queues]]\nname = \"a\"\nfairness = \"all\"", "line 3: [[queues]] unknown variant `all`"),
            ("[[limit]]\nconcurrency = 1", "line 1: [[limit]] type: set either type or key"),
            ("[[limit]]\ntype = \"a\"", "line 1: [[limit]] concurrency: set concurrency, rate or both"),
            ("[[limit]]\nkey = \"a\"\nconcurrency = 1\n[[limit]]\nkey = \"a\"\nconcurrency = 1", "already has a limit"),
        ] {
            let found = parse(text).expect_err("rejected");
            assert!(found.contains(error), "{text}: {found}");
        }
    }
}
