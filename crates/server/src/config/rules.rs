//! `[[queue]]` and `[[limit]]`: what holds for queues, and how much may run.

use faena_domain::{Fairness, FieldError, Limit, QueueRule, Rate, Scope};
use faena_store::Configured;
use serde::Deserialize;

use super::ConfigError;

pub const EXAMPLE: &str = "
# What holds for a queue; as many sections as you like. What is changed at run time goes before it and stays.
#[[queue]]
#name = \"mail\"
# Jobs of it that run at once, on all nodes together, and how many may start per period.
#concurrency = 10
#rate = \"100/1m\"
# true: a higher priority always goes first. Environment, for several: FAENA_QUEUE_STRICT=mail,orders
#strict = false
# \"key\": each concurrencyKey in its turn; \"none\": who has waited longest goes first.
#fairness = \"none\"

# A limit for a type, or for concurrencyKeys by name or beginning (each key by itself).
#[[limit]]
#type = \"email.send\"
#concurrency = 5
#[[limit]]
#key = \"tenant-*\"
#concurrency = 2
#rate = \"1000/1h\"
";

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Queue {
    name: String,
    concurrency: Option<u32>,
    rate: Option<String>,
    strict: Option<bool>,
    fairness: Option<Fairness>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    #[serde(rename = "type")]
    kind: Option<String>,
    key: Option<String>,
    concurrency: Option<u32>,
    rate: Option<String>,
}

pub fn read(section: &str, content: toml::Value, place: &str, into: &mut Configured) -> Result<(), ConfigError> {
    let toml::Value::Array(list) = content else {
        return Err(ConfigError(format!("{place}: {section} must be written [[{section}]], with two brackets")));
    };
    for (at, value) in list.into_iter().enumerate() {
        let wrong = |what: String| ConfigError(format!("{place}, [[{section}]] number {}: {what}", at + 1));
        let added = if section == "queue" { queue(value, into) } else { limit(value, into) };
        added.map_err(wrong)?;
    }
    Ok(())
}

fn queue(value: toml::Value, into: &mut Configured) -> Result<(), String> {
    let entry: Queue = value.try_into().map_err(|error: toml::de::Error| error.message().to_owned())?;
    name("name", &entry.name)?;
    if into.queues.iter().any(|(known, _)| *known == entry.name) {
        return Err(format!("there is another queue named {:?}", entry.name));
    }
    put(Scope::Queue(entry.name.clone()), numbers(entry.concurrency, entry.rate)?, into)?;
    let rule = QueueRule { strict: entry.strict, fairness: entry.fairness, paused: None };
    into.queues.push((entry.name, rule));
    Ok(())
}

fn limit(value: toml::Value, into: &mut Configured) -> Result<(), String> {
    let entry: Entry = value.try_into().map_err(|error: toml::de::Error| error.message().to_owned())?;
    let scope = match (entry.kind, entry.key) {
        (Some(kind), None) => {
            name("type", &kind)?;
            Scope::Type(kind)
        }
        (None, Some(key)) => {
            name("key", &key)?;
            Scope::Key(key)
        }
        _ => return Err("must name one of type and key (a queue has its own section, [[queue]])".into()),
    };
    let limit = numbers(entry.concurrency, entry.rate)?;
    if limit.is_none() {
        return Err("concurrency or rate is missing".into());
    }
    put(scope, limit, into)
}

fn put(scope: Scope, limit: Limit, into: &mut Configured) -> Result<(), String> {
    if into.limits.iter().any(|(known, _)| *known == scope) {
        return Err(format!("there is another limit for {scope}"));
    }
    if !limit.is_none() {
        into.limits.push((scope, limit));
    }
    Ok(())
}

fn numbers(concurrency: Option<u32>, rate: Option<String>) -> Result<Limit, String> {
    let rate = match rate {
        Some(text) => Some(Rate::parse(&text).ok_or_else(|| format!("rate: {text:?} must be like 100/1m"))?),
        None => None,
    };
    let limit = Limit { concurrency, rate };
    let mut faults: Vec<FieldError> = Vec::new();
    limit.check(&mut faults);
    match faults.first() {
        Some(fault) => Err(format!("{}: {}", fault.path, fault.message)),
        None => Ok(limit),
    }
}

fn name(path: &str, value: &str) -> Result<(), String> {
    if value.is_empty() || value.chars().count() > 255 || value.chars().any(char::is_control) {
        return Err(format!("{path}: must have 1 to 255 visible characters"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Configured, String> {
        let table: toml::Table = text.parse().expect("toml");
        let mut configured = Configured::default();
        for (section, content) in table {
            read(&section, content, "faena.toml", &mut configured).map_err(|error| error.to_string())?;
        }
        Ok(configured)
    }

    #[test]
    fn queues_and_limits_are_read() {
        let text = "[[queue]]\nname = \"mail\"\nconcurrency = 2\nrate = \"100/1m\"\nfairness = \"key\"\n\
                    [[limit]]\nkey = \"tenant-*\"\nconcurrency = 3";
        let rules = parse(text).expect("good");
        let rate = Some(Rate { count: 100, period_ms: 60_000 });
        assert!(rules.limits.contains(&(Scope::Queue("mail".into()), Limit { concurrency: Some(2), rate })));
        assert!(rules.limits.contains(&(Scope::Key("tenant-*".into()), Limit { concurrency: Some(3), rate: None })));
        assert_eq!(rules.queues[0].1.fairness, Some(Fairness::Key));
    }

    #[test]
    fn what_is_wrong_with_them_is_said() {
        for (text, error) in [
            ("[[queue]]\nname = \"a\"\nconcurrency = 0", "concurrency: must be from 1"),
            ("[[queue]]\nname = \"a\"\nrate = \"fast\"", "rate: \"fast\" must be like 100/1m"),
            ("[[queue]]\nname = \"a\"\nspeed = 1", "unknown field `speed`"),
            ("[[queue]]\nname = \"a\"\nfairness = \"all\"", "unknown variant `all`"),
            ("[[limit]]\nconcurrency = 1", "must name one of type and key"),
            ("[[limit]]\ntype = \"a\"", "concurrency or rate is missing"),
            ("[[limit]]\nkey = \"a\"\nconcurrency = 1\n[[limit]]\nkey = \"a\"\nconcurrency = 1", "another limit"),
        ] {
            let found = parse(text).expect_err("refused");
            assert!(found.contains(error), "{text}: {found}");
        }
    }
}
