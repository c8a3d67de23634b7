//! Tables, the main tool of the pages.

use askama::Template;

use crate::{markup::Markup, texts::Texts};

/// A table. The first link of a row is that of the whole row.
#[derive(Template, Default)]
#[template(path = "table.html")]
pub struct Table {
    pub columns: Vec<Column>,
    pub rows: Vec<Row>,
    /// Shown if there are no rows.
    pub empty: Markup,
    /// Label of the boxes that select rows; absent: rows cannot be selected.
    pub select_label: Option<&'static str>,
}

pub struct Column {
    pub title: &'static str,
    pub class: &'static str,
}

pub struct Row {
    /// What stays the same while the row changes.
    pub key: String,
    pub cells: Vec<Cell>,
}

pub struct Cell {
    content: Markup,
    class: &'static str,
    /// Whole text of a cell that may be cut.
    title: String,
}

/// Returns a column of text.
pub fn text_column(title: &'static str) -> Column {
    Column { title, class: "" }
}

/// Returns a column of numbers.
pub fn number_column(title: &'static str) -> Column {
    Column { title, class: "num" }
}

/// Returns a column that narrow screens leave out.
pub fn extra_column(title: &'static str) -> Column {
    Column { title, class: "hide" }
}

#[derive(Template)]
#[template(ext = "html", source = "{{ text }}")]
struct Plain<'a> {
    text: &'a str,
}

#[derive(Template)]
#[template(ext = "html", source = r#"<a class="{{ class }}" href="{{ href }}">{{ text }}</a>"#)]
struct Anchor<'a> {
    class: &'a str,
    href: &'a str,
    text: &'a str,
}

/// Returns text as HTML.
pub fn escaped(text: &str) -> Markup {
    Markup::of(&Plain { text })
}

/// Returns a link.
pub fn anchor(href: &str, text: &str) -> Markup {
    Markup::of(&Anchor { class: "", href, text })
}

impl Cell {
    pub fn text(text: &str) -> Cell {
        Cell { content: escaped(text), class: "", title: text.to_owned() }
    }

    pub fn number(text: &str) -> Cell {
        Cell { content: escaped(text), class: "num", title: String::new() }
    }

    pub fn markup(content: Markup) -> Cell {
        Cell { content, class: "", title: String::new() }
    }

    pub fn link(href: &str, text: &str) -> Cell {
        Cell { content: Markup::of(&Anchor { class: "strong", href, text }), class: "", title: text.to_owned() }
    }

    /// Returns the cell of a column that narrow screens leave out.
    pub fn extra(self) -> Cell {
        Cell { class: if self.class == "num" { "num hide" } else { "hide" }, ..self }
    }

    pub fn right(self) -> Cell {
        Cell { class: "num", ..self }
    }
}

/// Where a list is cut into pages.
#[derive(Template)]
#[template(path = "pager.html")]
pub struct Pager {
    pub t: &'static Texts,
    pub summary: String,
    pub previous: Option<String>,
    pub next: Option<String>,
}
