//! Checks a value against the kind of its key.

use faena_domain::parse_duration;
use faena_engine::Secret;

use super::{
    keys::{Key, ValueKind},
    names::{is_origin, is_type_or_queue, is_uri_reference},
    parse_network, queue, split, traces,
};

impl Key {
    /// Returns what is wrong with `value` for this key.
    pub fn check(&self, value: &str) -> Result<(), String> {
        match self.kind {
            ValueKind::OptionalText => Ok(()),
            ValueKind::Endpoint if value.is_empty() => Ok(()),
            ValueKind::Endpoint => traces::endpoint(value).map(drop),
            ValueKind::Redis => queue::check_address(value),
            ValueKind::KeyPrefix => queue::check_prefix(value),
            ValueKind::Headers => traces::headers(value).map(drop),
            ValueKind::Pairs => traces::pairs(value).map(drop),
            ValueKind::Ratio => traces::ratio(value).map(drop),
            ValueKind::Secret if value.is_empty() && self.default.is_empty() => Ok(()),
            ValueKind::Text | ValueKind::Secret => {
                if value.trim().is_empty() {
                    Err("must not be empty".into())
                } else {
                    Ok(())
                }
            }
            ValueKind::Limit { max } => match value.parse::<u64>() {
                Ok(number) if (1..=max).contains(&number) => Ok(()),
                _ if value == "none" => Ok(()),
                _ => Err(format!("must be a whole number from 1 to {max}, or none")),
            },
            ValueKind::Number { min, max } => match value.parse::<u64>() {
                Ok(number) if (min..=max).contains(&number) => Ok(()),
                _ => Err(format!("must be a number from {min} to {max}")),
            },
            ValueKind::Duration => match parse_duration(value) {
                Some(_) => Ok(()),
                None => Err("must be a duration like 500ms, 30s, 5m, 12h or 7d".into()),
            },
            ValueKind::Flag => match value {
                "true" | "false" => Ok(()),
                _ => Err("must be true or false".into()),
            },
            ValueKind::Choice(choices) => {
                if choices.contains(&value) {
                    Ok(())
                } else {
                    Err(format!("must be one of {}", choices.join(", ")))
                }
            }
            ValueKind::Roles => {
                let known = split(value).all(|role| matches!(role, "api" | "engine" | "worker"));
                if known && split(value).next().is_some() {
                    Ok(())
                } else {
                    Err("must name api, engine or worker, separated by commas".into())
                }
            }
            ValueKind::Networks => match split(value).find(|net| parse_network(net).is_none()) {
                None => Ok(()),
                Some(net) => Err(format!("must be networks like 10.0.0.0/8 separated by commas; {net:?} is not one")),
            },
            ValueKind::Origins => match split(value).find(|origin| !is_origin(origin)) {
                None => Ok(()),
                Some(origin) => Err(format!(
                    "must be * or origins like https://app.example.com separated by commas; {origin:?} is not one"
                )),
            },
            ValueKind::Names => match split(value).find(|name| !is_type_or_queue(name)) {
                None => Ok(()),
                Some(name) => Err(format!("must be names of queues separated by commas; {name:?} is not one")),
            },
            ValueKind::Uri if is_uri_reference(value) => Ok(()),
            ValueKind::Uri => {
                Err("must be a URI reference like /faena or https://example.com/jobs, without spaces".into())
            }
            ValueKind::Secrets => {
                for (at, secret) in split(value).enumerate() {
                    if let Err(what) = secret.parse::<Secret>() {
                        return Err(format!(
                            "must be secrets separated by commas, each whsec_ and 24 to 64 bytes in base64; number {} {what}",
                            at + 1
                        ));
                    }
                }
                Ok(())
            }
        }
    }
}
