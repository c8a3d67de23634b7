//! How Faena reads an application's outbox: the names of tables and columns, the lock, and the size of a batch.

use std::fmt::Write;

/// Names and settings of an application's outbox. The default names are those of `faena outbox init-sql`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ExternalMapping {
    /// `None`: where the search path of the connection finds the tables.
    pub schema: Option<String>,
    pub table: String,
    pub columns: ExternalColumns,
    /// Which events were processed, and when. `None`: not recorded.
    pub processed_table: Option<String>,
    pub processed_id: String,
    pub processed_at: String,
    /// Table for rows that were rejected too often. `None`: they stay in the outbox, with their attempts.
    pub dead_table: Option<String>,
    /// The columns by which rows are ordered. Empty: the time at which they occurred.
    pub order_by: Vec<String>,
    /// The number of the advisory lock under which one node at a time reads the table.
    pub lock: i64,
    pub batch: u32,
    /// The channel on which the application sends notifications, if it does.
    pub channel: Option<String>,
}

/// Names of the columns of an application's outbox.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ExternalColumns {
    pub id: String,
    pub kind: String,
    pub payload: String,
    pub occurred_at: String,
    pub dispatched_at: String,
    pub attempts: String,
    pub error: String,
    pub correlation_id: Option<String>,
}

impl Default for ExternalMapping {
    fn default() -> Self {
        ExternalMapping {
            schema: None,
            table: "OutboxMessages".into(),
            columns: ExternalColumns::default(),
            processed_table: Some("ProcessedEvents".into()),
            processed_id: "EventId".into(),
            processed_at: "ProcessedAt".into(),
            dead_table: None,
            order_by: Vec::new(),
            lock: 42,
            batch: 50,
            channel: None,
        }
    }
}

impl Default for ExternalColumns {
    fn default() -> Self {
        ExternalColumns {
            id: "Id".into(),
            kind: "Type".into(),
            payload: "PayloadJson".into(),
            occurred_at: "OccurredAt".into(),
            dispatched_at: "DispatchedAt".into(),
            attempts: "Attempts".into(),
            error: "Error".into(),
            correlation_id: Some("CorrelationId".into()),
        }
    }
}

impl ExternalMapping {
    /// Returns the default mapping with names in snake case.
    pub fn in_snake_case() -> ExternalMapping {
        ExternalMapping {
            table: "outbox_messages".into(),
            columns: ExternalColumns {
                id: "id".into(),
                kind: "type".into(),
                payload: "payload".into(),
                occurred_at: "occurred_at".into(),
                dispatched_at: "dispatched_at".into(),
                attempts: "attempts".into(),
                error: "error".into(),
                correlation_id: Some("correlation_id".into()),
            },
            processed_table: Some("processed_events".into()),
            processed_id: "event_id".into(),
            processed_at: "processed_at".into(),
            dead_table: None,
            ..ExternalMapping::default()
        }
    }

    /// Returns the name of a table for a statement.
    pub(super) fn qualified(&self, table: &str) -> String {
        match &self.schema {
            Some(schema) => format!("{}.{}", quoted(schema), quoted(table)),
            None => quoted(table),
        }
    }

    /// Returns the statements that create these tables, for the application to run.
    pub fn init_sql(&self) -> String {
        let columns = &self.columns;
        let table = self.qualified(&self.table);
        let (occurred, dispatched) = (quoted(&columns.occurred_at), quoted(&columns.dispatched_at));
        let mut sql =
            String::from("-- Messages to publish after commit: insert them in the transaction of the change.\n");
        let mut columns_sql = vec![
            format!("{} uuid PRIMARY KEY DEFAULT gen_random_uuid()", quoted(&columns.id)),
            format!("{} text NOT NULL", quoted(&columns.kind)),
            format!("{} jsonb NOT NULL", quoted(&columns.payload)),
            format!("{occurred} timestamptz NOT NULL DEFAULT now()"),
            format!("{dispatched} timestamptz"),
            format!("{} integer NOT NULL DEFAULT 0", quoted(&columns.attempts)),
            format!("{} text", quoted(&columns.error)),
        ];
        columns_sql.extend(columns.correlation_id.as_ref().map(|name| format!("{} text", quoted(name))));
        let body = columns_sql.join(",\n    ");
        // Writing to a String cannot fail.
        let _ = write!(sql, "CREATE TABLE IF NOT EXISTS {table} (\n    {body}\n);\n");
        let index = quoted(&format!("IX_{}_{}", self.table, columns.occurred_at));
        let _ = writeln!(sql, "CREATE INDEX IF NOT EXISTS {index} ON {table} ({occurred}) WHERE {dispatched} IS NULL;");
        if let Some(processed) = &self.processed_table {
            let (id, at) = (quoted(&self.processed_id), quoted(&self.processed_at));
            let index = quoted(&format!("IX_{processed}_{}", self.processed_at));
            let processed = self.qualified(processed);
            let _ = write!(
                sql,
                "\n-- Messages that have been published.\nCREATE TABLE IF NOT EXISTS {processed} (\n    {id} uuid PRIMARY KEY,\n    {at} timestamptz NOT NULL\n);\nCREATE INDEX IF NOT EXISTS {index} ON {processed} ({at});\n"
            );
        }
        if let Some(dead) = &self.dead_table {
            let dead = self.qualified(dead);
            let _ = write!(
                sql,
                "\n-- Messages that were rejected too often; to publish one again, insert it into the table above.\nCREATE TABLE IF NOT EXISTS {dead} (LIKE {table} INCLUDING DEFAULTS INCLUDING INDEXES);\n"
            );
        }
        sql
    }
}

/// Quotes a name for SQL, whatever it contains.
pub(super) fn quoted(name: &str) -> String {
    format!("\"{}\"", name.replace('"', "\"\""))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_quote_in_a_name_is_escaped() {
        assert_eq!(quoted("Outbox"), "\"Outbox\"");
        assert_eq!(quoted("x\" ; DROP TABLE y; --"), "\"x\"\" ; DROP TABLE y; --\"");
    }

    #[test]
    fn the_tables_are_created_with_their_default_names() {
        let sql = ExternalMapping { dead_table: Some("DeadMessages".into()), ..ExternalMapping::default() }.init_sql();
        let expected = r#"-- Messages to publish after commit: insert them in the transaction of the change.
CREATE TABLE IF NOT EXISTS "OutboxMessages" (
    "Id" uuid PRIMARY KEY DEFAULT gen_random_uuid(),
    "Type" text NOT NULL,
    "PayloadJson" jsonb NOT NULL,
    "OccurredAt" timestamptz NOT NULL DEFAULT now(),
    "DispatchedAt" timestamptz,
    "Attempts" integer NOT NULL DEFAULT 0,
    "Error" text,
    "CorrelationId" text
);
CREATE INDEX IF NOT EXISTS "IX_OutboxMessages_OccurredAt" ON "OutboxMessages" ("OccurredAt") WHERE "DispatchedAt" IS NULL;

-- Messages that have been published.
CREATE TABLE IF NOT EXISTS "ProcessedEvents" (
    "EventId" uuid PRIMARY KEY,
    "ProcessedAt" timestamptz NOT NULL
);
CREATE INDEX IF NOT EXISTS "IX_ProcessedEvents_ProcessedAt" ON "ProcessedEvents" ("ProcessedAt");

-- Messages that were rejected too often; to publish one again, insert it into the table above.
CREATE TABLE IF NOT EXISTS "DeadMessages" (LIKE "OutboxMessages" INCLUDING DEFAULTS INCLUDING INDEXES);
"#;
        assert_eq!(sql, expected);
    }
}
