//! The columns of an application's tables, and the statements that fit them.
//!
//! Names come from the configuration and are always quoted; types come from the PostgreSQL catalog, so that ids of any common
//! type, times with and without a zone, and payloads as text or JSON all work. A missing column or a wrong type is an error
//! that names the column.

use std::collections::BTreeMap;

use tokio_postgres::{Client, Statement};

use super::mapping::{ExternalMapping, quoted};
use crate::{MAX_ATTEMPTS, Result, StoreError};

/// A larger payload is rejected without being read.
pub const MAX_PAYLOAD_BYTES: i32 = 4 * 1024 * 1024;

/// Maximum number of pending rows that are counted.
const COUNTED: u32 = 100_000;

/// The statements, prepared on one session.
pub struct Statements {
    /// Locks and returns rows that are not dispatched. `$1`: ids to exclude, `$2`: limit, `$3`: message type, or NULL for all types.
    pub select_pending: Statement,
    /// Counts the rows that wait, up to a limit, and returns the time of the oldest of them. `$1`: message type, or NULL for all types.
    pub count_pending: Statement,
    /// Returns those of the ids `$1` that are already processed.
    pub select_processed: Option<Statement>,
    /// Marks the ids `$1` as dispatched at `$2` (ms).
    pub mark_dispatched: Statement,
    /// Records the ids `$1` as processed at `$2` (ms).
    pub record_processed: Option<Statement>,
    /// Records that the row with id `$1` was rejected, with the reason `$2`. Returns its attempts.
    pub record_rejection: Statement,
    /// Moves the ids `$1` to the dead letters.
    pub move_to_dlq: Option<Statement>,
}

struct Column {
    kind: String,
    /// Maximum length in characters.
    length: Option<i32>,
    is_generated: bool,
    can_update: bool,
}

struct Table {
    name: String,
    columns: BTreeMap<String, Column>,
}

impl Statements {
    pub async fn prepare(client: &Client, mapping: &ExternalMapping) -> Result<Statements> {
        let table = Table::read(client, mapping, &mapping.table).await?;
        table.check(mapping)?;
        let names = &mapping.columns;
        let id_type = table.columns[&names.id].kind.clone();
        let (select_processed, record_processed) = match &mapping.processed_table {
            Some(name) => {
                let processed_table = Table::read(client, mapping, name).await?;
                let (read, write) = processed_sql(mapping, &processed_table, &id_type)?;
                (Some(client.prepare(&read).await?), Some(client.prepare(&write).await?))
            }
            None => (None, None),
        };
        let move_to_dlq = match &mapping.dead_table {
            Some(name) => {
                let dead = Table::read(client, mapping, name).await?;
                Some(client.prepare(&move_to_dlq_sql(mapping, &table, &dead)?).await?)
            }
            None => None,
        };
        Ok(Statements {
            select_pending: client.prepare(&select_pending_sql(mapping, &table)).await?,
            count_pending: client.prepare(&count_pending_sql(mapping, &table)).await?,
            select_processed,
            mark_dispatched: client.prepare(&mark_dispatched_sql(mapping, &table)).await?,
            record_processed,
            record_rejection: client.prepare(&record_rejection_sql(mapping, &table)).await?,
            move_to_dlq,
        })
    }
}

impl Table {
    async fn read(client: &Client, mapping: &ExternalMapping, name: &str) -> Result<Table> {
        let qualified_name = mapping.qualified(name);
        let rows = client
            .query(
                "SELECT a.attname, t.typname, a.atttypmod, a.attgenerated <> '',
                        has_column_privilege(a.attrelid, a.attnum, 'UPDATE')
                 FROM pg_attribute a JOIN pg_type t ON t.oid = a.atttypid
                 WHERE a.attrelid = to_regclass($1)::oid AND a.attnum > 0 AND NOT a.attisdropped",
                &[&qualified_name],
            )
            .await?;
        if rows.is_empty() {
            let row = client.query_one("SELECT current_database()::text, current_user::text", &[]).await?;
            let (database, user): (String, String) = (row.get(0), row.get(1));
            return Err(StoreError::Setup(format!(
                "the table {qualified_name} does not exist in the database {database:?}, or the user {user:?} cannot see it; create it with the output of \"faena outbox init-sql\""
            )));
        }
        let column = |row: &tokio_postgres::Row| {
            let (kind, modifier): (String, i32) = (row.get(1), row.get(2));
            // The modifier of varchar(n) is n + 4.
            let length =
                matches!(kind.as_str(), "varchar" | "bpchar").then_some(modifier - 4).filter(|length| *length > 0);
            Column { kind, length, is_generated: row.get(3), can_update: row.get(4) }
        };
        let columns = rows.iter().map(|row| (row.get(0), column(row))).collect();
        Ok(Table { name: qualified_name, columns })
    }

    /// Checks that every column that is read or written exists and has a supported type, and that the written columns can
    /// be updated.
    fn check(&self, mapping: &ExternalMapping) -> Result<()> {
        let names = &mapping.columns;
        let order = mapping.order_by.iter().map(|name| ("order_by", name, ANY));
        let correlation = names.correlation_id.iter().map(|name| ("columns.correlation_id", name, ANY));
        let required = [
            ("columns.id", &names.id, IDS),
            ("columns.type", &names.kind, TEXTS),
            ("columns.payload", &names.payload, PAYLOADS),
            ("columns.occurred_at", &names.occurred_at, TIMES),
            ("columns.dispatched_at", &names.dispatched_at, TIMES),
            ("columns.attempts", &names.attempts, NUMBERS),
            ("columns.error", &names.error, TEXTS),
        ];
        self.require_columns(required.into_iter().chain(correlation).chain(order))?;
        for name in [&names.dispatched_at, &names.attempts, &names.error] {
            if !self.columns[name].can_update {
                return Err(StoreError::Setup(format!(
                    "the user of the source cannot update the column {} of the table {}; run \"GRANT UPDATE ({}) ON {} TO <user>\"",
                    quoted(name),
                    self.name,
                    quoted(name),
                    self.name
                )));
            }
        }
        Ok(())
    }

    fn require_columns<'a>(
        &self,
        required: impl Iterator<Item = (&'static str, &'a String, &'static [&'static str])>,
    ) -> Result<()> {
        let mut errors = Vec::new();
        for (key, name, kinds) in required {
            match self.columns.get(name) {
                None => errors.push(format!("no column {} (configure its name with {key})", quoted(name))),
                Some(column) if !kinds.is_empty() && !kinds.contains(&column.kind.as_str()) => errors.push(format!(
                    "a column {} of type {} (supported types: {})",
                    quoted(name),
                    column.kind,
                    kinds.join(", ")
                )),
                Some(_) => {}
            }
        }
        if errors.is_empty() {
            return Ok(());
        }
        Err(StoreError::Setup(format!("the table {} has {}", self.name, errors.join("; "))))
    }

    /// Returns SQL that converts milliseconds to the type of this column. A column without a time zone stores UTC.
    fn time_value(&self, column: &str, argument: &str) -> String {
        let time_value = format!("to_timestamp({argument}::double precision / 1000)");
        if self.columns[column].kind == "timestamp" { format!("{time_value} AT TIME ZONE 'UTC'") } else { time_value }
    }
}

const ANY: &[&str] = &[];
const IDS: &[&str] = &["uuid", "text", "varchar", "bpchar", "int8", "int4"];
const TEXTS: &[&str] = &["text", "varchar", "bpchar"];
const PAYLOADS: &[&str] = &["text", "varchar", "json", "jsonb"];
const TIMES: &[&str] = &["timestamptz", "timestamp"];
const NUMBERS: &[&str] = &["int2", "int4", "int8"];

fn select_pending_sql(mapping: &ExternalMapping, table: &Table) -> String {
    let names = &mapping.columns;
    let [id, payload, occurred, attempts] =
        [&names.id, &names.payload, &names.occurred_at, &names.attempts].map(|name| quoted(name));
    let id_type = &table.columns[&names.id].kind;
    let correlation = names.correlation_id.as_ref().map_or_else(|| "NULL".to_owned(), |name| quoted(name));
    let mut order: Vec<String> = mapping.order_by.iter().map(|name| quoted(name)).collect();
    if order.is_empty() {
        order.push(occurred.clone());
        // Rows with equal times are ordered by id if ids are numeric.
        order.extend(id_type.starts_with("int").then(|| id.clone()));
    }
    // An infinite time cannot be converted to a number. A payload that is too large is not fetched.
    format!(
        "SELECT {id}::text, {kind}::text,
                CASE WHEN octet_length({payload}::text) <= {MAX_PAYLOAD_BYTES} THEN {payload}::text END,
                {payload} IS NULL,
                CASE WHEN isfinite({occurred}) THEN (extract(epoch FROM {occurred}) * 1000)::int8 END,
                {correlation}::text
         FROM {table}
         WHERE {dispatched} IS NULL AND coalesce({attempts}, 0) < {MAX_ATTEMPTS} AND NOT {id} = ANY ($1::text[]::{id_type}[])
           AND ($3::text IS NULL OR {kind} = $3)
         ORDER BY {order} LIMIT $2 FOR UPDATE SKIP LOCKED",
        kind = quoted(&names.kind),
        dispatched = quoted(&names.dispatched_at),
        table = table.name,
        order = order.join(", "),
    )
}

/// Returns the statement for `count_pending`. It counts rows in the order of their time, so that it can stop at the limit with the
/// index of pending rows.
fn count_pending_sql(mapping: &ExternalMapping, table: &Table) -> String {
    let names = &mapping.columns;
    let occurred = quoted(&names.occurred_at);
    format!(
        "SELECT count(*), (extract(epoch FROM min(at) FILTER (WHERE isfinite(at))) * 1000)::int8
         FROM (SELECT {occurred} AS at FROM {table}
               WHERE {dispatched} IS NULL AND coalesce({attempts}, 0) < {MAX_ATTEMPTS} AND ($1::text IS NULL OR {kind} = $1)
               ORDER BY {occurred} LIMIT {COUNTED}) pending",
        table = table.name,
        dispatched = quoted(&names.dispatched_at),
        attempts = quoted(&names.attempts),
        kind = quoted(&names.kind),
    )
}

fn mark_dispatched_sql(mapping: &ExternalMapping, table: &Table) -> String {
    let names = &mapping.columns;
    format!(
        "UPDATE {} SET {} = {} WHERE {} = ANY ($1::text[]::{}[])",
        table.name,
        quoted(&names.dispatched_at),
        table.time_value(&names.dispatched_at, "$2::int8"),
        quoted(&names.id),
        table.columns[&names.id].kind
    )
}

fn record_rejection_sql(mapping: &ExternalMapping, table: &Table) -> String {
    let names = &mapping.columns;
    let [attempts, error, id] = [&names.attempts, &names.error, &names.id].map(|name| quoted(name));
    let reason = match table.columns[&names.error].length {
        Some(length) => format!("left($2::text, {length})"),
        None => "$2::text".to_owned(),
    };
    format!(
        "UPDATE {} SET {attempts} = coalesce({attempts}, 0) + 1, {error} = {reason} WHERE {id} = $1::text::{} RETURNING {attempts}::int8",
        table.name, table.columns[&names.id].kind
    )
}

fn processed_sql(mapping: &ExternalMapping, processed_table: &Table, id_type: &str) -> Result<(String, String)> {
    let (id, at) = (&mapping.processed_id, &mapping.processed_at);
    processed_table.require_columns([("processed_id", id, IDS), ("processed_at", at, TIMES)].into_iter())?;
    let processed_id_type = &processed_table.columns[id].kind;
    let both_text = TEXTS.contains(&processed_id_type.as_str()) && TEXTS.contains(&id_type);
    let both_numbers = processed_id_type.starts_with("int") && id_type.starts_with("int");
    if processed_id_type != id_type && !both_text && !both_numbers {
        return Err(StoreError::Setup(format!(
            "the column {} of the table {} has type {processed_id_type}, but the ids of {} have type {id_type}; use the same type for both",
            quoted(id),
            processed_table.name,
            mapping.qualified(&mapping.table)
        )));
    }
    let name = quoted(id);
    let read = format!(
        "SELECT {name}::text FROM {} WHERE {name} = ANY ($1::text[]::{processed_id_type}[])",
        processed_table.name
    );
    // Another transaction may have recorded an id meanwhile.
    let write = format!(
        "INSERT INTO {} ({name}, {}) SELECT id, {} FROM unnest($1::text[]::{processed_id_type}[]) AS sent(id) ON CONFLICT DO NOTHING",
        processed_table.name,
        quoted(at),
        processed_table.time_value(at, "$2::int8")
    );
    Ok((read, write))
}

/// Returns the statement for `move_to_dlq`. It moves whole rows, including columns that only the application knows.
fn move_to_dlq_sql(mapping: &ExternalMapping, table: &Table, dead: &Table) -> Result<String> {
    let stored = table.columns.iter().filter(|(_, column)| !column.is_generated);
    let missing: Vec<String> =
        stored.clone().filter(|(name, _)| !dead.columns.contains_key(*name)).map(|(name, _)| quoted(name)).collect();
    if !missing.is_empty() {
        return Err(StoreError::Setup(format!(
            "the table {} lacks columns of {}: {}; create it with CREATE TABLE {} (LIKE {})",
            dead.name,
            table.name,
            missing.join(", "),
            dead.name,
            table.name
        )));
    }
    let columns: Vec<String> = stored.map(|(name, _)| quoted(name)).collect();
    let columns = columns.join(", ");
    Ok(format!(
        "WITH moved AS (DELETE FROM {} WHERE {} = ANY ($1::text[]::{}[]) RETURNING {columns})
         INSERT INTO {} ({columns}) OVERRIDING SYSTEM VALUE SELECT {columns} FROM moved",
        table.name,
        quoted(&mapping.columns.id),
        table.columns[&mapping.columns.id].kind,
        dead.name
    ))
}
