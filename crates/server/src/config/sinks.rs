//! `[[sink]]`: destinations of events.

mod event_types;

use std::{path::Path, time::Duration};

use faena_brokers::{
    BrokerUrl, DEFAULT_TIMEOUT, Declare, file::FileSinkOptions, nats::NatsSinkOptions, rabbitmq::RabbitMqSinkOptions,
    redis::RedisSinkOptions,
};
use faena_domain::parse_duration;
use faena_engine::{
    Secret, SinkBody, SinkConfig, Target,
    outbox::{MAX_TIMEOUT, WebhookSinkOptions},
};
use faena_store::OnRejected;
use serde::Deserialize;

use super::{
    ConfigError,
    file::{Entry, Located, Problem, problem},
    names::{is_name, is_subject},
};

pub const EXAMPLE: &str = "
# Destinations of events (see docs/guides/events.md). Repeat the section for more sinks.
# Every node with the section publishes, so keep the sections of all nodes equal.
#[[sink]]
#name = \"bus\"
# rabbitmq, nats, redis, webhook or file.
#kind = \"rabbitmq\"
#url = \"amqp://guest:guest@127.0.0.1:5672/%2f\"
# Event types to send; * matches any text. []: the sink only serves an [[outbox.source]].
# Types of Faena begin with job., worker., schedule. or task.; any other is an event of a machine, like \"tarea.*\".
#types = [\"*\"]
# A message contains the whole event (cloudevent) or only its data (data); kind webhook always sends the whole event.
#body = \"cloudevent\"
# When the sink rejects an event, later events of the same job or task are sent (skip) or wait (park).
#on_rejected = \"skip\"
# Time limit for one batch including the connection; at most 14s.
#timeout = \"10s\"
# The topic exchange, and whether Faena creates it if it does not exist.
#exchange = \"faena\"
#declare = true

#[[sink]]
#name = \"jetstream\"
#kind = \"nats\"
#url = \"nats://127.0.0.1:4222\"
#stream = \"FAENA\"
# The subject of job.completed is then faena.job.completed.
#subject_prefix = \"faena\"

#[[sink]]
#name = \"stream\"
#kind = \"redis\"
#url = \"redis://127.0.0.1:6379/0\"
#key = \"faena:events\"
# Approximate number of entries the stream keeps.
#max_len = 1000000

#[[sink]]
#name = \"hook\"
#kind = \"webhook\"
#url = \"https://example.com/events\"
#types = [\"job.completed\", \"job.failed\"]

#[[sink]]
#name = \"log\"
#kind = \"file\"
#path = \"events.log\"
# Rotated to events.log.1 at this size; number of rotated files to keep.
#rotate_bytes = 104857600
#rotate_files = 5
";

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Sink {
    name: String,
    kind: SinkKind,
    url: Option<String>,
    path: Option<String>,
    types: Option<Vec<String>>,
    body: Option<Body>,
    on_rejected: Option<Rejected>,
    timeout: Option<String>,
    declare: Option<bool>,
    exchange: Option<String>,
    stream: Option<String>,
    subject_prefix: Option<String>,
    key: Option<String>,
    max_len: Option<u64>,
    rotate_bytes: Option<u64>,
    rotate_files: Option<usize>,
    secret: Option<String>,
}

#[derive(Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
enum SinkKind {
    RabbitMq,
    Nats,
    Redis,
    Webhook,
    File,
}

#[derive(Clone, Copy, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Rejected {
    Park,
    Skip,
}

#[derive(Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Body {
    #[default]
    CloudEvent,
    Data,
}

impl SinkKind {
    fn word(self) -> &'static str {
        match self {
            SinkKind::RabbitMq => "rabbitmq",
            SinkKind::Nats => "nats",
            SinkKind::Redis => "redis",
            SinkKind::Webhook => "webhook",
            SinkKind::File => "file",
        }
    }

    fn schemes(self) -> &'static [&'static str] {
        match self {
            SinkKind::RabbitMq => &["amqp", "amqps"],
            SinkKind::Nats => &["nats", "tls"],
            SinkKind::Redis => &["redis", "rediss"],
            SinkKind::Webhook => &["http", "https"],
            SinkKind::File => &[],
        }
    }

    /// Returns the keys of this kind, besides those of every sink.
    fn keys(self) -> &'static [&'static str] {
        match self {
            SinkKind::RabbitMq => &["url", "exchange", "declare", "body"],
            SinkKind::Nats => &["url", "stream", "subject_prefix", "declare", "body"],
            SinkKind::Redis => &["url", "key", "max_len", "body"],
            SinkKind::Webhook => &["url", "secret"],
            SinkKind::File => &["path", "rotate_bytes", "rotate_files", "body"],
        }
    }
}

pub const MAX_SINKS: usize = 32;
/// Longest prefix of subjects. NATS recommends subjects of at most 256 characters.
const MAX_PREFIX_BYTES: usize = 200;

pub fn read(entries: &[Entry<'_, '_>]) -> Result<Vec<Located<SinkConfig>>, ConfigError> {
    let mut sinks: Vec<Located<SinkConfig>> = Vec::new();
    for entry in entries {
        let sink = into_config(entry.read()?).map_err(|problem| entry.error(problem))?;
        if sinks.iter().any(|known| known.value.name == sink.name) {
            return Err(entry.error(problem("name", format!("duplicate sink name {:?}", sink.name))));
        }
        if let Some(known) = sinks.iter().find(|known| is_same_file(&known.value.target, &sink.target)) {
            let message = format!("sink {:?} writes to this file too; each needs its own", known.value.name);
            return Err(entry.error(problem("path", message)));
        }
        sinks.push(entry.located(sink));
    }
    Ok(sinks)
}

fn is_same_file(first: &Target, second: &Target) -> bool {
    match (first, second) {
        // Comparing components ignores `.` and repeated slashes.
        (Target::File(first), Target::File(second)) => {
            let components = |path: &Path| path.strip_prefix(".").unwrap_or(path).to_owned();
            components(&first.path) == components(&second.path)
        }
        _ => false,
    }
}

fn into_config(entry: Sink) -> Result<SinkConfig, Problem> {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    if entry.name.is_empty() || entry.name.len() > 100 || !entry.name.chars().all(is_plain) {
        return Err(problem("name", "must have 1 to 100 letters, digits, dots, dashes or underscores"));
    }
    check_keys(&entry)?;
    let types = entry.types.clone().unwrap_or_else(|| vec!["*".into()]);
    if types.len() > 100 || types.iter().any(|kind| kind.is_empty() || kind.len() > 255) {
        return Err(problem("types", "must name up to 100 types like \"job.*\" of 1 to 255 characters"));
    }
    if let Some(message) = types.iter().find_map(|kind| event_types::check(kind).err()) {
        return Err(problem("types", message));
    }
    let on_rejected = match entry.on_rejected.unwrap_or(Rejected::Skip) {
        Rejected::Park => OnRejected::Park,
        Rejected::Skip => OnRejected::Skip,
    };
    let body = match entry.body.unwrap_or_default() {
        Body::CloudEvent => SinkBody::CloudEvent,
        Body::Data => SinkBody::Data,
    };
    Ok(SinkConfig { name: entry.name.clone(), types, on_rejected, body, target: target(&entry)? })
}

fn target(entry: &Sink) -> Result<Target, Problem> {
    let timeout = timeout(entry.timeout.as_deref())?;
    let declare = if entry.declare.unwrap_or(true) { Declare::IfMissing } else { Declare::Never };
    let text =
        |path: &str, value: &Option<String>, default: &str| checked_name(path, value.as_deref().unwrap_or(default));
    Ok(match entry.kind {
        SinkKind::RabbitMq => {
            let exchange = text("exchange", &entry.exchange, "faena")?;
            let name = format!("faena {}", entry.name);
            Target::RabbitMq(RabbitMqSinkOptions {
                name,
                declare,
                timeout,
                ..RabbitMqSinkOptions::new(broker_url(entry)?, exchange)
            })
        }
        SinkKind::Nats => {
            let stream = text("stream", &entry.stream, "FAENA")?;
            if stream.contains(['.', '*', '>', '/', '\\']) || stream.contains(char::is_whitespace) {
                return Err(problem("stream", "must not contain whitespace, dots, slashes, * or >"));
            }
            let prefix = entry.subject_prefix.clone().unwrap_or_else(|| "faena".into());
            let is_valid = prefix.is_empty() || (is_subject(&prefix) && prefix.len() <= MAX_PREFIX_BYTES);
            if !is_valid {
                let message = format!(
                    "must be words separated by dots, without spaces, * or >, of at most {MAX_PREFIX_BYTES} bytes"
                );
                return Err(problem("subject_prefix", message));
            }
            let name = format!("faena {}", entry.name);
            Target::Nats(NatsSinkOptions {
                name,
                declare,
                timeout,
                ..NatsSinkOptions::new(broker_url(entry)?, stream, prefix)
            })
        }
        SinkKind::Redis => {
            let stream = text("key", &entry.key, "faena:events")?;
            if entry.max_len == Some(0) {
                return Err(problem("max_len", "must be at least 1"));
            }
            let options = RedisSinkOptions::new(broker_url(entry)?, stream);
            Target::Redis(RedisSinkOptions { timeout, max_length: entry.max_len, ..options })
        }
        SinkKind::Webhook => {
            Target::Webhook(WebhookSinkOptions { url: web_url(entry)?, secret: secret(entry)?, timeout })
        }
        SinkKind::File => {
            let path =
                entry.path.as_deref().filter(|path| !path.is_empty()).ok_or_else(|| problem("path", "is missing"))?;
            if path.ends_with('/') || path.trim() != path {
                return Err(problem("path", "must name a file, not a folder, without spaces at its beginning or end"));
            }
            let mut options = FileSinkOptions { timeout, ..FileSinkOptions::new(path) };
            options.max_bytes = entry.rotate_bytes.unwrap_or(options.max_bytes);
            options.keep = entry.rotate_files.unwrap_or(options.keep);
            if options.max_bytes < 1_024 || options.keep > 1_000 {
                let message = "must be at least 1024, and rotate_files at most 1000";
                return Err(problem("rotate_bytes", message));
            }
            Target::File(options)
        }
    })
}

/// Rejects a key that the kind does not use: it would have no effect.
fn check_keys(entry: &Sink) -> Result<(), Problem> {
    let given = [
        ("url", entry.url.is_some()),
        ("path", entry.path.is_some()),
        ("exchange", entry.exchange.is_some()),
        ("declare", entry.declare.is_some()),
        ("stream", entry.stream.is_some()),
        ("subject_prefix", entry.subject_prefix.is_some()),
        ("key", entry.key.is_some()),
        ("max_len", entry.max_len.is_some()),
        ("rotate_bytes", entry.rotate_bytes.is_some()),
        ("rotate_files", entry.rotate_files.is_some()),
        ("secret", entry.secret.is_some()),
        ("body", entry.body.is_some()),
    ];
    match given.iter().find(|(key, is_given)| *is_given && !entry.kind.keys().contains(key)) {
        None => Ok(()),
        Some((key, _)) => {
            let (kind, keys) = (entry.kind.word(), entry.kind.keys().join(", "));
            Err(problem(*key, format!("a sink of kind {kind} has no such key; it has {keys}")))
        }
    }
}

fn timeout(text: Option<&str>) -> Result<Duration, Problem> {
    let Some(text) = text else { return Ok(DEFAULT_TIMEOUT) };
    match parse_duration(text) {
        Some(timeout) if (Duration::from_millis(100)..=MAX_TIMEOUT).contains(&timeout) => Ok(timeout),
        _ => Err(problem("timeout", format!("{text:?} must be a duration from 100ms to {MAX_TIMEOUT:?}"))),
    }
}

fn checked_name(path: &str, value: &str) -> Result<String, Problem> {
    if !is_name(value, 255) {
        return Err(problem(
            path,
            "must have 1 to 255 bytes of visible characters, without spaces at its beginning or end",
        ));
    }
    Ok(value.to_owned())
}

/// Never repeats the text, which may contain a password.
fn url_text(entry: &Sink) -> Result<&str, Problem> {
    let text = entry.url.as_deref().unwrap_or_default().trim();
    if text.is_empty() {
        return Err(problem("url", "is missing"));
    }
    let schemes = entry.kind.schemes();
    let scheme = text.split_once("://").map(|(scheme, _)| scheme.to_ascii_lowercase());
    if scheme.is_none_or(|scheme| !schemes.contains(&scheme.as_str())) {
        let message = format!("must begin with {}:// for kind {}", schemes.join(":// or "), entry.kind.word());
        return Err(problem("url", message));
    }
    Ok(text)
}

fn broker_url(entry: &Sink) -> Result<BrokerUrl, Problem> {
    url_text(entry)?.parse().map_err(|error| problem("url", format!("{error}")))
}

fn web_url(entry: &Sink) -> Result<url::Url, Problem> {
    let url: url::Url =
        url_text(entry)?.parse().map_err(|error| problem("url", format!("not a valid URL: {error}")))?;
    if !url.username().is_empty() || url.password().is_some() {
        return Err(problem("url", "must not contain a user name or password"));
    }
    Ok(url)
}

fn secret(entry: &Sink) -> Result<Option<Secret>, Problem> {
    let Some(text) = &entry.secret else { return Ok(None) };
    let secret = text
        .parse()
        .map_err(|what| problem("secret", format!("must be whsec_ and 24 to 64 bytes in base64; it {what}")))?;
    Ok(Some(secret))
}

/// Describes the sink for `faena config`, without passwords.
pub fn describe(sink: &SinkConfig) -> String {
    let target = match &sink.target {
        Target::RabbitMq(options) => format!("rabbitmq {}, exchange {}", options.url, options.exchange),
        Target::Nats(options) => format!("nats {}, stream {}", options.url, options.stream),
        Target::Redis(options) => format!("redis {}, key {}", options.url, options.stream),
        Target::Webhook(options) => format!("webhook {options}"),
        Target::File(options) => format!("file {}", options.path.display()),
    };
    let on_rejected = if sink.on_rejected == OnRejected::Park { ", parks" } else { "" };
    let body = if sink.body == SinkBody::Data { ", only data" } else { "" };
    format!("{target}, types {}{body}{on_rejected}", sink.types.join(","))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::file::File;

    fn parse(text: &str) -> Result<Vec<SinkConfig>, String> {
        let file = File::new("faena.toml", text);
        let (_, value) = file.sections().expect("valid TOML").remove(0);
        let entries = Entry::list(&file, "sink", value, MAX_SINKS).map_err(|error| error.to_string())?;
        let read = read(&entries).map_err(|error| error.to_string())?;
        Ok(read.into_iter().map(|located| located.value).collect())
    }

    #[test]
    fn sinks_are_read_and_described_without_passwords() {
        let sinks = parse(
            "[[sink]]\nname = \"bus\"\nkind = \"rabbitmq\"\nurl = \"amqp://user:s3cret@host/%2f\"\ntypes = [\"job.*\", \"tarea.*\"]\nbody = \"data\"\non_rejected = \"park\"\n\
             [[sink]]\nname = \"hook\"\nkind = \"webhook\"\nurl = \"https://example.com/in?token=s3cret\"\n\
             secret = \"whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw\"\ntimeout = \"5s\"",
        )
        .expect("good");
        let shown: Vec<String> = sinks.iter().map(describe).collect();
        assert_eq!(
            shown,
            [
                "rabbitmq amqp://user:***@host/%2f, exchange faena, types job.*,tarea.*, only data, parks",
                "webhook https://example.com/in, types *"
            ]
        );
        assert_eq!(sinks[1].target.timeout(), Duration::from_secs(5));
        let debug = format!("{sinks:?}");
        assert!(!debug.contains("s3cret") && !debug.contains("MfKQ"), "{debug}");
    }

    #[test]
    fn an_invalid_sink_is_rejected_without_showing_its_password() {
        let bus = "[[sink]]\nname = \"bus\"\nkind = \"rabbitmq\"\n";
        let url = "url = \"amqp://user:s3cret@host\"\n";
        for (text, error) in [
            ("[sink]\nname = \"bus\"".into(), "must be written [[sink]], with two brackets"),
            (bus.into(), "url: is missing"),
            (
                format!("{bus}url = \"nats://user:s3cret@host\""),
                "must begin with amqp:// or amqps:// for kind rabbitmq",
            ),
            (format!("{bus}url = \"amqp://user:gehe/im@\""), "url: "),
            (
                format!("{bus}{url}stream = \"a\""),
                "stream: a sink of kind rabbitmq has no such key; it has url, exchange",
            ),
            (format!("{bus}{url}timeout = \"15s\""), "timeout: \"15s\" must be a duration from 100ms to 14s"),
            (format!("{bus}{url}types = [\"\"]"), "types: must name"),
            (format!("{bus}{url}on_rejected = \"panic\""), "unknown variant `panic`"),
            (format!("{bus}{url}colour = 1"), "unknown field `colour`"),
            (format!("{bus}{url}{bus}{url}"), "line 6: [[sink]] name: duplicate sink name \"bus\""),
            ("[[sink]]\nname = \"a b\"\nkind = \"file\"\npath = \"x\"".into(), "name: must have"),
            ("[[sink]]\nname = \"a\"\nkind = \"kafka\"".into(), "unknown variant `kafka`"),
            ("[[sink]]\nname = \"a\"\nkind = \"file\"".into(), "path: is missing"),
            (
                "[[sink]]\nname = \"a\"\nkind = \"webhook\"\nurl = \"http://a:s3cret@b\"".into(),
                "must not contain a user name",
            ),
            (
                "[[sink]]\nname = \"a\"\nkind = \"webhook\"\nurl = \"http://b\"\nsecret = \"whsec_s3cret\"".into(),
                "secret: must be whsec_ and 24 to 64 bytes in base64; it is not base64",
            ),
            (
                "[[sink]]\nname = \"a\"\nkind = \"nats\"\nurl = \"nats://b\"\nsubject_prefix = \"a..b\"".into(),
                "subject_prefix: must be words",
            ),
            (format!("{bus}{url}types = [\"jobs.*\"]"), "types: \"jobs.*\" matches no event; use job.*"),
            (format!("{bus}{url}body = \"xml\""), "unknown variant `xml`"),
            (
                "[[sink]]\nname = \"a\"\nkind = \"webhook\"\nurl = \"http://b\"\nbody = \"data\"".into(),
                "body: a sink of kind webhook has no such key",
            ),
            (format!("{bus}{url}exchange = \"{}\"", "x".repeat(256)), "exchange: must have 1 to 255 bytes"),
            (format!("{bus}{url}exchange = \" faena\""), "exchange: must have 1 to 255 bytes"),
            (
                "[[sink]]\nname = \"r\"\nkind = \"redis\"\nurl = \"redis://:s3cret@h/abc\"".into(),
                "line 4: [[sink]] url: the database after the host must be a number",
            ),
            (
                "[[sink]]\nname = \"a\"\nkind = \"file\"\npath = \"e.log\"\n[[sink]]\nname = \"b\"\nkind = \"file\"\npath = \"./e.log\""
                    .into(),
                "line 8: [[sink]] path: sink \"a\" writes to this file too",
            ),
            ("[[sink]]\nname = \"a\"\nkind = \"file\"\npath = \"logs/\"".into(), "path: must name a file"),
        ] {
            let found = parse(&text).expect_err("rejected");
            assert!(found.contains(error), "{text}: {found}");
            assert!(!found.contains("s3cret"), "{found}");
        }
    }
}
