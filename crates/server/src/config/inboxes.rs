//! `[[inbox]]`: broker queues and streams whose messages become jobs.

use faena_brokers::{
    BrokerUrl, Declare,
    nats::NatsConsumerOptions,
    rabbitmq::{Binding, RabbitMqConsumerOptions},
};
use faena_domain::Priority;
use faena_engine::{InboxBroker, InboxConfig};
use serde::Deserialize;

use super::{
    ConfigError,
    file::{Entry, Placed, Problem, problem},
};

pub const EXAMPLE: &str = "
# Broker queues whose messages become jobs, each message once (see docs/guides/your-own-outbox.md).
#[[inbox]]
#name = \"orders\"
# rabbitmq or nats.
#kind = \"rabbitmq\"
#url = \"amqp://guest:guest@127.0.0.1:5672/%2f\"
#queue = \"faena.orders\"
# Messages of this exchange that match `bind` are routed to the queue.
#exchange = \"shop\"
#bind = [\"order.#\"]
# Type, queue and priority of the jobs.
#job_type = \"order.ship\"
#queue_name = \"default\"
#priority = \"NORMAL\"
# Whether Faena creates the queue, the exchange and <queue>.dead (for messages that cannot become a job).
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
struct Inbox {
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

pub const MAX_INBOXES: usize = 32;
const MAX_PREFETCH: u16 = 10_000;

pub fn read(entries: &[Entry<'_, '_>]) -> Result<Vec<Placed<InboxConfig>>, ConfigError> {
    let mut read: Vec<Placed<InboxConfig>> = Vec::new();
    for entry in entries {
        let inbox = check(entry.read()?).map_err(|problem| entry.error(problem))?;
        if read.iter().any(|known| known.value.name == inbox.name) {
            return Err(entry.error(problem("name", format!("another inbox is named {:?}", inbox.name))));
        }
        read.push(entry.placed(inbox));
    }
    Ok(read)
}

fn check(entry: Inbox) -> Result<InboxConfig, Problem> {
    // The name is also part of names on the broker.
    let is_plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_');
    if entry.name.is_empty() || entry.name.len() > 100 || !entry.name.chars().all(is_plain) {
        return Err(problem("name", "must have 1 to 100 letters, digits, dashes or underscores"));
    }
    for (key, value) in [("job_type", Some(&entry.job_type)), ("queue_name", entry.queue_name.as_ref())] {
        if value.is_some_and(|value| !is_text(value, 100)) {
            return Err(problem(key, "must have 1 to 100 visible characters"));
        }
    }
    let prefetch = entry.prefetch.unwrap_or(100);
    if !(1..=MAX_PREFETCH).contains(&prefetch) {
        return Err(problem("prefetch", format!("must be from 1 to {MAX_PREFETCH}, is {prefetch}")));
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

fn rabbitmq(entry: &Inbox, prefetch: u16) -> Result<InboxBroker, Problem> {
    if entry.stream.is_some() || entry.subject.is_some() {
        let key = if entry.stream.is_some() { "stream" } else { "subject" };
        return Err(problem(key, "is for kind nats; rabbitmq has queue, exchange and bind"));
    }
    let queue = required("queue", entry.queue.as_deref())?;
    let bindings = match (&entry.exchange, &entry.bind) {
        (None, None) => Vec::new(),
        (Some(exchange), patterns) => {
            let exchange = required("exchange", Some(exchange))?;
            let patterns = patterns.clone().unwrap_or_else(|| vec!["#".into()]);
            patterns.into_iter().map(|pattern| Binding { exchange: exchange.clone(), pattern }).collect()
        }
        (None, Some(_)) => return Err(problem("bind", "needs `exchange`, whose messages it binds to the queue")),
    };
    Ok(InboxBroker::RabbitMq(RabbitMqConsumerOptions {
        name: format!("faena {}", entry.name),
        bindings,
        prefetch,
        declare: declare(entry),
        ..RabbitMqConsumerOptions::new(url(entry, &["amqp", "amqps"])?, queue)
    }))
}

fn nats(entry: &Inbox, prefetch: u16) -> Result<InboxBroker, Problem> {
    if entry.queue.is_some() || entry.exchange.is_some() || entry.bind.is_some() {
        let key = [("queue", entry.queue.is_some()), ("exchange", entry.exchange.is_some()), ("bind", true)];
        let key = key.iter().find(|(_, given)| *given).map_or("bind", |(key, _)| key);
        return Err(problem(key, "is for kind rabbitmq; nats has stream and subject"));
    }
    let stream = required("stream", entry.stream.as_deref())?;
    if stream.contains(['.', '*', '>', '/', '\\']) || stream.contains(char::is_whitespace) {
        return Err(problem("stream", "must not contain blanks, dots, slashes, * or >"));
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

fn declare(entry: &Inbox) -> Declare {
    if entry.declare.unwrap_or(true) { Declare::IfMissing } else { Declare::Never }
}

/// Never repeats the text, which may contain a password.
fn url(entry: &Inbox, schemes: &[&str]) -> Result<BrokerUrl, Problem> {
    let scheme = entry.url.split_once("://").map(|(scheme, _)| scheme.to_ascii_lowercase());
    if scheme.is_none_or(|scheme| !schemes.contains(&scheme.as_str())) {
        return Err(problem("url", format!("must begin with {}://", schemes.join(":// or "))));
    }
    entry.url.parse().map_err(|error| problem("url", format!("{error}")))
}

fn required(key: &str, value: Option<&str>) -> Result<String, Problem> {
    match value {
        Some(value) if is_text(value, 255) => Ok(value.to_owned()),
        Some(_) => Err(problem(key, "must have 1 to 255 visible characters")),
        None => Err(problem(key, "is missing")),
    }
}

fn is_text(value: &str, most: usize) -> bool {
    !value.is_empty() && value.len() <= most && !value.chars().any(char::is_control)
}

/// Describes the inbox for `faena config`, without passwords.
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
    use crate::config::file::File;

    fn parse(text: &str) -> Result<Vec<InboxConfig>, String> {
        let file = File::new("faena.toml", text);
        let (_, value) = file.sections().expect("valid TOML").remove(0);
        let entries = Entry::list(&file, "inbox", value, MAX_INBOXES).map_err(|error| error.to_string())?;
        let read = read(&entries).map_err(|error| error.to_string())?;
        Ok(read.into_iter().map(|placed| placed.value).collect())
    }

    const ORDERS: &str =
        "[[inbox]]\nname = \"orders\"\nkind = \"rabbitmq\"\nurl = \"amqp://user:geheim@host\"\njob_type = \"ship\"\n";

    #[test]
    fn inboxes_are_read_and_described_without_passwords() {
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
    fn an_invalid_inbox_is_refused_without_showing_its_password() {
        for (text, error) in [
            ("[inbox]\nname = \"x\"".to_owned(), "must be written [[inbox]], with two brackets"),
            (ORDERS.into(), "queue: is missing"),
            (format!("{ORDERS}queue = \"q\"\nbind = [\"a\"]"), "line 7: [[inbox]] bind: needs `exchange`"),
            (format!("{ORDERS}queue = \"q\"\nstream = \"a\""), "stream: is for kind nats"),
            (format!("{ORDERS}queue = \"q\"\nprefetch = 0"), "prefetch: must be from 1 to 10000, is 0"),
            (ORDERS.replace("amqp:", "nats:") + "queue = \"q\"", "url: must begin with amqp:// or amqps://"),
            (format!("{ORDERS}queue = \"q\"\n{ORDERS}queue = \"q\""), "another inbox is named \"orders\""),
        ] {
            let found = parse(&text).expect_err("refused");
            assert!(found.contains(error), "{text}: {found}");
            assert!(!found.contains("geheim"), "{found}");
        }
    }
}
