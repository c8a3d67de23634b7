//! `[[inbox]]`: a queue or stream whose messages become jobs.

use faena_brokers::{
    BrokerUrl, Declare,
    nats::NatsConsumerOptions,
    rabbitmq::{Binding, RabbitMqConsumerOptions},
};
use faena_domain::Priority;
use faena_engine::{InboxBroker, InboxConfig};
use serde::Deserialize;

use super::ConfigError;

pub const EXAMPLE: &str = "
# Queues of a broker whose messages become jobs, each once (see docs/guides/your-own-outbox.md).
#[[inbox]]
#name = \"orders\"
# rabbitmq or nats.
#kind = \"rabbitmq\"
#url = \"amqp://guest:guest@127.0.0.1:5672/%2f\"
#queue = \"faena.orders\"
# Which messages of an exchange come to the queue.
#exchange = \"shop\"
#bind = [\"order.#\"]
# What becomes of them: the type of the jobs, and where they stand.
#job_type = \"order.ship\"
#queue_name = \"default\"
#priority = \"NORMAL\"
# Whether queue, exchange and <queue>.dead (for what cannot become a job) are made if they are missing.
#declare = true
#prefetch = 100

#[[inbox]]
#name = \"payments\"
#kind = \"nats\"
#url = \"nats://127.0.0.1:4222\"
#stream = \"PAYMENTS\"
#subject = \"payments.>\"
#job_type = \"payment.book\"
";

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    name: String,
    kind: Kind,
    url: String,
    job_type: String,
    queue: Option<String>,
    exchange: Option<String>,
    bind: Option<Vec<String>>,
    stream: Option<String>,
    subject: Option<String>,
    queue_name: Option<String>,
    priority: Option<Priority>,
    declare: Option<bool>,
    prefetch: Option<u16>,
}

#[derive(Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Kind {
    RabbitMq,
    Nats,
}

const MOST: usize = 32;
const MOST_AT_ONCE: u16 = 10_000;

pub fn read(content: toml::Value, place: &str) -> Result<Vec<InboxConfig>, ConfigError> {
    let toml::Value::Array(list) = content else {
        return Err(ConfigError(format!("{place}: inbox must be written [[inbox]], with two brackets")));
    };
    if list.len() > MOST {
        return Err(ConfigError(format!("{place}: there are {} inboxes, and {MOST} at most are possible", list.len())));
    }
    let mut inboxes: Vec<InboxConfig> = Vec::new();
    for (at, value) in list.into_iter().enumerate() {
        let wrong = |what: String| ConfigError(format!("{place}, [[inbox]] number {}: {what}", at + 1));
        let entry: Entry = value.try_into().map_err(|error: toml::de::Error| wrong(error.message().to_owned()))?;
        let inbox = check(entry).map_err(wrong)?;
        if inboxes.iter().any(|known| known.name == inbox.name) {
            return Err(wrong(format!("there is another inbox named {:?}", inbox.name)));
        }
        inboxes.push(inbox);
    }
    Ok(inboxes)
}

fn check(entry: Entry) -> Result<InboxConfig, String> {
    // It is part of names on the broker too.
    let is_plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_');
    if entry.name.is_empty() || entry.name.len() > 100 || !entry.name.chars().all(is_plain) {
        return Err("name: must have 1 to 100 letters, digits, dashes or underscores".into());
    }
    for (key, value) in [("job_type", Some(&entry.job_type)), ("queue_name", entry.queue_name.as_ref())] {
        if value.is_some_and(|value| !is_text(value, 100)) {
            return Err(format!("{key}: must have 1 to 100 visible characters"));
        }
    }
    let prefetch = entry.prefetch.unwrap_or(100);
    if !(1..=MOST_AT_ONCE).contains(&prefetch) {
        return Err(format!("prefetch: must be from 1 to {MOST_AT_ONCE}, is {prefetch}"));
    }
    let broker = match entry.kind {
        Kind::RabbitMq => rabbitmq(&entry, prefetch)?,
        Kind::Nats => nats(&entry, prefetch)?,
    };
    Ok(InboxConfig {
        name: entry.name,
        broker,
        job_type: entry.job_type,
        queue: entry.queue_name,
        priority: entry.priority,
    })
}

fn rabbitmq(entry: &Entry, prefetch: u16) -> Result<InboxBroker, String> {
    if entry.stream.is_some() || entry.subject.is_some() {
        return Err("stream, subject: are for kind nats; rabbitmq has queue, exchange and bind".into());
    }
    let queue = required("queue", entry.queue.as_deref())?;
    let bindings = match (&entry.exchange, &entry.bind) {
        (None, None) => Vec::new(),
        (Some(exchange), patterns) => {
            let exchange = required("exchange", Some(exchange))?;
            let patterns = patterns.clone().unwrap_or_else(|| vec!["#".into()]);
            patterns.into_iter().map(|pattern| Binding { exchange: exchange.clone(), pattern }).collect()
        }
        (None, Some(_)) => return Err("bind: needs the exchange whose messages come to the queue".into()),
    };
    Ok(InboxBroker::RabbitMq(RabbitMqConsumerOptions {
        name: format!("faena {}", entry.name),
        bindings,
        prefetch,
        declare: declare(entry),
        ..RabbitMqConsumerOptions::new(url(entry, &["amqp", "amqps"])?, queue)
    }))
}

fn nats(entry: &Entry, prefetch: u16) -> Result<InboxBroker, String> {
    if entry.queue.is_some() || entry.exchange.is_some() || entry.bind.is_some() {
        return Err("queue, exchange, bind: are for kind rabbitmq; nats has stream and subject".into());
    }
    let stream = required("stream", entry.stream.as_deref())?;
    if stream.contains(['.', '*', '>', '/', '\\']) || stream.contains(char::is_whitespace) {
        return Err("stream: must not contain blanks, dots, slashes, * or >".into());
    }
    let subject = required("subject", entry.subject.as_deref())?;
    let durable = format!("faena-{}", entry.name);
    Ok(InboxBroker::Nats(NatsConsumerOptions {
        name: format!("faena {}", entry.name),
        prefetch,
        declare: declare(entry),
        ..NatsConsumerOptions::new(url(entry, &["nats", "tls"])?, stream, subject, durable)
    }))
}

fn declare(entry: &Entry) -> Declare {
    if entry.declare.unwrap_or(true) { Declare::IfMissing } else { Declare::Never }
}

/// The text itself is never repeated: it may hold a password.
fn url(entry: &Entry, schemes: &[&str]) -> Result<BrokerUrl, String> {
    let scheme = entry.url.split_once("://").map(|(scheme, _)| scheme.to_ascii_lowercase());
    if scheme.is_none_or(|scheme| !schemes.contains(&scheme.as_str())) {
        return Err(format!("url: must begin with {}://", schemes.join(":// or ")));
    }
    entry.url.parse().map_err(|error| format!("url: {error}"))
}

fn required(key: &str, value: Option<&str>) -> Result<String, String> {
    match value {
        Some(value) if is_text(value, 255) => Ok(value.to_owned()),
        Some(_) => Err(format!("{key}: must have 1 to 255 visible characters")),
        None => Err(format!("{key}: is missing")),
    }
}

fn is_text(value: &str, most: usize) -> bool {
    !value.is_empty() && value.len() <= most && !value.chars().any(char::is_control)
}

/// For `faena config`: without passwords.
pub fn describe(inbox: &InboxConfig) -> String {
    let from = match &inbox.broker {
        InboxBroker::RabbitMq(options) => format!("rabbitmq {}, queue {}", options.url, options.queue),
        InboxBroker::Nats(options) => format!("nats {}, stream {}", options.url, options.stream),
    };
    format!("{from}, makes {}", inbox.job_type)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Vec<InboxConfig>, String> {
        let table: toml::Table = text.parse().expect("toml");
        read(table["inbox"].clone(), "faena.toml").map_err(|error| error.to_string())
    }

    const ORDERS: &str =
        "[[inbox]]\nname = \"orders\"\nkind = \"rabbitmq\"\nurl = \"amqp://user:geheim@host\"\njob_type = \"ship\"\n";

    #[test]
    fn inboxes_are_read_and_shown_without_passwords() {
        let inboxes = parse(&format!(
            "{ORDERS}queue = \"q\"\nexchange = \"shop\"\nbind = [\"order.#\"]\npriority = \"HIGH\"\n\
             [[inbox]]\nname = \"n\"\nkind = \"nats\"\nurl = \"nats://geheim@host\"\nstream = \"S\"\nsubject = \"s.>\"\njob_type = \"t\""
        ));
        let inboxes = inboxes.expect("good");
        let shown: Vec<String> = inboxes.iter().map(describe).collect();
        assert_eq!(
            shown,
            ["rabbitmq amqp://user:***@host, queue q, makes ship", "nats nats://***@host, stream S, makes t"]
        );
        assert_eq!(inboxes[0].priority, Some(Priority::High));
        assert!(!format!("{inboxes:?}").contains("geheim"));
    }

    #[test]
    fn what_is_wrong_with_an_inbox_is_said_without_its_password() {
        for (text, error) in [
            ("[inbox]\nname = \"x\"".to_owned(), "must be written [[inbox]], with two brackets"),
            (ORDERS.into(), "queue: is missing"),
            (format!("{ORDERS}queue = \"q\"\nbind = [\"a\"]"), "bind: needs the exchange"),
            (format!("{ORDERS}queue = \"q\"\nstream = \"a\""), "are for kind nats"),
            (format!("{ORDERS}queue = \"q\"\nprefetch = 0"), "prefetch: must be from 1 to 10000, is 0"),
            (ORDERS.replace("amqp:", "nats:") + "queue = \"q\"", "url: must begin with amqp:// or amqps://"),
            (format!("{ORDERS}queue = \"q\"\n{ORDERS}queue = \"q\""), "there is another inbox named \"orders\""),
        ] {
            let found = parse(&text).expect_err("refused");
            assert!(found.contains(error), "{text}: {found}");
            assert!(!found.contains("geheim"), "{found}");
        }
    }
}
