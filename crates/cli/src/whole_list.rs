//! Reads all pages of a list, up to a limit. For short lists, and lists that a user expects to see completely.

use std::process::ExitCode;

use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::{
    api::{Api, CommandError},
    output::print,
};

/// Entries per request. The server accepts at most 1000.
const PAGE: usize = 250;
const MAX_PAGES: u64 = 400;

/// Returns the first page of a list with the entries of all pages. `list` is the name of the field with the entries.
pub async fn read_pages(api: &Api, path: &str, list: &str) -> Result<Value, CommandError> {
    let page = |number: u64| api.get(path).query("page", number).query("limit", PAGE);
    let mut whole: Value = page(1).send().await?;
    let pages = whole["totalPages"].as_u64().unwrap_or(1).min(MAX_PAGES);
    for number in 2..=pages {
        let mut next: Value = page(number).send().await?;
        append(&mut whole[list], &mut next[list]);
    }
    Ok(whole)
}

/// Returns all entries of a list that continues after the `sequence` of an entry.
pub async fn read_after(api: &Api, path: &str, list: &str) -> Result<Value, CommandError> {
    let page = |after: u64| api.get(path).query("after", after).query("limit", PAGE);
    let mut whole: Value = page(0).send().await?;
    let mut read = whole[list].as_array().map_or(0, Vec::len);
    for _ in 1..MAX_PAGES {
        let Some(last) = whole[list].as_array().and_then(|entries| sequence(entries.last()?)) else { break };
        if read < PAGE {
            break;
        }
        let mut next: Value = page(last).send().await?;
        read = append(&mut whole[list], &mut next[list]);
    }
    Ok(whole)
}

/// Moves entries to the end of a list, and returns their number.
fn append(list: &mut Value, more: &mut Value) -> usize {
    let (Some(entries), Some(more)) = (list.as_array_mut(), more.as_array_mut()) else { return 0 };
    let count = more.len();
    entries.append(more);
    count
}

/// Returns the sequence of an entry. CloudEvents contain it as text.
fn sequence(entry: &Value) -> Option<u64> {
    entry["sequence"].as_u64().or_else(|| entry["sequence"].as_str()?.parse().ok())
}

/// Prints a list as JSON, or as `describe` does.
pub fn show<T: DeserializeOwned>(
    api: &Api,
    list: Value,
    describe: impl FnOnce(&T) -> String,
) -> Result<ExitCode, CommandError> {
    let text = match api.json {
        true => list.to_string(),
        false => describe(&serde_json::from_value(list).map_err(|error| CommandError::Other(error.to_string()))?),
    };
    print(&text);
    Ok(ExitCode::SUCCESS)
}
