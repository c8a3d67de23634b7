//! Checks a value against the kind of its key.

use faena_domain::parse_duration;
use faena_engine::Secret;

use super::{
    keys::{Key, Kind},
    names::{is_origin, is_type_or_queue, is_uri_reference},
    parse_network, queue, split, traces,
};

impl Key {
    /// Returns what is wrong with `value` for this key.
    pub fn check(&self, value: &str) -> Result<(), String> {
        match self.kind {
            Kind::OptionalText => Ok(()),
            Kind::Endpoint if value.is_empty() => Ok(()),
            Kind::Endpoint => traces::endpoint(value).map(drop),
            Kind::Redis => queue::check_address(value),
            Kind::KeyPrefix => queue::check_prefix(value),
            Kind::Headers => traces::headers(value).map(drop),
            Kind::Pairs => traces::pairs(value).map(drop),
            Kind::Ratio => traces::ratio(value).map(drop),
            Kind::Secret if value.is_empty() && self.default.is_empty() => Ok(()),
            Kind::Text | Kind::Secret => {
                if value.trim().is_empty() {
                    Err("must not be empty".into())
                } else {
                    Ok(())
                }
            }
            Kind::Limit { max } => match value.parse::<u64>() {
                Ok(number) if (1..=max).contains(&number) => Ok(()),
                _ if value == "none" => Ok(()),
                _ => Err(format!("must be a whole number from 1 to {max}, or none")),
            },
            Kind::Number { min, max } => match value.parse::<u64>() {
                Ok(number) if (min..=max).contains(&number) => Ok(()),
                _ => Err(format!("must be a number from {min} to {max}")),
            },
            Kind::Duration => match parse_duration(value) {
                Some(_) => Ok(()),
                None => Err("must be a duration like 500ms, 30s, 5m, 12h or 7d".into()),
            },
            Kind::Flag => match value {
                "true" | "false" => Ok(()),
                _ => Err("must be true or false".into()),
            },
            Kind::Choice(choices) => {
                if choices.contains(&value) {
                    Ok(())
                } else {
                    Err(format!("must be one of {}", choices.join(", ")))
                }
            }
            Kind::Roles => {
                let known = split(value).all(|role| matches!(role, "api" | "engine" | "worker"));
                if known && split(value).next().is_some() {
                    Ok(())
                } else {
                    Err("must name api, engine or worker, separated by commas".into())
                }
            }
            Kind::Networks => match split(value).find(|net| parse_network(net).is_none()) {
                None => Ok(()),
                Some(net) => Err(format!("must be networks like 10.0.0.0/8 separated by commas; {net:?} is not one")),
            },
            Kind::Origins => match split(value).find(|origin| !is_origin(origin)) {
                None => Ok(()),
                Some(origin) => Err(format!(
                    "must be * or origins like https://app.example.com separated by commas; {origin:?} is not one"
                )),
            },
            Kind::Names => match split(value).find(|name| !is_type_or_queue(name)) {
                None => Ok(()),
                Some(name) => Err(format!("must be names of queues separated by commas; {name:?} is not one")),
            },
            Kind::Uri if is_uri_reference(value) => Ok(()),
            Kind::Uri => Err("must be a URI reference like /faena or https://example.com/jobs, without spaces".into()),
            Kind::Secrets => {
                for (at, secret) in split(value).enumerate() {
                    if let Err(what) = secret.parse::<Secret>() {
                        return Err(format!(
                            "must be secrets like whsec_ and 24 to 64 bytes in base64, separated by commas; number {} {what}",
                            at + 1
                        ));
                    }
                }
                Ok(())
            }
        }
    }
}
