//! Which tables and columns are moved: everything that both databases have.
//!
//! The tables are read from the databases, so a migration that adds a table needs no change here. A table or column
//! that only one database has must be listed below; otherwise it stops the move before it begins.

use std::collections::BTreeMap;

use super::value::Kind;
use crate::{Result, StoreError};

/// Tables that are not copied. `run_sequence` becomes the sequence `run`; the others describe their own database.
const NOT_COPIED: [&str; 5] = ["faena_schema", "run_sequence", "metrics_lease", "move", "move_progress"];

/// Columns that only PostgreSQL has, and the SQLite expression for their values.
const COMPUTED: [(&str, &str, &str); 2] = [("counter", "shard", "0"), ("lane", "retired", "0")];

/// Columns that only PostgreSQL has and that stay `NULL`.
const ABSENT: [(&str, &str); 1] = [("lane", "fence")];

/// Columns whose meaning does not follow from their type.
const SPECIAL: [(&str, &str, Kind); 1] = [("subscription_pattern", "pattern", Kind::Pattern)];

/// A column as a database describes it. Generated columns are left out.
#[derive(Debug)]
pub struct FoundColumn {
    pub table: String,
    pub name: String,
    /// PostgreSQL: name of the type. SQLite: absent, because its columns accept every type.
    pub kind: Option<String>,
    /// SQLite: index in the primary key, from 1; 0 if it is not part of it.
    pub key: i64,
}

/// A table that is moved.
#[derive(Debug)]
pub struct Table {
    pub name: String,
    pub columns: Vec<Column>,
    /// Columns of the primary key on SQLite, in order.
    key: Vec<String>,
}

#[derive(Debug)]
pub struct Column {
    pub name: String,
    pub kind: Kind,
    /// Expression of SQLite for a column that only PostgreSQL has.
    computed: Option<&'static str>,
}

impl Table {
    /// Returns a query for the rows of SQLite after the first `skip`, in the order of the primary key.
    pub fn sqlite_select(&self, skip: u64) -> String {
        let columns: Vec<String> = self
            .columns
            .iter()
            .map(|column| column.computed.map_or_else(|| quoted(&column.name), str::to_owned))
            .collect();
        let key: Vec<String> = self.key.iter().map(|name| quoted(name)).collect();
        let order = if key.is_empty() { "rowid".to_owned() } else { key.join(", ") };
        format!("SELECT {} FROM {} ORDER BY {order} LIMIT -1 OFFSET {skip}", columns.join(", "), quoted(&self.name))
    }

    pub fn postgres_select(&self) -> String {
        format!("SELECT {} FROM faena.{}", self.postgres_columns(), quoted(&self.name))
    }

    pub fn postgres_copy(&self) -> String {
        format!("COPY faena.{} ({}) FROM STDIN (FORMAT binary)", quoted(&self.name), self.postgres_columns())
    }

    fn postgres_columns(&self) -> String {
        let columns: Vec<String> = self.columns.iter().map(|column| quoted(&column.name)).collect();
        columns.join(", ")
    }
}

pub fn quoted(name: &str) -> String {
    format!("\"{}\"", name.replace('"', "\"\""))
}

/// Returns the tables to move. Fails if a table or a column exists in one of the databases only.
pub fn tables(sqlite: &[FoundColumn], postgres: &[FoundColumn]) -> Result<Vec<Table>> {
    let (source, target) = (by_table(sqlite), by_table(postgres));
    let mut problems: Vec<String> = Vec::new();
    for table in source.keys().filter(|name| !target.contains_key(*name)) {
        problems.push(format!("table {table} is missing on PostgreSQL"));
    }
    let mut tables = Vec::new();
    for (table, columns) in &target {
        match source.get(table) {
            Some(found) => tables.push(join(table, found, columns, &mut problems)),
            None => problems.push(format!("table {table} is missing on SQLite")),
        }
    }
    if problems.is_empty() {
        return Ok(tables);
    }
    Err(StoreError::Internal(
        format!("the two schemas differ, nothing was moved: {}; report this as a bug", problems.join(", ")).into(),
    ))
}

fn by_table(columns: &[FoundColumn]) -> BTreeMap<&str, Vec<&FoundColumn>> {
    let mut tables: BTreeMap<&str, Vec<&FoundColumn>> = BTreeMap::new();
    for column in columns.iter().filter(|column| !NOT_COPIED.contains(&column.table.as_str())) {
        tables.entry(&column.table).or_default().push(column);
    }
    tables
}

fn join(table: &str, source: &[&FoundColumn], target: &[&FoundColumn], problems: &mut Vec<String>) -> Table {
    for column in source.iter().filter(|column| !target.iter().any(|other| other.name == column.name)) {
        problems.push(format!("column {table}.{} is missing on PostgreSQL", column.name));
    }
    let mut columns = Vec::new();
    for FoundColumn { name, kind, .. } in target {
        if ABSENT.contains(&(table, name)) {
            continue;
        }
        let computed = COMPUTED.iter().find(|known| (known.0, known.1) == (table, name)).map(|known| known.2);
        if computed.is_none() && !source.iter().any(|other| other.name == *name) {
            problems.push(format!("column {table}.{name} is missing on SQLite"));
            continue;
        }
        let special = SPECIAL.iter().find(|known| (known.0, known.1) == (table, name)).map(|known| known.2);
        match special.or_else(|| Kind::of_type(kind.as_deref().unwrap_or_default())) {
            Some(kind) => columns.push(Column { name: name.clone(), kind, computed }),
            None => problems.push(format!("column {table}.{name} has a type that cannot be moved")),
        }
    }
    let mut key: Vec<&&FoundColumn> = source.iter().filter(|column| column.key > 0).collect();
    key.sort_by_key(|column| column.key);
    Table { name: table.to_owned(), columns, key: key.iter().map(|column| column.name.clone()).collect() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn column(table: &str, name: &str, kind: Option<&str>, key: i64) -> FoundColumn {
        FoundColumn { table: table.into(), name: name.into(), kind: kind.map(str::to_owned), key }
    }

    #[test]
    fn a_table_or_column_that_only_one_database_has_stops_the_move() {
        let source = [column("a", "x", None, 1), column("b", "x", None, 0), column("c", "x", None, 0)];
        let target = [
            column("a", "x", Some("int4"), 0),
            column("a", "y", Some("text"), 0),
            column("b", "z", Some("text"), 0),
            column("d", "x", Some("point"), 0),
            column("metrics_lease", "id", Some("int2"), 0),
        ];
        let error = tables(&source, &target).expect_err("rejected").to_string();
        for expected in [
            "table c is missing on PostgreSQL",
            "table d is missing on SQLite",
            "column a.y is missing on SQLite",
            "column b.x is missing on PostgreSQL",
        ] {
            assert!(error.contains(expected), "{expected}: {error}");
        }
        assert!(!error.contains("metrics_lease"), "{error}");
        let unknown = [column("a", "x", Some("point"), 0)];
        let error = tables(&source[..1], &unknown).expect_err("rejected").to_string();
        assert!(error.contains("column a.x has a type that cannot be moved"), "{error}");
    }

    #[test]
    fn rows_are_read_in_the_order_of_the_key_so_that_a_number_of_rows_is_a_position() {
        let source = [column("counter", "lane", None, 2), column("counter", "n", None, 1)];
        let target = ["shard", "lane", "n"].map(|name| column("counter", name, Some("int8"), 0));
        let table = tables(&source, &target).expect("tables").remove(0);
        assert_eq!(
            table.sqlite_select(7),
            "SELECT 0, \"lane\", \"n\" FROM \"counter\" ORDER BY \"n\", \"lane\" LIMIT -1 OFFSET 7"
        );
        assert_eq!(
            table.postgres_copy(),
            "COPY faena.\"counter\" (\"shard\", \"lane\", \"n\") FROM STDIN (FORMAT binary)"
        );
    }
}
