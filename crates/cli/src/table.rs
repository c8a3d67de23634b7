//! Tables with one line per row, without borders.
//!
//! On a terminal that is too narrow, the widest columns are cut, then the last columns are left out. Ids and states stay whole as
//! long as they fit. Nothing is cut or left out if the output goes to a file or another program.

use std::fmt;

use crate::{
    output::{one_line, paint, shorten, terminal_width, text_width, wrap},
    state_marks::word_colour,
};

const GAP: usize = 2;
/// Minimum width of a truncated column.
const MIN_WIDTH: usize = 10;
/// Columns that are not cut: ids to copy, and states to compare.
const KEPT: [&str; 5] = ["id", "job", "state", "status", "outcome"];
/// Columns whose words have a colour.
const COLOURED: [&str; 3] = ["state", "status", "outcome"];

pub struct Table {
    /// The header and the rows.
    rows: Vec<Vec<String>>,
}

/// Creates a table with this header. The most important columns come first.
pub fn table<const N: usize>(header: [&str; N]) -> Table {
    Table { rows: vec![header.map(ToOwned::to_owned).to_vec()] }
}

impl Table {
    /// Returns the table, or `text` if it has no rows: a header alone says nothing.
    pub fn or_text(self, text: &str) -> String {
        if self.rows.len() == 1 { wrap(text) } else { self.to_string() }
    }

    pub fn add_row<const N: usize>(&mut self, cells: [String; N]) {
        // A line break would end the row.
        self.rows.push(cells.map(|cell| one_line(&cell)).to_vec());
    }

    /// Returns the columns to show in `max` characters per line, each with its width.
    fn layout(&self, max: usize) -> Vec<(usize, usize)> {
        let columns = self.rows[0].len();
        let widest = |column: usize| self.rows.iter().map(|row| text_width(&row[column])).max().unwrap_or(0);
        let mut shown: Vec<(usize, usize)> = (0..columns).map(|column| (column, widest(column))).collect();
        let is_kept = |column: usize| column == 0 || KEPT.contains(&self.rows[0][column].as_str());
        let is_empty = |column: usize| self.rows[1..].iter().all(|row| row[column].is_empty());
        if excess(&shown, max) > 0 {
            shown.retain(|(column, _)| *column == 0 || !is_empty(*column));
        }
        loop {
            let cut = cut(&shown, max, |column| !is_kept(column), MIN_WIDTH);
            let last = shown.iter().rposition(|(column, _)| !is_kept(*column));
            match last {
                _ if excess(&cut, max) == 0 => return cut,
                Some(last) => shown.remove(last),
                // Only the id and the state are left.
                None if shown.len() > 1 => shown.pop().unwrap_or_default(),
                None => return self::cut(&shown, max, |_| true, 1),
            };
        }
    }

    fn render(&self, max: usize, paint_word: impl Fn(&str, &str) -> String) -> String {
        let layout = self.layout(max);
        let line = |(n, row): (usize, &Vec<String>)| {
            let mut line = String::new();
            for (index, &(column, width)) in layout.iter().enumerate() {
                let text = shorten(&row[column], width);
                let is_last = index + 1 == layout.len();
                let padding = if is_last { 0 } else { width.saturating_sub(text_width(&text)) + GAP };
                let title = &self.rows[0][column];
                let is_coloured = n > 0 && COLOURED.contains(&title.as_str());
                line.push_str(&if is_coloured { paint_word(&text, &row[column]) } else { text });
                line.extend(std::iter::repeat_n(' ', padding));
            }
            line.trim_end().to_owned()
        };
        self.rows.iter().enumerate().map(line).collect::<Vec<_>>().join("\n")
    }
}

/// Returns by how much a line is too wide.
fn excess(shown: &[(usize, usize)], max: usize) -> usize {
    let widths: usize = shown.iter().map(|(_, width)| width).sum();
    (widths + GAP * shown.len().saturating_sub(1)).saturating_sub(max)
}

/// Cuts the widest columns that may be cut until the line fits, or all of them have the width `min`.
fn cut(shown: &[(usize, usize)], max: usize, may_be_cut: impl Fn(usize) -> bool, min: usize) -> Vec<(usize, usize)> {
    let mut cut = shown.to_vec();
    for _ in 0..excess(shown, max).min(shown.iter().map(|(_, width)| width).sum()) {
        let widest = cut.iter_mut().filter(|(column, _)| may_be_cut(*column)).max_by_key(|(_, width)| *width);
        match widest {
            Some((_, width)) if *width > min => *width -= 1,
            _ => break,
        }
    }
    cut
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let painted = |text: &str, word: &str| paint(text, word_colour(word));
        f.write_str(&self.render(terminal_width().unwrap_or(usize::MAX), painted))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plain(table: &Table, max: usize) -> String {
        table.render(max, |text, _| text.to_owned())
    }

    #[test]
    fn control_characters_are_printable() {
        let mut table = table(["id", "error"]);
        table.add_row(["1".into(), "a\u{1b}[2Jb\r\nc\td".into()]);
        assert_eq!(plain(&table, usize::MAX), "id  error\n1   a\\u001b[2Jb c d");
    }

    #[test]
    fn an_empty_table_is_replaced_by_a_text() {
        assert_eq!(super::table(["id"]).or_text("no jobs"), "no jobs");
    }

    #[test]
    fn a_table_is_cut_then_its_last_columns_are_left_out() {
        let mut table = table(["id", "queue", "error"]);
        table.add_row(["018f0000-0000".into(), "mail".into(), "connection refused\nby the host".into()]);
        let whole = "id             queue  error\n018f0000-0000  mail   connection refused by the host";
        assert_eq!(plain(&table, usize::MAX), whole);
        assert_eq!(plain(&table, 36), "id             queue  error\n018f0000-0000  mail   connection re…");
        assert_eq!(plain(&table, 31), "id             queue\n018f0000-0000  mail");
        assert_eq!(plain(&table, 14), "id\n018f0000-0000");
        assert_eq!(plain(&table, 5), "id\n018f…");
    }

    #[test]
    fn an_empty_column_is_left_out_first_and_the_first_column_always_stays() {
        let mut table = table(["name", "note", "status"]);
        table.add_row(["a-long-name-of-a-queue".into(), String::new(), "PROCESSING".into()]);
        assert_eq!(plain(&table, 40), "name                    note  status\na-long-name-of-a-queue        PROCESSING");
        assert_eq!(plain(&table, 36), "name                    status\na-long-name-of-a-queue  PROCESSING");
        assert_eq!(plain(&table, 20), "name\na-long-name-of-a-qu…");
    }

    #[test]
    fn wide_and_combining_characters_are_counted_as_they_are_shown() {
        let mut table = table(["name", "type"]);
        table.add_row(["日本語".into(), "x".into()]);
        table.add_row(["e\u{301}".into(), "y".into()]);
        assert_eq!(plain(&table, usize::MAX), "name    type\n日本語  x\ne\u{301}       y");
        assert_eq!(plain(&table, 5), "name\n日本…\ne\u{301}");
    }

    #[test]
    fn states_have_colours() {
        let mut table = table(["id", "status"]);
        table.add_row(["1".into(), "FAILED".into()]);
        let marked = table.render(80, |text, word| format!("<{text}:{:?}>", word_colour(word)));
        assert_eq!(marked, "id  status\n1   <FAILED:Some(Red)>");
    }
}
