//! `[[outbox.source]]`: an application's own outbox, which is emptied into a sink or into jobs.

use std::time::Duration;

use faena_domain::parse_duration;
use faena_engine::{DatabaseUrl, SourceConfig, Target};
use faena_store::{ForeignColumns, ForeignMapping, ForeignOutbox};
use serde::Deserialize;

use super::{ConfigError, without_password};

pub const EXAMPLE: &str = "
# Outboxes of your own applications, in their PostgreSQL (see docs/guides/your-own-outbox.md). Rows of type faena.job become jobs.
#[[outbox.source]]
#name = \"tickets\"
#url = \"postgres://user:password@127.0.0.1:5432/tickets\"
# The name of a [[sink]]. Without one only rows of type faena.job are taken.
#sink = \"bus\"
# How the application calls things; `faena outbox init-sql` prints these tables.
#table = \"OutboxMessages\"
#columns = { id = \"Id\", type = \"Type\", payload = \"PayloadJson\", occurred_at = \"OccurredAt\", dispatched_at = \"DispatchedAt\", attempts = \"Attempts\", error = \"Error\", correlation_id = \"CorrelationId\" }
# Which events are dealt with; \"\": nobody keeps that.
#processed_table = \"ProcessedEvents\"
#processed_columns = { event_id = \"EventId\", processed_at = \"ProcessedAt\" }
# The columns to put rows in order by; none: the time at which they occurred.
#order_by = []
# The advisory lock under which one worker at a time reads the table.
#lock = 42
#batch = 50
# How often it is looked at; with a channel that the application notifies, rows go at once.
#every = \"5s\"
# Further: schema (where the tables are), dead_table (where rows go that were refused five times), channel.
";

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    name: String,
    url: String,
    sink: Option<String>,
    schema: Option<String>,
    table: Option<String>,
    #[serde(default)]
    columns: Columns,
    processed_table: Option<String>,
    #[serde(default)]
    processed_columns: ProcessedColumns,
    dead_table: Option<String>,
    #[serde(default)]
    order_by: Vec<String>,
    lock: Option<i64>,
    batch: Option<u32>,
    every: Option<String>,
    channel: Option<String>,
}

#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields)]
struct Columns {
    id: Option<String>,
    r#type: Option<String>,
    payload: Option<String>,
    occurred_at: Option<String>,
    dispatched_at: Option<String>,
    attempts: Option<String>,
    error: Option<String>,
    correlation_id: Option<String>,
}

#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields)]
struct ProcessedColumns {
    event_id: Option<String>,
    processed_at: Option<String>,
}

/// A source as it stands in the file; its sink may stand further below.
pub struct Source {
    config: SourceConfig,
    sink: Option<String>,
}

const MOST: usize = 32;
const MOST_ROWS: u32 = 1_000;
/// PostgreSQL's limit for a name.
const LONGEST_NAME: usize = 63;

pub fn read(content: toml::Value, place: &str) -> Result<Vec<Source>, ConfigError> {
    let toml::Value::Array(list) = content else {
        return Err(ConfigError(format!(
            "{place}: outbox.source must be written [[outbox.source]], with two brackets"
        )));
    };
    if list.len() > MOST {
        return Err(ConfigError(format!("{place}: there are {} sources, and {MOST} at most are possible", list.len())));
    }
    let mut sources: Vec<Source> = Vec::new();
    for (at, value) in list.into_iter().enumerate() {
        let wrong = |what: String| ConfigError(format!("{place}, [[outbox.source]] number {}: {what}", at + 1));
        let entry: Entry = value.try_into().map_err(|error: toml::de::Error| wrong(error.message().to_owned()))?;
        let source = check(entry).map_err(wrong)?;
        for known in &sources {
            if known.config.name == source.config.name {
                return Err(wrong(format!("there is another source named {:?}", source.config.name)));
            }
            if known.config.url == source.config.url && known.config.mapping.lock == source.config.mapping.lock {
                return Err(wrong(format!(
                    "lock: the source {:?} uses {} in the same database, and they would wait for each other; choose another number",
                    known.config.name, source.config.mapping.lock
                )));
            }
        }
        sources.push(source);
    }
    Ok(sources)
}

fn check(entry: Entry) -> Result<Source, String> {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    if entry.name.is_empty() || entry.name.len() > 100 || !entry.name.chars().all(is_plain) {
        return Err("name: must have 1 to 100 letters, digits, dots, dashes or underscores".into());
    }
    let mapping = mapping(&entry)?;
    // The text itself is never repeated: it may hold a password.
    let is_postgres = entry.url.starts_with("postgres://") || entry.url.starts_with("postgresql://");
    if !is_postgres || ForeignOutbox::open(&entry.url, mapping.clone()).is_err() {
        return Err("url: must look like postgres://user:password@host:5432/database".into());
    }
    let period = match entry.every.as_deref().map(parse_duration) {
        None => Duration::from_secs(5),
        Some(Some(every)) if (Duration::from_millis(100)..=Duration::from_secs(60)).contains(&every) => every,
        Some(_) => return Err("every: must be a duration from 100ms to 60s".into()),
    };
    let config = SourceConfig { name: entry.name, url: DatabaseUrl(entry.url), mapping, sink: None, period };
    Ok(Source { config, sink: entry.sink })
}

fn mapping(entry: &Entry) -> Result<ForeignMapping, String> {
    let default = ForeignMapping::default();
    let columns = ForeignColumns::default();
    let given = &entry.columns;
    let batch = entry.batch.unwrap_or(default.batch);
    if !(1..=MOST_ROWS).contains(&batch) {
        return Err(format!("batch: must be from 1 to {MOST_ROWS}, is {batch}"));
    }
    let order_by = entry.order_by.iter().map(|column| identifier("order_by", Some(column), ""));
    Ok(ForeignMapping {
        schema: entry.schema.as_ref().map(|schema| identifier("schema", Some(schema), "")).transpose()?,
        table: identifier("table", entry.table.as_ref(), &default.table)?,
        columns: ForeignColumns {
            id: identifier("columns.id", given.id.as_ref(), &columns.id)?,
            kind: identifier("columns.type", given.r#type.as_ref(), &columns.kind)?,
            payload: identifier("columns.payload", given.payload.as_ref(), &columns.payload)?,
            occurred_at: identifier("columns.occurred_at", given.occurred_at.as_ref(), &columns.occurred_at)?,
            dispatched_at: identifier("columns.dispatched_at", given.dispatched_at.as_ref(), &columns.dispatched_at)?,
            attempts: identifier("columns.attempts", given.attempts.as_ref(), &columns.attempts)?,
            error: identifier("columns.error", given.error.as_ref(), &columns.error)?,
            correlation_id: optional("columns.correlation_id", given.correlation_id.as_ref(), columns.correlation_id)?,
        },
        processed_table: optional("processed_table", entry.processed_table.as_ref(), default.processed_table)?,
        processed_id: identifier(
            "processed_columns.event_id",
            entry.processed_columns.event_id.as_ref(),
            &default.processed_id,
        )?,
        processed_at: identifier(
            "processed_columns.processed_at",
            entry.processed_columns.processed_at.as_ref(),
            &default.processed_at,
        )?,
        dead_table: optional("dead_table", entry.dead_table.as_ref(), None)?,
        order_by: order_by.collect::<Result<_, _>>()?,
        lock: entry.lock.unwrap_or(default.lock),
        batch,
        channel: optional("channel", entry.channel.as_ref(), None)?,
    })
}

fn identifier(key: &str, given: Option<&String>, default: &str) -> Result<String, String> {
    let name = given.map_or(default, |given| given.as_str());
    if name.is_empty() || name.len() > LONGEST_NAME || name.contains('\0') {
        return Err(format!("{key}: must have 1 to {LONGEST_NAME} bytes"));
    }
    Ok(name.to_owned())
}

/// An empty name means that there is none.
fn optional(key: &str, given: Option<&String>, default: Option<String>) -> Result<Option<String>, String> {
    match given {
        None => Ok(default),
        Some(name) if name.is_empty() => Ok(None),
        Some(name) => identifier(key, Some(name), "").map(Some),
    }
}

/// With its sink, which must be there.
pub fn resolve<'a>(
    source: &Source,
    mut sinks: impl Iterator<Item = (&'a str, &'a Target)>,
) -> Result<SourceConfig, ConfigError> {
    let Some(name) = &source.sink else { return Ok(source.config.clone()) };
    match sinks.find(|(known, _)| known == name) {
        Some((_, target)) => Ok(SourceConfig { sink: Some(target.clone()), ..source.config.clone() }),
        None => Err(ConfigError(format!(
            "[[outbox.source]] {:?}: sink: there is no [[sink]] named {name:?}",
            source.config.name
        ))),
    }
}

impl Source {
    /// For `faena config`: its name, and what it does, without passwords.
    pub fn row(&self) -> (&str, String) {
        let to = self.sink.as_ref().map_or_else(|| "to jobs".to_owned(), |sink| format!("to sink {sink}"));
        let mapping = &self.config.mapping;
        let what =
            format!("{}, table {}, lock {}, {to}", without_password(&self.config.url.0), mapping.table, mapping.lock);
        (&self.config.name, what)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Vec<Source>, String> {
        let table: toml::Table = text.parse().expect("toml");
        read(table["outbox"]["source"].clone(), "faena.toml").map_err(|error| error.to_string())
    }

    const TICKETS: &str = "[[outbox.source]]\nname = \"tickets\"\nurl = \"postgres://app:geheim@host/tickets\"\n";

    #[test]
    fn a_source_is_called_as_the_application_calls_it() {
        let sources = parse(&format!(
            "{TICKETS}table = \"Out\"\ncolumns = {{ id = \"key\", correlation_id = \"\" }}\nprocessed_table = \"\"\nlock = 7\nevery = \"1s\""
        ));
        let sources = sources.expect("good");
        let mapping = &sources[0].config.mapping;
        assert_eq!((mapping.table.as_str(), mapping.lock, mapping.batch), ("Out", 7, 50));
        assert_eq!((mapping.columns.id.as_str(), mapping.columns.kind.as_str()), ("key", "Type"));
        assert_eq!((&mapping.columns.correlation_id, &mapping.processed_table), (&None, &None));
        let shown = format!("{:?} {:?}", sources[0].row(), sources[0].config);
        assert!(shown.contains("app:***@host") && !shown.contains("geheim"), "{shown}");
    }

    #[test]
    fn what_is_wrong_with_a_source_is_said_without_its_password() {
        for (text, error) in [
            ("[outbox.source]\nname = \"x\"".to_owned(), "must be written [[outbox.source]], with two brackets"),
            (TICKETS.replace("postgres:", "mysql:"), "url: must look like postgres://"),
            (TICKETS.replace("@host", "@host:port"), "url: must look like postgres://"),
            (format!("{TICKETS}batch = 0"), "batch: must be from 1 to 1000, is 0"),
            (format!("{TICKETS}table = \"\""), "table: must have 1 to 63 bytes"),
            (format!("{TICKETS}columns = {{ ident = \"x\" }}"), "unknown field `ident`"),
            (format!("{TICKETS}every = \"2h\""), "every: must be a duration from 100ms to 60s"),
            (format!("{TICKETS}{TICKETS}"), "number 2: there is another source named \"tickets\""),
            (
                format!("{TICKETS}{}", TICKETS.replace("name = \"tickets\"", "name = \"other\"")),
                "lock: the source \"tickets\" uses 42 in the same database",
            ),
        ] {
            let found = parse(&text).err().expect("refused");
            assert!(found.contains(error), "{text}: {found}");
            assert!(!found.contains("geheim"), "{found}");
        }
    }

    #[test]
    fn a_source_names_a_sink_that_is_there() {
        let sources = parse(&format!("{TICKETS}sink = \"bus\"")).expect("good");
        let error = resolve(&sources[0], std::iter::empty()).expect_err("refused").to_string();
        assert_eq!(error, "[[outbox.source]] \"tickets\": sink: there is no [[sink]] named \"bus\"");
    }
}
