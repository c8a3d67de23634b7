//! The tables of the pages.

use askama::Template;

use crate::{markup::Markup, texts::Texts};

/// A table. The first link in a row applies to the whole row.
#[derive(Template, Default)]
#[template(path = "table.html")]
pub struct Table {
    pub columns: Vec<Column>,
    pub rows: Vec<Row>,
    /// Shown if there are no rows.
    pub empty: Markup,
    /// Label of the checkboxes that select rows; absent: rows cannot be selected.
    pub select_label: Option<&'static str>,
}

pub struct Column {
    pub title: &'static str,
    pub class: &'static str,
}

pub struct Row {
    /// Identifies the row while its cells change.
    pub key: String,
    pub cells: Vec<Cell>,
}

pub struct Cell {
    content: Markup,
    class: Vec<&'static str>,
    /// Full text of a cell whose content may be truncated.
    title: String,
}

impl Table {
    /// Leaves out a column.
    pub fn without_column(mut self, index: usize) -> Table {
        self.columns.remove(index);
        for row in &mut self.rows {
            row.cells.remove(index);
        }
        self
    }
}

/// Returns a column of text.
pub fn text_column(title: &'static str) -> Column {
    Column { title, class: "" }
}

/// Returns a column of numbers.
pub fn number_column(title: &'static str) -> Column {
    Column { title, class: "num" }
}

/// Returns a column that narrow tables hide.
pub fn extra_column(title: &'static str) -> Column {
    Column { title, class: "hide" }
}

/// Returns a column of numbers that narrow tables hide.
pub fn extra_number_column(title: &'static str) -> Column {
    Column { title, class: "num hide" }
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

/// The second line of a row in a narrow table: a state, and the most useful fact about it.
#[derive(Template)]
#[template(ext = "html", source = "{{ state }} {{ fact }}")]
pub struct StateAndFact<'a> {
    pub state: &'a Markup,
    pub fact: &'a Markup,
}

#[derive(Template)]
#[template(ext = "html", source = r#"{{ content }}<span class="note">{{ note }}</span>"#)]
struct Noted<'a> {
    content: &'a Markup,
    note: &'a Markup,
}

impl Cell {
    pub fn text(text: &str) -> Cell {
        Cell { content: escaped(text), class: Vec::new(), title: text.to_owned() }
    }

    pub fn number(text: &str) -> Cell {
        Cell { content: escaped(text), class: vec!["num"], title: String::new() }
    }

    pub fn markup(content: Markup) -> Cell {
        Cell { content, class: Vec::new(), title: String::new() }
    }

    pub fn link(href: &str, text: &str) -> Cell {
        Cell {
            content: Markup::of(&Anchor { class: "strong", href, text }),
            class: vec!["main"],
            title: text.to_owned(),
        }
    }

    pub fn content(&self) -> &Markup {
        &self.content
    }

    /// Adds a second line, which narrow tables show instead of the hidden column with the same value.
    pub fn note(mut self, note: &Markup) -> Cell {
        self.content = Markup::of(&Noted { content: &self.content, note });
        self
    }

    /// Sets the text on hover.
    pub fn titled(mut self, title: &str) -> Cell {
        title.clone_into(&mut self.title);
        self
    }

    /// Returns the cell of a column that narrow tables hide.
    pub fn extra(self) -> Cell {
        self.with("hide")
    }

    pub fn right(self) -> Cell {
        self.with("num")
    }

    /// Returns a cell that fills the remaining width.
    pub fn long(self) -> Cell {
        self.with("long")
    }

    /// Adds a class of the style sheet.
    pub fn with(mut self, class: &'static str) -> Cell {
        self.class.push(class);
        self
    }

    fn classes(&self) -> String {
        self.class.join(" ")
    }
}

/// Links to the other pages of a list.
#[derive(Template)]
#[template(path = "pager.html")]
pub struct Pager {
    pub t: &'static Texts,
    pub summary: String,
    pub previous: Option<String>,
    pub next: Option<String>,
}
