//! The paging rule of every list: `page` and `limit`, or `cursor`; the same information about the page in the body and in headers.

use std::{fmt::Display, str::FromStr};

use axum::{
    Json,
    http::{HeaderMap, HeaderValue},
};
use faena_store::COUNT_LIMIT;
use faena_wire::PageInfo;

use crate::{
    ApiError, ApiResult,
    request::{UNKNOWN_PARAMETER, parse_number, read_query},
};

/// Response of a list.
pub type ListResponse<T> = ApiResult<(HeaderMap, Json<T>)>;

/// Paging parameters of a request. `C` is what a cursor contains; a list that is read as a whole uses the position.
pub struct Paging<C> {
    pub limit: usize,
    max_limit: usize,
    page: Option<usize>,
    /// `Some(None)`: from the first entry on.
    cursor: Option<Option<C>>,
}

impl<C: FromStr> Paging<C> {
    /// Creates the paging of a list that can have millions of entries, such as jobs.
    pub fn new() -> Paging<C> {
        Paging { limit: 20, max_limit: 100, page: None, cursor: None }
    }

    /// Creates the paging of a list with few entries: queues, limits, workers, sinks.
    pub fn of_short_list() -> Paging<C> {
        Paging { limit: 100, max_limit: 1_000, page: None, cursor: None }
    }

    /// Sets a parameter. Returns `false` if it is not about paging.
    pub fn set(&mut self, name: &str, value: &str) -> Result<bool, String> {
        match name {
            "page" if self.cursor.is_some() => return Err("cannot be combined with cursor".into()),
            "cursor" if self.page.is_some() => return Err("cannot be combined with page".into()),
            "page" => self.page = Some(parse_number(value, 1_000_000)?),
            "limit" => self.limit = parse_number(value, self.max_limit)?,
            "cursor" => self.cursor = Some(parse_cursor(value)?),
            _ => return Ok(false),
        }
        Ok(true)
    }
}

impl<C: Copy + Display> Paging<C> {
    /// Returns the cursor; `Some(None)`: the list is read by cursor, from the first entry on.
    pub fn cursor(&self) -> Option<Option<C>> {
        self.cursor
    }

    /// Returns the entry after which the page starts.
    pub fn after(&self) -> Option<C> {
        self.cursor.flatten()
    }

    /// Returns how many entries the page skips. Fails if pages by number do not reach that far.
    pub fn offset(&self) -> ApiResult<usize> {
        let offset = (self.page.unwrap_or(1) - 1).saturating_mul(self.limit);
        if offset.saturating_add(self.limit) > COUNT_LIMIT {
            let message =
                format!("pages end at entry {COUNT_LIMIT}; to read on, pass the nextCursor of the last page as cursor");
            return Err(ApiError::invalid_field("page", message));
        }
        Ok(offset)
    }

    /// Describes a page. `total_pages` counts only pages that `page` can reach.
    pub fn page_info(&self, total: u64, total_is_exact: bool, next: Option<C>) -> PageInfo {
        let limit = self.limit as u64;
        PageInfo {
            total,
            total_is_exact,
            page: if self.cursor.is_some() { None } else { Some(self.page.unwrap_or(1) as u64) },
            limit,
            total_pages: total.div_ceil(limit).min(COUNT_LIMIT as u64 / limit),
            next_cursor: next.map(|cursor| cursor.to_string()),
            is_partial: false,
            sort_is_exact: true,
        }
    }
}

impl<C: Copy + Display> Paging<C> {
    /// Returns how many entries to read, including those that the page skips.
    pub fn wanted(&self) -> ApiResult<usize> {
        Ok(if self.cursor.is_some() { self.limit } else { self.offset()? + self.limit })
    }

    /// Returns the page of entries that were read with [`Paging::wanted`], after the cursor if there is one.
    ///
    /// `total` is counted up to `COUNT_LIMIT`. `cursor_of` returns the cursor that follows an entry.
    pub fn page_of_read<T>(
        &self,
        read: Vec<T>,
        total: u64,
        cursor_of: impl Fn(&T) -> C,
    ) -> ApiResult<(Vec<T>, PageInfo)> {
        let skipped = self.wanted()? - self.limit;
        let page: Vec<T> = read.into_iter().skip(skipped).collect();
        let next = page.last().filter(|_| page.len() == self.limit).map(cursor_of);
        let page_info = self.page_info(total, total < COUNT_LIMIT as u64, next);
        Ok((page, page_info))
    }
}

impl Paging<usize> {
    /// Returns the page of a list that is read as a whole.
    pub fn page_of_all<T>(&self, all: Vec<T>) -> (Vec<T>, PageInfo) {
        let total = all.len();
        let start = self.after().unwrap_or((self.page.unwrap_or(1) - 1).saturating_mul(self.limit));
        let end = start.saturating_add(self.limit);
        let page_info = self.page_info(total as u64, true, (end < total).then_some(end));
        (all.into_iter().skip(start).take(self.limit).collect(), page_info)
    }

    /// Returns how many entries to read of a list whose cursor is the position.
    pub fn wanted_by_position(&self) -> ApiResult<usize> {
        Ok(self.after().map_or(self.offset()?, |position| position.min(COUNT_LIMIT)) + self.limit)
    }

    /// Returns the page of entries that were read with [`Paging::wanted_by_position`].
    pub fn page_by_position<T>(&self, read: Vec<T>, total: u64) -> ApiResult<(Vec<T>, PageInfo)> {
        let end = self.wanted_by_position()?;
        let next = (end as u64) < total;
        let page_info = self.page_info(total, total < COUNT_LIMIT as u64, next.then_some(end));
        Ok((read.into_iter().skip(end - self.limit).collect(), page_info))
    }
}

/// Returns the response of a list.
pub fn respond<T>(page_info: PageInfo, list: impl FnOnce(PageInfo) -> T) -> ListResponse<T> {
    Ok((page_headers(&page_info), Json(list(page_info))))
}

/// Reads the parameters of a list without filters.
pub fn parse_paging(query: Option<&str>, mut paging: Paging<usize>) -> ApiResult<Paging<usize>> {
    read_query(query, &[], |name, value| match paging.set(name, &value)? {
        true => Ok(()),
        false => Err(UNKNOWN_PARAMETER.into()),
    })?;
    Ok(paging)
}

/// Parses a cursor; an empty one starts at the first entry.
fn parse_cursor<C: FromStr>(value: &str) -> Result<Option<C>, String> {
    if value.is_empty() {
        return Ok(None);
    }
    let cursor = value.parse().map(Some);
    cursor.map_err(|_| "must be the nextCursor of the previous page, or empty for the first page".into())
}

/// Returns the headers that describe a page.
fn page_headers(page_info: &PageInfo) -> HeaderMap {
    let mut headers = HeaderMap::new();
    headers.insert("x-total-count", HeaderValue::from(page_info.total));
    headers.insert("x-limit", HeaderValue::from(page_info.limit));
    headers.insert("x-total-pages", HeaderValue::from(page_info.total_pages));
    if let Some(page) = page_info.page {
        headers.insert("x-page", HeaderValue::from(page));
    }
    if let Some(cursor) = page_info.next_cursor.as_deref().and_then(|cursor| HeaderValue::from_str(cursor).ok()) {
        headers.insert("x-next-cursor", cursor);
    }
    for (name, is_set) in
        [("x-total-is-exact", !page_info.total_is_exact), ("x-sort-is-exact", !page_info.sort_is_exact)]
    {
        if is_set {
            headers.insert(name, HeaderValue::from_static("false"));
        }
    }
    if page_info.is_partial {
        headers.insert("x-is-partial", HeaderValue::from_static("true"));
    }
    headers
}
