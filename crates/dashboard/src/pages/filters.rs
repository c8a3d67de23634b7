//! Filters above a list: states as links with counts, and the other filters of the address.

use askama::Template;

use crate::{markup::Markup, texts::Texts};

/// A state that filters a list.
pub struct Chip {
    pub link: String,
    pub badge: Markup,
    pub is_current: bool,
}

#[derive(Template)]
#[template(path = "list_filters.html")]
pub struct ListFilters {
    pub t: &'static Texts,
    pub chips: Vec<Chip>,
    /// The names and values of the filters other than the state.
    pub active_filters: Vec<(&'static str, String)>,
    /// The list without these filters.
    pub clear: String,
}
