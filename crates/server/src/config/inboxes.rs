//! `[[inbox]]`: broker queues and streams whose messages become jobs, or events of tasks.

use faena_brokers::{
    BrokerUrl, Declare,
    nats::NatsConsumerOptions,
    rabbitmq::{Binding, RabbitMqConsumerOptions},
};
use faena_domain::Priority;
use faena_engine::{Deliver, InboxBroker, InboxConfig, JobTemplate, SinkConfig, Target, TaskEvents};
use serde::Deserialize;

use super::{
    ConfigError,
    file::{Entry, Located, Problem, problem},
    names::{is_binding_pattern, is_name, is_subject, is_subject_filter, is_type_or_queue},
};

pub const EXAMPLE: &str = "
# Broker queues whose messages become jobs (see docs/guides/your-own-outbox.md) or events of tasks (see
# docs/guides/task-services.md). Each message has an effect once.
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
#job_queue = \"default\"
#job_priority = \"NORMAL\"
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

#[[inbox]]
#name = \"results\"
# What messages become: jobs, or events of the tasks that they name (task-events).
#deliver = \"task-events\"
# The start event of this machine creates a task, if the message names none.
#machine = \"coding-task\"
#kind = \"nats\"
#url = \"nats://127.0.0.1:4222\"
#stream = \"TASKS\"
#subject = \"tasks.>\"
# A message without the header Type has the event type that follows this prefix in its subject.
#subject_prefix = \"tasks\"
";

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Inbox {
    name: String,
    kind: InboxKind,
    url: String,
    deliver: Option<DeliverKind>,
    job_type: Option<String>,
    queue: Option<String>,
    exchange: Option<String>,
    bind: Option<Vec<String>>,
    stream: Option<String>,
    subject: Option<String>,
    job_queue: Option<String>,
    job_priority: Option<Priority>,
    machine: Option<String>,
    subject_prefix: Option<String>,
    declare: Option<bool>,
    prefetch: Option<u16>,
}

#[derive(Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
enum InboxKind {
    RabbitMq,
    Nats,
}

#[derive(Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum DeliverKind {
    #[default]
    Jobs,
    TaskEvents,
}

pub const MAX_INBOXES: usize = 32;
const MAX_PREFETCH: u16 = 10_000;
/// Longest name of a queue whose dead-letter queue, `<queue>.dead`, still has a name that AMQP accepts.
const MAX_QUEUE_BYTES: usize = 250;

pub fn read(entries: &[Entry<'_, '_>]) -> Result<Vec<Located<InboxConfig>>, ConfigError> {
    let mut inboxes: Vec<Located<InboxConfig>> = Vec::new();
    for entry in entries {
        let inbox = into_config(entry.read()?).map_err(|problem| entry.error(problem))?;
        if inboxes.iter().any(|known| known.value.name == inbox.name) {
            return Err(entry.error(problem("name", format!("duplicate inbox name {:?}", inbox.name))));
        }
        if let Some(known) = inboxes.iter().find(|known| is_same_queue(&known.value.broker, &inbox.broker)) {
            let message =
                format!("inbox {:?} consumes this queue too; each message would reach only one", known.value.name);
            return Err(entry.error(problem("queue", message)));
        }
        inboxes.push(entry.located(inbox));
    }
    Ok(inboxes)
}

fn is_same_queue(first: &InboxBroker, second: &InboxBroker) -> bool {
    match (first, second) {
        (InboxBroker::RabbitMq(first), InboxBroker::RabbitMq(second)) => {
            first.url == second.url && first.queue == second.queue
        }
        _ => false,
    }
}

fn into_config(entry: Inbox) -> Result<InboxConfig, Problem> {
    // The name becomes part of object names on the broker, such as the durable consumer.
    let is_plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_');
    if entry.name.is_empty() || entry.name.len() > 100 || !entry.name.chars().all(is_plain) {
        return Err(problem("name", "must have 1 to 100 letters, digits, dashes or underscores"));
    }
    let deliver = deliver(&entry)?;
    let prefetch = entry.prefetch.unwrap_or(100);
    if !(1..=MAX_PREFETCH).contains(&prefetch) {
        return Err(problem("prefetch", format!("must be between 1 and {MAX_PREFETCH}, got {prefetch}")));
    }
    let broker = match entry.kind {
        InboxKind::RabbitMq => rabbitmq(&entry, prefetch)?,
        InboxKind::Nats => nats(&entry, prefetch)?,
    };
    Ok(InboxConfig { name: entry.name, broker, deliver })
}

fn deliver(entry: &Inbox) -> Result<Deliver, Problem> {
    let job_keys = [
        ("job_type", entry.job_type.is_some()),
        ("job_queue", entry.job_queue.is_some()),
        ("job_priority", entry.job_priority.is_some()),
    ];
    let task_keys = [("machine", entry.machine.is_some()), ("subject_prefix", entry.subject_prefix.is_some())];
    let given = |keys: &[(&'static str, bool)]| keys.iter().find(|(_, given)| *given).map(|(key, _)| *key);
    match entry.deliver.unwrap_or_default() {
        DeliverKind::Jobs => match given(&task_keys) {
            Some(key) => Err(problem(key, "requires deliver = \"task-events\"; jobs have no such key")),
            None => Ok(Deliver::Jobs(job_template(entry)?)),
        },
        DeliverKind::TaskEvents => match given(&job_keys) {
            Some(key) => Err(problem(key, "is not valid with deliver = \"task-events\"; remove one of them")),
            None => Ok(Deliver::TaskEvents(task_events(entry)?)),
        },
    }
}

fn job_template(entry: &Inbox) -> Result<JobTemplate, Problem> {
    let job_type = entry.job_type.clone().ok_or_else(|| {
        problem("job_type", "is missing; it is the type of the jobs, or set deliver = \"task-events\"")
    })?;
    for (key, value) in [("job_type", Some(&job_type)), ("job_queue", entry.job_queue.as_ref())] {
        if value.is_some_and(|value| !is_type_or_queue(value)) {
            return Err(problem(key, "must have 1 to 100 visible characters, without spaces at its beginning or end"));
        }
    }
    Ok(JobTemplate { job_type, queue: entry.job_queue.clone(), priority: entry.job_priority })
}

fn task_events(entry: &Inbox) -> Result<TaskEvents, Problem> {
    if entry.machine.as_ref().is_some_and(|machine| !is_name(machine, 400)) {
        return Err(problem("machine", "must be the name of a machine, like \"coding-task\""));
    }
    let subject_prefix = entry.subject_prefix.clone().unwrap_or_default();
    if !subject_prefix.is_empty() {
        if entry.kind != InboxKind::Nats {
            return Err(problem(
                "subject_prefix",
                "is only valid for kind \"nats\"; the routing key is the event type",
            ));
        }
        if !is_subject(&subject_prefix) {
            return Err(problem("subject_prefix", "must be words separated by dots, without spaces, * or >"));
        }
        let begins = |subject: &String| subject.strip_prefix(&subject_prefix).is_some_and(|rest| rest.starts_with('.'));
        if !entry.subject.as_ref().is_some_and(begins) {
            let message =
                format!("no message would have it; begin subject with {subject_prefix:?}, like \"{subject_prefix}.>\"");
            return Err(problem("subject_prefix", message));
        }
    }
    Ok(TaskEvents { machine: entry.machine.clone(), subject_prefix })
}

fn rabbitmq(entry: &Inbox, prefetch: u16) -> Result<InboxBroker, Problem> {
    if entry.stream.is_some() || entry.subject.is_some() {
        let key = if entry.stream.is_some() { "stream" } else { "subject" };
        return Err(problem(key, "is only valid for kind \"nats\"; for rabbitmq set queue, exchange and bind"));
    }
    let queue = required("queue", entry.queue.as_deref())?;
    if declare(entry) == Declare::IfMissing && queue.len() > MAX_QUEUE_BYTES {
        let message = format!("must have at most {MAX_QUEUE_BYTES} bytes, because Faena also creates <queue>.dead");
        return Err(problem("queue", message));
    }
    let bindings = match (&entry.exchange, &entry.bind) {
        (None, None) => Vec::new(),
        (Some(exchange), patterns) => {
            let exchange = required("exchange", Some(exchange))?;
            let patterns = patterns.clone().unwrap_or_else(|| vec!["#".into()]);
            if patterns.is_empty() {
                return Err(problem(
                    "bind",
                    "must name at least one pattern, like [\"order.#\"]; without bind, all messages of the exchange are routed to the queue",
                ));
            }
            if let Some(pattern) = patterns.iter().find(|pattern| !is_binding_pattern(pattern)) {
                let message = format!(
                    "{pattern:?} is not a pattern; use words separated by dots, * for one word and # for any number"
                );
                return Err(problem("bind", message));
            }
            patterns.into_iter().map(|pattern| Binding { exchange: exchange.clone(), pattern }).collect()
        }
        (None, Some(_)) => return Err(problem("bind", "requires exchange, whose messages are routed to the queue")),
    };
    Ok(InboxBroker::RabbitMq(RabbitMqConsumerOptions {
        name: format!("faena {}", entry.name),
        bindings,
        prefetch,
        declare: declare(entry),
        ..RabbitMqConsumerOptions::new(url(entry, &["amqp", "amqps"])?, queue)
    }))
}

/// Adds the subjects of a sink to every inbox on the same stream. The inbox may connect first and create the stream, and
/// a stream without the subjects of the sink would reject its events.
pub fn with_shared_streams(mut inboxes: Vec<InboxConfig>, sinks: &[SinkConfig]) -> Vec<InboxConfig> {
    for inbox in &mut inboxes {
        let InboxBroker::Nats(consumer) = &mut inbox.broker else { continue };
        for sink in sinks {
            let Target::Nats(sink) = &sink.target else { continue };
            if sink.url != consumer.url || sink.stream != consumer.stream || sink.prefix.is_empty() {
                continue;
            }
            let prefix = format!("{}.", sink.prefix);
            consumer.stream_subjects.retain(|subject| !subject.starts_with(&prefix));
            consumer.stream_subjects.push(format!("{prefix}>"));
        }
    }
    inboxes
}

fn nats(entry: &Inbox, prefetch: u16) -> Result<InboxBroker, Problem> {
    if entry.queue.is_some() || entry.exchange.is_some() || entry.bind.is_some() {
        let key = [("queue", entry.queue.is_some()), ("exchange", entry.exchange.is_some()), ("bind", true)];
        let key = key.iter().find(|(_, given)| *given).map_or("bind", |(key, _)| key);
        return Err(problem(key, "is only valid for kind \"rabbitmq\"; for nats set stream and subject"));
    }
    let stream = required("stream", entry.stream.as_deref())?;
    if stream.contains(['.', '*', '>', '/', '\\']) || stream.contains(char::is_whitespace) {
        return Err(problem("stream", "must not contain whitespace, dots, slashes, * or >"));
    }
    let subject = required("subject", entry.subject.as_deref())?;
    if !is_subject_filter(&subject) {
        let message = "must be words separated by dots, without spaces; * stands for one word, > for all that follow";
        return Err(problem("subject", message));
    }
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

/// Parses the broker URL. Errors never contain the URL, because it may include a password.
fn url(entry: &Inbox, schemes: &[&str]) -> Result<BrokerUrl, Problem> {
    let scheme = entry.url.split_once("://").map(|(scheme, _)| scheme.to_ascii_lowercase());
    if scheme.is_none_or(|scheme| !schemes.contains(&scheme.as_str())) {
        return Err(problem("url", format!("must begin with {}://", schemes.join(":// or "))));
    }
    entry.url.parse().map_err(|error| problem("url", format!("{error}")))
}

fn required(key: &str, value: Option<&str>) -> Result<String, Problem> {
    match value {
        Some(value) if is_name(value, 255) => Ok(value.to_owned()),
        Some(_) => {
            Err(problem(key, "must have 1 to 255 bytes of visible characters, without spaces at its beginning or end"))
        }
        None => Err(problem(key, "is missing")),
    }
}

/// Describes the inbox for `faena config`, without passwords.
pub fn describe(inbox: &InboxConfig) -> String {
    let source = match &inbox.broker {
        InboxBroker::RabbitMq(options) => format!("rabbitmq {}, queue {}", options.url, options.queue),
        InboxBroker::Nats(options) => format!("nats {}, stream {}", options.url, options.stream),
    };
    match &inbox.deliver {
        Deliver::Jobs(template) => format!("{source}, creates jobs of type {}", template.job_type),
        Deliver::TaskEvents(TaskEvents { machine: Some(machine), .. }) => {
            format!("{source}, delivers events to tasks and creates tasks of {machine}")
        }
        Deliver::TaskEvents(_) => format!("{source}, delivers events to tasks"),
    }
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
        Ok(read.into_iter().map(|located| located.value).collect())
    }

    const ORDERS: &str =
        "[[inbox]]\nname = \"orders\"\nkind = \"rabbitmq\"\nurl = \"amqp://user:s3cret@host\"\njob_type = \"ship\"\n";

    const NATS: &str =
        "[[inbox]]\nname = \"n\"\nkind = \"nats\"\nurl = \"nats://s3cret@host\"\njob_type = \"t\"\nstream = \"S\"\n";

    #[test]
    fn inboxes_are_read_and_described_without_passwords() {
        let inboxes = parse(&format!(
            "{ORDERS}queue = \"q\"\nexchange = \"shop\"\nbind = [\"order.#\"]\njob_priority = \"HIGH\"\n\
             [[inbox]]\nname = \"n\"\nkind = \"nats\"\nurl = \"nats://s3cret@host\"\nstream = \"S\"\nsubject = \"s.>\"\njob_type = \"t\""
        ));
        let inboxes = inboxes.expect("good");
        let shown: Vec<String> = inboxes.iter().map(describe).collect();
        assert_eq!(
            shown,
            [
                "rabbitmq amqp://user:***@host, queue q, creates jobs of type ship",
                "nats nats://***@host, stream S, creates jobs of type t"
            ]
        );
        let Deliver::Jobs(template) = &inboxes[0].deliver else { panic!("{inboxes:?}") };
        assert_eq!(template.priority, Some(Priority::High));
        assert!(!format!("{inboxes:?}").contains("s3cret"));
    }

    #[test]
    fn an_inbox_of_task_events_is_read() {
        let events = "[[inbox]]\nname = \"n\"\nkind = \"nats\"\nurl = \"nats://host\"\nstream = \"S\"\nsubject = \"t.>\"\ndeliver = \"task-events\"\n";
        let plain = parse(events).expect("good").remove(0);
        assert_eq!(describe(&plain), "nats nats://host, stream S, delivers events to tasks");
        let full = format!("{events}machine = \"coding-task\"\nsubject_prefix = \"t\"");
        let full = parse(&full).expect("good").remove(0);
        assert!(describe(&full).ends_with("delivers events to tasks and creates tasks of coding-task"));
        let Deliver::TaskEvents(rule) = &full.deliver else { panic!("{full:?}") };
        assert_eq!((rule.machine.as_deref(), rule.subject_prefix.as_str()), (Some("coding-task"), "t"));
        let queue = ORDERS.replace("job_type = \"ship\"", "deliver = \"task-events\"") + "queue = \"q\"\n";
        for (text, error) in [
            (format!("{events}job_type = \"t\""), "job_type: is not valid with deliver"),
            (format!("{events}job_priority = \"LOW\""), "job_priority: is not valid with deliver"),
            (format!("{ORDERS}queue = \"q\"\nmachine = \"m\""), "machine: requires deliver = \"task-events\""),
            (ORDERS.replace("job_type = \"ship\"", "queue = \"q\""), "job_type: is missing"),
            (format!("{events}machine = \"\""), "machine: must be the name of a machine"),
            (format!("{events}subject_prefix = \"a b\""), "subject_prefix: must be words"),
            (format!("{events}subject_prefix = \"x\""), "subject_prefix: no message would have it"),
            (format!("{queue}subject_prefix = \"x\""), "subject_prefix: is only valid for kind \"nats\""),
            (events.replace("task-events", "tasks"), "unknown variant `tasks`"),
        ] {
            let found = parse(&text).expect_err("rejected");
            assert!(found.contains(error), "{text}: {found}");
        }
    }

    #[test]
    fn an_invalid_inbox_is_rejected_without_showing_its_password() {
        for (text, error) in [
            ("[inbox]\nname = \"x\"".to_owned(), "must be written [[inbox]], with two brackets"),
            (ORDERS.into(), "queue: is missing"),
            (format!("{ORDERS}queue = \"q\"\nbind = [\"a\"]"), "line 7: [[inbox]] bind: requires exchange"),
            (format!("{ORDERS}queue = \"q\"\nstream = \"a\""), "stream: is only valid for kind"),
            (format!("{ORDERS}queue = \"q\"\nprefetch = 0"), "prefetch: must be between 1 and 10000, got 0"),
            (ORDERS.replace("amqp:", "nats:") + "queue = \"q\"", "url: must begin with amqp:// or amqps://"),
            (format!("{ORDERS}queue = \"q\"\n{ORDERS}queue = \"q\""), "duplicate inbox name \"orders\""),
            (
                format!("{ORDERS}queue = \"q\"\n{}queue = \"q\"", ORDERS.replace("\"orders\"", "\"other\"")),
                "line 12: [[inbox]] queue: inbox \"orders\" consumes this queue too",
            ),
            (format!("{ORDERS}queue = \" \""), "queue: must have 1 to 255 bytes"),
            (format!("{ORDERS}queue = \"{}\"", "q".repeat(251)), "queue: must have at most 250 bytes"),
            (
                format!("{ORDERS}queue = \"q\"\nexchange = \"x\"\nbind = []"),
                "line 8: [[inbox]] bind: must name at least one pattern",
            ),
            (format!("{ORDERS}queue = \"q\"\nexchange = \"x\"\nbind = [\"a b\"]"), "bind: \"a b\" is not a pattern"),
            (
                format!("{ORDERS}queue = \"q\"\nexchange = \"{}\"", "x".repeat(256)),
                "exchange: must have 1 to 255 bytes",
            ),
            (format!("{NATS}subject = \"a..b\""), "line 7: [[inbox]] subject: must be words separated by dots"),
            (format!("{NATS}subject = \"a b\""), "subject: must be words"),
            (format!("{NATS}subject = \"a.>.b\""), "subject: must be words"),
        ] {
            let found = parse(&text).expect_err("rejected");
            assert!(found.contains(error), "{text}: {found}");
            assert!(!found.contains("s3cret"), "{found}");
        }
    }
}
