//! Formats output for a terminal.

use std::{fmt, io::Write};

use faena_domain::{Timestamp, printable};

/// Prints a line, safe for a terminal. A reader that has closed the pipe (`faena jobs list | head`) is not an error.
pub fn print(text: &str) {
    let mut out = std::io::stdout().lock();
    let _ = writeln!(out, "{}", printable(text));
    let _ = out.flush();
}

/// Prints a line to the standard error output, safe for a terminal.
pub fn print_error(text: &str) {
    let _ = writeln!(std::io::stderr().lock(), "faena: {}", printable(text));
}

/// Returns a text as one line without control characters.
pub fn one_line(text: &str) -> String {
    printable(&text.replace("\r\n", " ").replace(['\n', '\t'], " ")).into_owned()
}

/// A table with one line per row, without borders.
///
/// On a terminal that is too narrow, the widest columns are cut, except the first, which has the id or name to copy, and those
/// in `KEPT`. Nothing is cut if the output goes to a file or another program.
pub struct Table {
    /// The header and the rows.
    rows: Vec<Vec<String>>,
}

const GAP: usize = 2;
/// No column is cut to fewer characters than this.
const MIN_WIDTH: usize = 4;
/// Columns that are never cut: ids to copy, and states to compare.
const KEPT: [&str; 5] = ["id", "job", "state", "status", "outcome"];

/// Creates a table with this header.
pub fn table<const N: usize>(header: [&str; N]) -> Table {
    Table { rows: vec![header.map(ToOwned::to_owned).to_vec()] }
}

impl Table {
    /// Returns the table, or `text` if it has no rows: a header alone says nothing.
    pub fn or_text(self, text: &str) -> String {
        if self.rows.len() == 1 { text.to_owned() } else { self.to_string() }
    }

    pub fn add_row<const N: usize>(&mut self, cells: [String; N]) {
        // A line break would end the row.
        self.rows.push(cells.map(|cell| one_line(&cell)).to_vec());
    }

    /// Returns the width of each column if the table may have `max` characters per line.
    fn widths(&self, max: usize) -> Vec<usize> {
        let columns = self.rows[0].len();
        let widest = |column: usize| self.rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
        let mut widths: Vec<usize> = (0..columns).map(widest).collect();
        let mut excess = (widths.iter().sum::<usize>() + GAP * (columns - 1)).saturating_sub(max);
        while excess > 0 {
            let can_be_cut = |column: &usize| *column > 0 && !KEPT.contains(&self.rows[0][*column].as_str());
            let widest = (0..columns).filter(can_be_cut).max_by_key(|column| widths[*column]);
            let Some(widest) = widest.filter(|column| widths[*column] > MIN_WIDTH) else { break };
            widths[widest] -= 1;
            excess -= 1;
        }
        widths
    }

    fn render(&self, max: usize) -> String {
        let widths = self.widths(max);
        let line = |row: &Vec<String>| {
            let cells = row.iter().zip(&widths).map(|(cell, &width)| format!("{:<width$}", shorten(cell, width)));
            cells.collect::<Vec<_>>().join("  ").trim_end().to_owned()
        };
        self.rows.iter().map(line).collect::<Vec<_>>().join("\n")
    }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let terminal = terminal_size::terminal_size_of(std::io::stdout());
        f.write_str(&self.render(terminal.map_or(usize::MAX, |(width, _)| usize::from(width.0))))
    }
}

/// The details of one resource: a name and a value per line.
pub struct Details {
    width: usize,
    lines: Vec<String>,
}

impl Details {
    pub fn new(width: usize) -> Details {
        Details { width, lines: Vec::new() }
    }

    /// Adds a line, unless the value is empty.
    pub fn add(&mut self, name: &str, value: impl Into<String>) {
        let value = value.into();
        if !value.is_empty() {
            // Further lines of the value are indented, so that none of them looks like another detail.
            let value = value.replace('\n', &format!("\n{:width$}", "", width = self.width));
            self.lines.push(format!("{name:<width$}{value}", width = self.width));
        }
    }

    /// Adds a line if there is a value.
    pub fn add_opt(&mut self, name: &str, value: Option<impl ToString>) {
        if let Some(value) = value {
            self.add(name, value.to_string());
        }
    }

    /// Adds a line as it is.
    pub fn line(&mut self, line: impl Into<String>) {
        self.lines.push(line.into());
    }

    pub fn text(&self) -> String {
        self.lines.join("\n")
    }
}

/// Returns a number with its noun: `1 job`, `2 jobs`.
pub fn count(number: u64, singular: &str) -> String {
    format!("{number} {singular}{}", if number == 1 { "" } else { "s" })
}

/// Cuts a text after `max` characters.
pub fn shorten(text: &str, max: usize) -> String {
    if text.chars().count() <= max {
        text.to_owned()
    } else {
        format!("{}…", text.chars().take(max - 1).collect::<String>())
    }
}

/// Returns a time relative to now: `12 s ago`, `in 5 min`.
pub fn relative(at: Timestamp) -> String {
    relative_to(at.as_ms(), Timestamp::now().as_ms())
}

/// Returns the time since `at`, for a column of a table: `12 s`, `5 min`.
pub fn age(at: faena::Timestamp) -> String {
    approximate_duration(faena::Timestamp::now().saturating_duration_since(at).as_secs())
}

fn relative_to(at_ms: i64, now_ms: i64) -> String {
    let seconds = (now_ms - at_ms) / 1_000;
    let duration = approximate_duration(seconds.unsigned_abs());
    if seconds < 0 { format!("in {duration}") } else { format!("{duration} ago") }
}

/// `12 s`, `5 min`: rounded down to a whole unit.
pub fn approximate_duration(seconds: u64) -> String {
    match seconds {
        0..=119 => format!("{seconds} s"),
        120..=7_199 => format!("{} min", seconds / 60),
        7_200..=172_799 => format!("{} h", seconds / 3_600),
        _ => format!("{} d", seconds / 86_400),
    }
}

/// Returns a duration in the largest unit that divides it: `250 ms`, `10 s`, `90 s`, `2 min`, `6 h`, `1 d`.
pub fn exact_duration(ms: u64) -> String {
    for (unit_ms, unit) in [(86_400_000, "d"), (3_600_000, "h"), (60_000, "min"), (1_000, "s")] {
        if ms > 0 && ms.is_multiple_of(unit_ms) {
            return format!("{} {unit}", ms / unit_ms);
        }
    }
    format!("{ms} ms")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_and_nouns_agree() {
        assert_eq!([0, 1, 2].map(|n| count(n, "dead letter")), ["0 dead letters", "1 dead letter", "2 dead letters"]);
    }

    #[test]
    fn times_are_relative_to_now() {
        let shown = [0, 119_000, 120_000, 7_200_000, 172_800_000, -5_000, -600_000].map(|ms| relative_to(0, ms));
        assert_eq!(shown, ["0 s ago", "119 s ago", "2 min ago", "2 h ago", "2 d ago", "in 5 s", "in 10 min"]);
    }

    #[test]
    fn durations_have_the_largest_unit_that_divides_them() {
        let shown = [0, 250, 10_000, 90_000, 120_000, 21_600_000, 86_400_000].map(exact_duration);
        assert_eq!(shown, ["0 ms", "250 ms", "10 s", "90 s", "2 min", "6 h", "1 d"]);
    }

    #[test]
    fn control_characters_are_printable() {
        let mut table = table(["id", "error"]);
        table.add_row(["1".into(), "a\u{1b}[2Jb\r\nc\td".into()]);
        assert_eq!(table.render(usize::MAX), "id  error\n1   a\\u001b[2Jb c d");
        let mut details = Details::new(8);
        details.add("error", "broken\nstatus  COMPLETED");
        assert_eq!(details.text(), "error   broken\n        status  COMPLETED");
    }

    #[test]
    fn a_long_text_is_cut_and_a_short_one_is_not() {
        assert_eq!((shorten("añb", 3).as_str(), shorten("añbc", 3).as_str()), ("añb", "añ…"));
    }

    #[test]
    fn states_and_ids_are_never_cut_and_an_empty_table_is_a_sentence() {
        let mut table = table(["name", "status", "queue"]);
        table.add_row(["a".into(), "PROCESSING".into(), "a-long-queue-name".into()]);
        assert_eq!(table.render(20), "name  status      queue\na     PROCESSING  a-l…".replace("queue", "que…"));
        assert_eq!(super::table(["id"]).or_text("no jobs"), "no jobs");
    }

    #[test]
    fn a_table_fits_its_width_and_keeps_its_first_column() {
        let mut table = table(["id", "queue", "error"]);
        table.add_row(["018f0000-0000".into(), "mail".into(), "connection refused\nby the host".into()]);
        assert_eq!(
            table.render(usize::MAX),
            "id             queue  error\n018f0000-0000  mail   connection refused by the host"
        );
        assert_eq!(table.render(36), "id             queue  error\n018f0000-0000  mail   connection re…");
        assert_eq!(table.render(10), "id             que…  err…\n018f0000-0000  mail  con…", "cannot be narrower");
    }
}
