//! `[[outbox.source]]`: outbox tables of applications, relayed to a sink or turned into jobs.

use std::time::Duration;

use faena_domain::{masked_url, parse_duration};
use faena_engine::{DatabaseUrl, SourceConfig, Target};
use faena_store::{ExternalColumns, ExternalMapping, ExternalOutbox};
use serde::Deserialize;

use super::{
    ConfigError,
    file::{Entry, Located, Problem, problem},
};

pub const EXAMPLE: &str = "
# Outbox tables of your applications, in their PostgreSQL databases (see docs/guides/your-own-outbox.md).
# Rows of type faena.job become jobs.
#[[outbox.source]]
#name = \"tickets\"
#url = \"postgres://user:password@127.0.0.1:5432/tickets\"
# The name of a [[sink]]. Without it, only rows of type faena.job are processed.
#sink = \"bus\"
# Table and column names; `faena outbox init-sql` prints these tables.
#table = \"OutboxMessages\"
#columns = { id = \"Id\", type = \"Type\", payload = \"PayloadJson\", occurred_at = \"OccurredAt\", dispatched_at = \"DispatchedAt\", attempts = \"Attempts\", error = \"Error\", correlation_id = \"CorrelationId\" }
# The table of processed events; \"\": there is none.
#processed_table = \"ProcessedEvents\"
#processed_columns = { event_id = \"EventId\", processed_at = \"ProcessedAt\" }
# Columns that define the order of rows; empty: the time at which they occurred.
#order_by = []
# The advisory lock that lets one relay at a time read the table.
#lock = 42
#batch = 50
# Poll interval. If the application notifies `channel`, rows are processed immediately.
#every = \"5s\"
# Also: schema (of the tables), dead_table (for rows that were rejected five times), channel.
";

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct SourceEntry {
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

/// A source as written in the file. Its sink may be defined further below.
pub struct Source {
    config: SourceConfig,
    sink: Option<String>,
}

pub const MAX_SOURCES: usize = 32;
const MAX_BATCH: u32 = 1_000;
/// The length limit of a PostgreSQL identifier.
const MAX_NAME_BYTES: usize = 63;

pub fn read(entries: &[Entry<'_, '_>]) -> Result<Vec<Located<Source>>, ConfigError> {
    let mut sources: Vec<Located<Source>> = Vec::new();
    for entry in entries {
        let source = into_source(entry.read()?).map_err(|problem| entry.error(problem))?;
        for known in sources.iter().map(|located| &located.value) {
            check_pair(&known.config, &source.config).map_err(|problem| entry.error(problem))?;
        }
        sources.push(entry.located(source));
    }
    Ok(sources)
}

fn check_pair(first: &SourceConfig, second: &SourceConfig) -> Result<(), Problem> {
    if first.name == second.name {
        return Err(problem("name", format!("duplicate source name {:?}", second.name)));
    }
    if first.url == second.url && first.mapping.lock == second.mapping.lock {
        let message = format!(
            "source {:?} uses {} in the same database, so they would block each other; choose another number",
            first.name, second.mapping.lock
        );
        return Err(problem("lock", message));
    }
    let table = |source: &SourceConfig| (source.mapping.schema.clone(), source.mapping.table.clone());
    if first.url == second.url && table(first) == table(second) {
        let message = format!("source {:?} relays this table too, so every row would be processed twice", first.name);
        return Err(problem("table", message));
    }
    Ok(())
}

/// Rejects a name that is used for two different things.
fn check_distinct(mapping: &ExternalMapping) -> Result<(), Problem> {
    for (key, table) in [("processed_table", &mapping.processed_table), ("dead_table", &mapping.dead_table)] {
        if table.as_ref() == Some(&mapping.table) {
            return Err(problem(key, "must be another table than that of the key table"));
        }
    }
    let ExternalColumns { id, kind, payload, occurred_at, dispatched_at, attempts, error, correlation_id } =
        &mapping.columns;
    let mut columns = vec![
        ("columns.id", id),
        ("columns.type", kind),
        ("columns.payload", payload),
        ("columns.occurred_at", occurred_at),
        ("columns.dispatched_at", dispatched_at),
        ("columns.attempts", attempts),
        ("columns.error", error),
    ];
    columns.extend(correlation_id.iter().map(|name| ("columns.correlation_id", name)));
    for (at, (key, name)) in columns.iter().enumerate() {
        if let Some((other, _)) = columns[..at].iter().find(|(_, other)| other == name) {
            return Err(problem(*key, format!("is the same column as {other}: {name:?}")));
        }
    }
    Ok(())
}

fn into_source(entry: SourceEntry) -> Result<Source, Problem> {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    if entry.name.is_empty() || entry.name.len() > 100 || !entry.name.chars().all(is_plain) {
        return Err(problem("name", "must have 1 to 100 letters, digits, dots, dashes or underscores"));
    }
    let mapping = mapping(&entry)?;
    check_distinct(&mapping)?;
    // The error never repeats the URL, which may contain a password.
    let is_postgres = entry.url.starts_with("postgres://") || entry.url.starts_with("postgresql://");
    if !is_postgres || ExternalOutbox::open(&entry.url, mapping.clone()).is_err() {
        return Err(problem("url", "must look like postgres://user:password@host:5432/database"));
    }
    let period = match entry.every.as_deref().map(parse_duration) {
        None => Duration::from_secs(5),
        Some(Some(every)) if (Duration::from_millis(100)..=Duration::from_secs(60)).contains(&every) => every,
        Some(_) => return Err(problem("every", "must be a duration from 100ms to 60s")),
    };
    let config = SourceConfig { name: entry.name, url: DatabaseUrl(entry.url), mapping, sink: None, period };
    Ok(Source { config, sink: entry.sink })
}

fn mapping(entry: &SourceEntry) -> Result<ExternalMapping, Problem> {
    let default = ExternalMapping::default();
    let columns = ExternalColumns::default();
    let given = &entry.columns;
    let batch = entry.batch.unwrap_or(default.batch);
    if !(1..=MAX_BATCH).contains(&batch) {
        return Err(problem("batch", format!("must be between 1 and {MAX_BATCH}, got {batch}")));
    }
    let order_by = entry.order_by.iter().map(|column| identifier("order_by", Some(column), ""));
    Ok(ExternalMapping {
        schema: entry.schema.as_ref().map(|schema| identifier("schema", Some(schema), "")).transpose()?,
        table: identifier("table", entry.table.as_ref(), &default.table)?,
        columns: ExternalColumns {
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

fn identifier(key: &str, given: Option<&String>, default: &str) -> Result<String, Problem> {
    let name = given.map_or(default, |given| given.as_str());
    if name.is_empty() || name.len() > MAX_NAME_BYTES || name.contains('\0') {
        return Err(problem(key, format!("must have 1 to {MAX_NAME_BYTES} bytes")));
    }
    Ok(name.to_owned())
}

/// Treats an empty name as none.
fn optional(key: &str, given: Option<&String>, default: Option<String>) -> Result<Option<String>, Problem> {
    match given {
        None => Ok(default),
        Some(name) if name.is_empty() => Ok(None),
        Some(name) => identifier(key, Some(name), "").map(Some),
    }
}

/// Adds the sink that the source names. Fails if there is no such sink.
pub fn resolve<'a>(
    source: &Located<Source>,
    mut sinks: impl Iterator<Item = (&'a str, &'a Target)>,
) -> Result<SourceConfig, ConfigError> {
    let Source { config, sink } = &source.value;
    let Some(name) = sink else { return Ok(config.clone()) };
    match sinks.find(|(known, _)| known == name) {
        Some((_, target)) => Ok(SourceConfig { sink: Some(target.clone()), ..config.clone() }),
        None => Err(ConfigError(format!(
            "{}: [[outbox.source]] sink: there is no [[sink]] named {name:?}",
            source.position
        ))),
    }
}

impl Source {
    /// Returns the name of its sink.
    pub fn sink(&self) -> Option<&String> {
        self.sink.as_ref()
    }

    /// Returns the name and a description for `faena config`, without passwords.
    pub fn row(&self) -> (&str, String) {
        let to = self.sink.as_ref().map_or_else(|| "to jobs".to_owned(), |sink| format!("to sink {sink}"));
        let mapping = &self.config.mapping;
        let what = format!("{}, table {}, lock {}, {to}", masked_url(&self.config.url.0), mapping.table, mapping.lock);
        (&self.config.name, what)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::file::File;

    fn parse(text: &str) -> Result<Vec<Located<Source>>, String> {
        let file = File::new("faena.toml", text);
        let (_, outbox) = file.sections().expect("valid TOML").remove(0);
        let source = outbox.get_ref().get("source").expect("a source").clone();
        let entries = Entry::list(&file, "outbox.source", source, MAX_SOURCES);
        entries.and_then(|entries| read(&entries)).map_err(|error| error.to_string())
    }

    const TICKETS: &str = "[[outbox.source]]\nname = \"tickets\"\nurl = \"postgres://app:s3cret@host/tickets\"\n";

    #[test]
    fn a_source_uses_the_table_and_column_names_of_the_application() {
        let sources = parse(&format!(
            "{TICKETS}table = \"Out\"\ncolumns = {{ id = \"key\", correlation_id = \"\" }}\nprocessed_table = \"\"\nlock = 7\nevery = \"1s\""
        ));
        let sources = sources.expect("good");
        let mapping = &sources[0].value.config.mapping;
        assert_eq!((mapping.table.as_str(), mapping.lock, mapping.batch), ("Out", 7, 50));
        assert_eq!((mapping.columns.id.as_str(), mapping.columns.kind.as_str()), ("key", "Type"));
        assert_eq!((&mapping.columns.correlation_id, &mapping.processed_table), (&None, &None));
        let shown = format!("{:?} {:?}", sources[0].value.row(), sources[0].value.config);
        assert!(shown.contains("app:***@host") && !shown.contains("s3cret"), "{shown}");
    }

    #[test]
    fn an_invalid_source_is_rejected_without_showing_its_password() {
        for (text, error) in [
            ("[outbox.source]\nname = \"x\"".to_owned(), "must be written [[outbox.source]], with two brackets"),
            (TICKETS.replace("postgres:", "mysql:"), "url: must look like postgres://"),
            (TICKETS.replace("@host", "@host:port"), "url: must look like postgres://"),
            (format!("{TICKETS}batch = 0"), "batch: must be between 1 and 1000, got 0"),
            (format!("{TICKETS}table = \"\""), "table: must have 1 to 63 bytes"),
            (format!("{TICKETS}columns = {{ ident = \"x\" }}"), "unknown field `ident`"),
            (format!("{TICKETS}every = \"2h\""), "every: must be a duration from 100ms to 60s"),
            (format!("{TICKETS}{TICKETS}"), "line 5: [[outbox.source]] name: duplicate source name \"tickets\""),
            (
                format!("{TICKETS}{}", TICKETS.replace("name = \"tickets\"", "name = \"other\"")),
                "lock: source \"tickets\" uses 42 in the same database",
            ),
            (
                format!("{TICKETS}{}lock = 7", TICKETS.replace("name = \"tickets\"", "name = \"other\"")),
                "table: source \"tickets\" relays this table too",
            ),
            (
                format!("{TICKETS}dead_table = \"OutboxMessages\""),
                "line 4: [[outbox.source]] dead_table: must be another table",
            ),
            (
                format!("{TICKETS}columns = {{ error = \"Type\" }}"),
                "columns.error: is the same column as columns.type: \"Type\"",
            ),
        ] {
            let found = parse(&text).err().expect("rejected");
            assert!(found.contains(error), "{text}: {found}");
            assert!(!found.contains("s3cret"), "{found}");
        }
    }

    #[test]
    fn a_source_with_an_unknown_sink_is_rejected() {
        let sources = parse(&format!("{TICKETS}sink = \"bus\"")).expect("good");
        let error = resolve(&sources[0], std::iter::empty()).expect_err("rejected").to_string();
        assert_eq!(error, "faena.toml, line 1: [[outbox.source]] sink: there is no [[sink]] named \"bus\"");
    }
}
