//! Pages of a list of jobs: where a page starts, how the list is sorted, and what the answer contains.
//!
//! Ids sort by creation time, and lanes have one priority each, so indexes give both orders. Any other order sorts the newest
//! `COUNT_LIMIT` jobs: an index on the time of the last change would slow down every claim and completion.

use std::{fmt, str::FromStr};

use faena_domain::{FieldError, JobId, JobView, Priority};

use crate::{
    Filter, Result, StoreError,
    lists::{COUNT_LIMIT, Span},
};

/// One page of a list of jobs.
#[derive(Clone, Copy, Debug)]
pub struct Page {
    pub start: Start,
    pub limit: usize,
    pub sort: Sort,
}

impl Page {
    /// Returns the page that skips `offset` jobs, newest first.
    pub fn offset(offset: usize, limit: usize) -> Page {
        Page { start: Start::Offset(offset), limit, sort: Sort::default() }
    }

    /// Returns the page after (older than) this job, newest first. `None`: the first page.
    pub fn after(id: Option<JobId>, limit: usize) -> Page {
        let cursor = id.map(Cursor::created);
        Page { start: Start::After(cursor), limit, sort: Sort::default() }
    }

    pub fn sorted(self, by: SortBy, order: Order) -> Page {
        Page { sort: Sort { by, order }, ..self }
    }
}

#[derive(Clone, Copy, Debug)]
pub enum Start {
    Offset(usize),
    /// `None`: from the first job on.
    After(Option<Cursor>),
}

/// Order of a list. Jobs with the same value are in the order of their creation.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Sort {
    pub by: SortBy,
    pub order: Order,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum SortBy {
    #[default]
    Created,
    /// `updatedAt`. Exact up to [`crate::COUNT_LIMIT`] jobs; if there are more, only the newest are sorted.
    Updated,
    /// `scheduledAt`, or the creation time of a job without one. Bounded like `Updated`.
    Scheduled,
    Priority,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Order {
    Asc,
    #[default]
    Desc,
}

/// The last job of a page, after which the next page starts.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Cursor {
    pub by: SortBy,
    /// The value by which the list is sorted; 0 if that is the creation time, which the id contains.
    pub key: i64,
    pub id: JobId,
}

impl Cursor {
    pub fn created(id: JobId) -> Cursor {
        Cursor { by: SortBy::Created, key: 0, id }
    }
}

impl fmt::Display for Cursor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let sort = match self.by {
            SortBy::Created => return write!(f, "{}", self.id),
            SortBy::Updated => 'u',
            SortBy::Scheduled => 's',
            SortBy::Priority => 'p',
        };
        write!(f, "{sort}{}_{}", self.key, self.id)
    }
}

impl FromStr for Cursor {
    type Err = ();

    fn from_str(text: &str) -> std::result::Result<Cursor, ()> {
        let Some((key, id)) = text.split_once('_') else {
            return text.parse().map(Cursor::created).map_err(|_| ());
        };
        let (by, key) = if let Some(key) = key.strip_prefix('u') {
            (SortBy::Updated, key)
        } else if let Some(key) = key.strip_prefix('s') {
            (SortBy::Scheduled, key)
        } else {
            (SortBy::Priority, key.strip_prefix('p').ok_or(())?)
        };
        Ok(Cursor { by, key: key.parse().map_err(|_| ())?, id: id.parse().map_err(|_| ())? })
    }
}

/// Ids of matching jobs, in the order of the list.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct JobIdPage {
    pub ids: Vec<JobId>,
    /// Where the next page starts. `None`: this was the last page.
    pub next: Option<JobId>,
}

#[derive(Clone, Debug, Default)]
pub struct JobPage {
    pub jobs: Vec<JobView>,
    pub total: u64,
    /// `false`: at least `total` jobs match; counting all would take too long.
    pub total_is_exact: bool,
    /// The `cursor` of the next page.
    pub next: Option<Cursor>,
    /// Whether the search stopped at its bound before the page was full. `next` continues it.
    pub is_partial: bool,
    /// `false`: only the newest matching jobs were sorted.
    pub sort_is_exact: bool,
}

/// Returns how many jobs a page skips, and after which job it starts.
pub fn page_start(page: Page) -> Result<(usize, Option<Cursor>)> {
    let invalid = |path: &str, message: String| Err(StoreError::Invalid(vec![FieldError::new(path, message)]));
    match page.start {
        Start::Offset(offset) if offset.saturating_add(page.limit) > COUNT_LIMIT => invalid(
            "page",
            format!("pages end at job {COUNT_LIMIT}; to read on, pass the nextCursor of the last page as cursor"),
        ),
        Start::Offset(offset) => Ok((offset, None)),
        Start::After(Some(cursor)) if cursor.by != page.sort.by => {
            invalid("cursor", "belongs to a list with another sort; begin with an empty cursor".into())
        }
        Start::After(cursor) => Ok((0, cursor)),
    }
}

/// Jobs of a page, in its order.
pub struct Listed {
    pub ids: Vec<JobId>,
    pub next: Option<Cursor>,
    pub is_partial: bool,
    pub sort_is_exact: bool,
}

/// A page of a list by priority: one search per priority, until the page is full.
pub struct PriorityPage {
    filter: Filter,
    /// Priorities that are not searched yet.
    remaining: std::vec::IntoIter<Priority>,
    after: Option<Cursor>,
    offset: usize,
    limit: usize,
    order: Order,
    /// The priority that is being searched.
    current: Priority,
    wanted: usize,
    found: Vec<(Priority, JobId)>,
    is_exact: bool,
}

impl PriorityPage {
    pub fn new(filter: &Filter, page: Page) -> Result<PriorityPage> {
        let (offset, after) = page_start(page)?;
        let reached = after.and_then(|cursor| Priority::from_rank(i16::try_from(cursor.key).ok()?));
        let mut remaining = Priority::ALL.to_vec();
        remaining.retain(|priority| filter.priorities.is_empty() || filter.priorities.contains(priority));
        remaining.retain(|priority| match (reached, page.sort.order) {
            (None, _) => true,
            (Some(reached), Order::Desc) => *priority <= reached,
            (Some(reached), Order::Asc) => *priority >= reached,
        });
        if page.sort.order == Order::Desc {
            remaining.reverse();
        }
        Ok(PriorityPage {
            filter: filter.clone(),
            remaining: remaining.into_iter(),
            after,
            offset,
            limit: page.limit,
            order: page.sort.order,
            current: Priority::default(),
            wanted: 0,
            found: Vec::new(),
            is_exact: true,
        })
    }

    /// Returns the next search, unless the page is full.
    pub fn next_search(&mut self) -> Option<(Filter, Span)> {
        self.wanted = (self.offset + self.limit).saturating_sub(self.found.len());
        if self.wanted == 0 {
            return None;
        }
        self.current = self.remaining.next()?;
        let after = self.after.filter(|cursor| cursor.key == i64::from(self.current.rank()));
        let after = after.map(|cursor| cursor.id);
        let span = Span { after, up_to: None, offset: 0, limit: self.wanted, order: self.order };
        Some((Filter { priorities: vec![self.current], ..self.filter.clone() }, span))
    }

    pub fn add(&mut self, page: JobIdPage) {
        // A search that ended at its bound may have missed jobs of this priority.
        self.is_exact &= page.next.is_none() || page.ids.len() == self.wanted;
        self.found.extend(page.ids.into_iter().map(|id| (self.current, id)));
    }

    pub fn listed(self) -> Listed {
        let page: Vec<(Priority, JobId)> = self.found.into_iter().skip(self.offset).take(self.limit).collect();
        let last = page.last().filter(|_| page.len() == self.limit);
        Listed {
            next: last.map(|(priority, id)| Cursor { by: SortBy::Priority, key: priority.rank().into(), id: *id }),
            ids: page.into_iter().map(|(_, id)| id).collect(),
            is_partial: false,
            sort_is_exact: self.is_exact,
        }
    }
}

/// Returns a page of jobs that are sorted by these keys.
pub fn page_by_key(mut jobs: Vec<(i64, JobId)>, page: Page, sort_is_exact: bool) -> Result<Listed> {
    let (offset, cursor) = page_start(page)?;
    jobs.sort_unstable();
    if page.sort.order == Order::Desc {
        jobs.reverse();
    }
    let after = cursor.map(|cursor| (cursor.key, cursor.id));
    jobs.retain(|job| match (after, page.sort.order) {
        (None, _) => true,
        (Some(after), Order::Desc) => *job < after,
        (Some(after), Order::Asc) => *job > after,
    });
    let more = jobs.len() > offset + page.limit;
    let shown: Vec<(i64, JobId)> = jobs.into_iter().skip(offset).take(page.limit).collect();
    let last = shown.last().filter(|_| more);
    Ok(Listed {
        next: last.map(|(key, id)| Cursor { by: page.sort.by, key: *key, id: *id }),
        ids: shown.into_iter().map(|(_, id)| id).collect(),
        is_partial: false,
        sort_is_exact,
    })
}
