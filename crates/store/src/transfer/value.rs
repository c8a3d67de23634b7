//! Values of rows in one form for both databases, and their checksum.

use std::{
    error::Error,
    time::{Duration, SystemTime},
};

use bytes::BytesMut;
use rusqlite::types::ValueRef;
use sha2::{Digest, Sha256};
use tokio_postgres::{
    Row,
    types::{FromSql, IsNull, ToSql, Type, to_sql_checked},
};
use uuid::Uuid;

use crate::{
    postgres::{end::storable, events::like},
    sqlite::events::from_glob,
};

/// Type of a column on PostgreSQL, which decides how a value of SQLite is converted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    Bool,
    Int2,
    Int4,
    Int8,
    Float,
    Text,
    Id,
    Bytes,
    /// 16 bytes per id on SQLite.
    Ids,
    /// Two bytes per number on SQLite, little endian.
    Int2s,
    /// Milliseconds since 1970 on SQLite.
    Time,
    /// Pattern of event types: for GLOB on SQLite, for LIKE on PostgreSQL.
    Pattern,
}

impl Kind {
    /// Returns the name of a value of this kind, for errors.
    fn description(self) -> &'static str {
        match self {
            Kind::Bool => "a boolean",
            Kind::Int2 | Kind::Int4 | Kind::Int8 => "an integer",
            Kind::Float => "a number",
            Kind::Text => "a text",
            Kind::Id => "an id",
            Kind::Bytes => "a byte string",
            Kind::Ids => "a list of ids",
            Kind::Int2s => "a list of integers",
            Kind::Time => "a time",
            Kind::Pattern => "a pattern",
        }
    }

    /// Returns the kind for the name of a PostgreSQL type.
    pub fn of_type(name: &str) -> Option<Kind> {
        Some(match name {
            "bool" => Kind::Bool,
            "int2" => Kind::Int2,
            "int4" => Kind::Int4,
            "int8" => Kind::Int8,
            "float8" => Kind::Float,
            "text" => Kind::Text,
            "uuid" => Kind::Id,
            "bytea" => Kind::Bytes,
            "_uuid" => Kind::Ids,
            "_int2" => Kind::Int2s,
            "timestamptz" => Kind::Time,
            _ => return None,
        })
    }

    pub fn postgres(self) -> Type {
        match self {
            Kind::Bool => Type::BOOL,
            Kind::Int2 => Type::INT2,
            Kind::Int4 => Type::INT4,
            Kind::Int8 => Type::INT8,
            Kind::Float => Type::FLOAT8,
            Kind::Text | Kind::Pattern => Type::TEXT,
            Kind::Id => Type::UUID,
            Kind::Bytes => Type::BYTEA,
            Kind::Ids => Type::UUID_ARRAY,
            Kind::Int2s => Type::INT2_ARRAY,
            Kind::Time => Type::TIMESTAMPTZ,
        }
    }
}

#[derive(Clone, PartialEq, Debug)]
pub enum Value {
    Null,
    Bool(bool),
    Int2(i16),
    Int4(i32),
    Int8(i64),
    Float(f64),
    Text(String),
    Id(Uuid),
    Bytes(Vec<u8>),
    Ids(Vec<Uuid>),
    Int2s(Vec<i16>),
    Time(SystemTime),
}

impl Value {
    /// Converts a value of SQLite. Fails with a description of the value if PostgreSQL cannot store it.
    pub fn from_sqlite(kind: Kind, value: ValueRef<'_>) -> Result<Value, String> {
        let outside = |n: i64| format!("the number {n} does not fit");
        Ok(match (kind, value) {
            (_, ValueRef::Null) => Value::Null,
            (Kind::Bool, ValueRef::Integer(n)) => Value::Bool(n != 0),
            (Kind::Int2, ValueRef::Integer(n)) => Value::Int2(i16::try_from(n).map_err(|_| outside(n))?),
            (Kind::Int4, ValueRef::Integer(n)) => Value::Int4(i32::try_from(n).map_err(|_| outside(n))?),
            (Kind::Int8, ValueRef::Integer(n)) => Value::Int8(n),
            (Kind::Float, ValueRef::Integer(n)) => Value::Float(n as f64),
            (Kind::Float, ValueRef::Real(x)) => Value::Float(x),
            (Kind::Time, ValueRef::Integer(ms)) => Value::Time(time(ms).ok_or_else(|| outside(ms))?),
            (Kind::Text, ValueRef::Text(text)) => Value::Text(storable(utf8(text)?).into_owned()),
            (Kind::Pattern, ValueRef::Text(text)) => Value::Text(like(&from_glob(utf8(text)?))),
            (Kind::Id, ValueRef::Blob(bytes)) => Value::Id(Uuid::from_slice(bytes).map_err(|e| e.to_string())?),
            (Kind::Bytes, ValueRef::Blob(bytes)) => Value::Bytes(bytes.to_vec()),
            (Kind::Ids, ValueRef::Blob(bytes)) if bytes.len().is_multiple_of(16) => {
                Value::Ids(bytes.as_chunks::<16>().0.iter().map(|id| Uuid::from_bytes(*id)).collect())
            }
            (Kind::Int2s, ValueRef::Blob(bytes)) if bytes.len().is_multiple_of(2) => {
                let numbers = bytes.as_chunks::<2>().0.iter().map(|pair| u16::from_le_bytes(*pair));
                Value::Int2s(numbers.map(|n| i16::try_from(n).unwrap_or(i16::MAX)).collect())
            }
            (kind, other) => {
                return Err(format!("a value of type {} is not {}", other.data_type(), kind.description()));
            }
        })
    }

    pub fn from_postgres(kind: Kind, row: &Row, at: usize) -> Result<Value, tokio_postgres::Error> {
        Ok(match kind {
            Kind::Bool => read(row, at, Value::Bool)?,
            Kind::Int2 => read(row, at, Value::Int2)?,
            Kind::Int4 => read(row, at, Value::Int4)?,
            Kind::Int8 => read(row, at, Value::Int8)?,
            Kind::Float => read(row, at, Value::Float)?,
            Kind::Text | Kind::Pattern => read(row, at, Value::Text)?,
            Kind::Id => read(row, at, Value::Id)?,
            Kind::Bytes => read(row, at, Value::Bytes)?,
            Kind::Ids => read(row, at, Value::Ids)?,
            Kind::Int2s => read(row, at, Value::Int2s)?,
            Kind::Time => read(row, at, Value::Time)?,
        })
    }

    /// Returns the approximate size of the value in memory.
    pub fn size_bytes(&self) -> usize {
        match self {
            Value::Text(text) => text.len(),
            Value::Bytes(bytes) => bytes.len(),
            Value::Ids(ids) => ids.len() * 16,
            Value::Int2s(numbers) => numbers.len() * 2,
            _ => 16,
        }
    }

    /// Appends the value with its type and length, so that different rows never have the same bytes.
    fn write_to(&self, out: &mut Vec<u8>) {
        match self {
            Value::Null => out.push(0),
            Value::Bool(value) => tagged(out, 1, &[u8::from(*value)]),
            Value::Int2(n) => tagged(out, 2, &n.to_le_bytes()),
            Value::Int4(n) => tagged(out, 3, &n.to_le_bytes()),
            Value::Int8(n) => tagged(out, 4, &n.to_le_bytes()),
            Value::Float(x) => tagged(out, 5, &x.to_bits().to_le_bytes()),
            Value::Text(text) => tagged(out, 6, text.as_bytes()),
            Value::Id(id) => tagged(out, 7, id.as_bytes()),
            Value::Bytes(bytes) => tagged(out, 8, bytes),
            Value::Ids(ids) => {
                tagged(out, 9, &(ids.len() as u64).to_le_bytes());
                ids.iter().for_each(|id| out.extend_from_slice(id.as_bytes()));
            }
            Value::Int2s(numbers) => {
                tagged(out, 10, &(numbers.len() as u64).to_le_bytes());
                numbers.iter().for_each(|n| out.extend_from_slice(&n.to_le_bytes()));
            }
            Value::Time(at) => {
                let since = at.duration_since(SystemTime::UNIX_EPOCH);
                tagged(out, 11, &since.map_or(0, |since| since.as_nanos()).to_le_bytes());
            }
        }
    }
}

fn tagged(out: &mut Vec<u8>, tag: u8, bytes: &[u8]) {
    out.push(tag);
    out.extend_from_slice(&(bytes.len() as u64).to_le_bytes());
    out.extend_from_slice(bytes);
}

fn utf8(text: &[u8]) -> Result<&str, String> {
    std::str::from_utf8(text).map_err(|error| error.to_string())
}

fn time(ms: i64) -> Option<SystemTime> {
    SystemTime::UNIX_EPOCH.checked_add(Duration::from_millis(u64::try_from(ms).ok()?))
}

fn read<'a, T: FromSql<'a>>(
    row: &'a Row,
    at: usize,
    value: impl FnOnce(T) -> Value,
) -> Result<Value, tokio_postgres::Error> {
    Ok(row.try_get::<_, Option<T>>(at)?.map_or(Value::Null, value))
}

impl ToSql for Value {
    fn to_sql(&self, ty: &Type, out: &mut BytesMut) -> Result<IsNull, Box<dyn Error + Sync + Send>> {
        match self {
            Value::Null => Ok(IsNull::Yes),
            Value::Bool(value) => value.to_sql(ty, out),
            Value::Int2(value) => value.to_sql(ty, out),
            Value::Int4(value) => value.to_sql(ty, out),
            Value::Int8(value) => value.to_sql(ty, out),
            Value::Float(value) => value.to_sql(ty, out),
            Value::Text(value) => value.to_sql(ty, out),
            Value::Id(value) => value.to_sql(ty, out),
            Value::Bytes(value) => value.to_sql(ty, out),
            Value::Ids(value) => value.to_sql(ty, out),
            Value::Int2s(value) => value.to_sql(ty, out),
            Value::Time(value) => value.to_sql(ty, out),
        }
    }

    /// The kind of the column decides the type of its values.
    fn accepts(_: &Type) -> bool {
        true
    }

    to_sql_checked!();
}

/// Number and checksum of rows, independent of their order: the sum of the SHA-256 of every row.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Checksum {
    pub rows: u64,
    halves: [u128; 2],
}

impl Checksum {
    /// Adds a row. The caller passes `buffer` so that its memory is reused.
    pub fn add(&mut self, row: &[Value], buffer: &mut Vec<u8>) {
        buffer.clear();
        row.iter().for_each(|value| value.write_to(buffer));
        let digest = Sha256::digest(&*buffer);
        let (first, second) = digest.split_at(16);
        for (sum, half) in self.halves.iter_mut().zip([first, second]) {
            let half = half.iter().fold(0_u128, |number, byte| number << 8 | u128::from(*byte));
            *sum = sum.wrapping_add(half);
        }
        self.rows += 1;
    }
}

impl std::fmt::Display for Checksum {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:032x}{:032x}", self.halves[0], self.halves[1])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn checksum(rows: &[&[Value]]) -> Checksum {
        let mut sum = Checksum::default();
        rows.iter().for_each(|row| sum.add(row, &mut Vec::new()));
        sum
    }

    #[test]
    fn the_order_of_rows_does_not_matter_and_every_value_does() {
        let text = |text: &str| Value::Text(text.into());
        let (first, second): (&[Value], &[Value]) =
            (&[text("ab"), Value::Null, Value::Int2(1)], &[text("a"), text("b"), Value::Int2(1)]);
        assert_eq!(checksum(&[first, second]), checksum(&[second, first]));
        assert_ne!(checksum(&[first, second]), checksum(&[first, first]));
        assert_ne!(checksum(&[first]), checksum(&[second]), "values are separated");
        assert_ne!(checksum(&[&[Value::Int2(1)]]), checksum(&[&[Value::Int4(1)]]), "types are part of it");
        assert_ne!(checksum(&[&[text("")]]), checksum(&[&[Value::Null]]));
        assert_ne!(checksum(&[first, first]), checksum(&[first]));
    }

    #[test]
    fn a_value_that_postgres_cannot_store_is_an_error_or_is_replaced() {
        let error = |kind, value| Value::from_sqlite(kind, value).expect_err("rejected");
        assert_eq!(error(Kind::Int2, ValueRef::Integer(40_000)), "the number 40000 does not fit");
        assert!(error(Kind::Id, ValueRef::Blob(b"short")).contains("length"));
        assert!(error(Kind::Ids, ValueRef::Blob(&[0; 17])).contains("not a list of ids"));
        assert!(error(Kind::Text, ValueRef::Integer(1)).contains("Integer"));
        assert_eq!(
            Value::from_sqlite(Kind::Text, ValueRef::Text(b"a\0b")),
            Ok(Value::Text("a\u{fffd}b".into())),
            "as the store itself would write it"
        );
        assert_eq!(
            Value::from_sqlite(Kind::Pattern, ValueRef::Text(b"job.*_[[]")),
            Ok(Value::Text("job.%\\_[".into()))
        );
    }
}
