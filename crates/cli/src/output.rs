//! Formats output for a terminal.

use std::{
    io::{IsTerminal, Write, stdout},
    sync::{
        LazyLock,
        atomic::{AtomicBool, Ordering},
    },
};

use faena_domain::{Timestamp, printable};
use unicode_width::UnicodeWidthChar;

use crate::state_marks::{Colour, is_colour_disabled};

/// Whether to show exact times (`--utc`).
static EXACT_TIMES: AtomicBool = AtomicBool::new(false);

/// Whether the output has colours. It has none outside a terminal.
static HAS_COLOURS: LazyLock<bool> = LazyLock::new(|| {
    stdout().is_terminal() && !is_colour_disabled() && std::env::var_os("TERM").is_none_or(|term| term != "dumb")
});

/// Whether `paint` has coloured any text. Only then are colours written.
static IS_PAINTED: AtomicBool = AtomicBool::new(false);

/// First of the private-use characters that mark colours until a text is printed. `printable` would remove escape
/// sequences, so they are written last. In a text from the server, these characters can only change
/// its colour.
const FIRST_MARK: u32 = 0xf_0000;
/// Marks the end of a colour.
const END_MARK: char = '\u{f00ff}';

/// Prints a line, safe for a terminal. A reader that has closed the pipe (`faena jobs list | head`) is not an error.
pub fn print(text: &str) {
    let text = printable(text);
    let mut out = stdout().lock();
    let _ = match IS_PAINTED.load(Ordering::Relaxed) {
        true => writeln!(out, "{}", with_colours(&text)),
        false => writeln!(out, "{text}"),
    };
    let _ = out.flush();
}

/// Shows exact times from now on, instead of relative ones.
pub fn show_exact_times() {
    EXACT_TIMES.store(true, Ordering::Relaxed);
}

/// Returns the width of the terminal, or `None` if the output goes elsewhere.
pub fn terminal_width() -> Option<usize> {
    terminal_size::terminal_size_of(stdout()).map(|(width, _)| usize::from(width.0))
}

/// Returns a text in a colour, if the output has colours.
pub fn paint(text: &str, colour: Option<Colour>) -> String {
    match colour.filter(|_| *HAS_COLOURS) {
        Some(colour) => {
            IS_PAINTED.store(true, Ordering::Relaxed);
            format!("{}{text}{END_MARK}", mark(colour))
        }
        None => text.to_owned(),
    }
}

fn mark(colour: Colour) -> char {
    char::from_u32(FIRST_MARK + colour as u32).unwrap_or(END_MARK)
}

/// Writes escape sequences where colours begin and end.
fn with_colours(text: &str) -> String {
    let mut painted = String::with_capacity(text.len() + 64);
    let mut is_painted = false;
    for c in text.chars() {
        if let Some(colour) = Colour::ALL.into_iter().find(|colour| mark(*colour) == c) {
            painted.push_str(colour.sequence());
            is_painted = true;
        } else if c == END_MARK || (c == '\n' && is_painted) {
            painted.push_str("\x1b[0m");
            painted.extend((c == '\n').then_some(c));
            is_painted = false;
        } else {
            painted.push(c);
        }
    }
    painted.extend(is_painted.then_some("\x1b[0m").into_iter().flat_map(str::chars));
    painted
}

/// Breaks a sentence at spaces so that it fits the terminal.
pub fn wrap(text: &str) -> String {
    match terminal_width() {
        Some(max) => wrap_to(text, max),
        None => text.to_owned(),
    }
}

fn wrap_to(text: &str, max: usize) -> String {
    let mut wrapped = String::new();
    let mut used = 0;
    for word in text.split(' ') {
        let width = text_width(word);
        if used > 0 && used + 1 + width > max {
            wrapped.push('\n');
            used = 0;
        } else if used > 0 {
            wrapped.push(' ');
            used += 1;
        }
        wrapped.push_str(word);
        used += width;
    }
    wrapped
}

/// Prints a line to the standard error output, safe for a terminal.
pub fn print_error(text: &str) {
    let _ = writeln!(std::io::stderr().lock(), "faena: {}", printable(text));
}

/// Returns a text as one line without control characters.
pub fn one_line(text: &str) -> String {
    printable(&text.replace("\r\n", " ").replace(['\n', '\t'], " ")).into_owned()
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

    /// Adds a line unchanged.
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

/// Returns how many columns of a terminal a text takes.
pub fn text_width(text: &str) -> usize {
    text.chars().map(char_width).sum()
}

fn char_width(c: char) -> usize {
    c.width().unwrap_or(0)
}

/// Cuts a text so that it takes at most `max` columns.
pub fn shorten(text: &str, max: usize) -> String {
    if text_width(text) <= max {
        return text.to_owned();
    }
    let mut left = max.saturating_sub(1);
    let fits = |c: &char| {
        let fits = char_width(*c) <= left;
        left = left.saturating_sub(char_width(*c));
        fits
    };
    format!("{}…", text.chars().take_while(fits).collect::<String>())
}

/// Returns a time relative to now: `12 s ago`, `in 5 min`. With `--utc`, the exact time.
pub fn relative(at: Timestamp) -> String {
    if EXACT_TIMES.load(Ordering::Relaxed) {
        return at.to_string();
    }
    relative_to(at.as_ms(), Timestamp::now().as_ms())
}

/// Returns an exact time followed by the relative one: `2026-11-17T16:20:00.000Z (12 s ago)`.
pub fn exact_and_relative(at: Timestamp) -> String {
    if EXACT_TIMES.load(Ordering::Relaxed) { at.to_string() } else { format!("{at} ({})", relative(at)) }
}

/// Parses a time of the API and returns it relative to now.
pub fn relative_text(time: &str) -> String {
    Timestamp::parse(time).map_or_else(|| time.to_owned(), relative)
}

/// Returns the time since `at`, for a column of a table: `12 s`, `5 min`. With `--utc`, the exact time.
pub fn age(at: faena::Timestamp) -> String {
    if EXACT_TIMES.load(Ordering::Relaxed) {
        return at.to_string();
    }
    approximate_duration(faena::Timestamp::now().saturating_duration_since(at).as_secs())
}

fn relative_to(at_ms: i64, now_ms: i64) -> String {
    let seconds = (now_ms - at_ms) / 1_000;
    let duration = approximate_duration(seconds.unsigned_abs());
    if seconds < 0 { format!("in {duration}") } else { format!("{duration} ago") }
}

/// Returns a duration rounded down to a whole unit: `12 s`, `5 min`.
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
    fn further_lines_of_a_detail_are_indented() {
        let mut details = Details::new(8);
        details.add("error", "broken\nstatus  COMPLETED");
        assert_eq!(details.text(), "error   broken\n        status  COMPLETED");
    }

    #[test]
    fn marks_become_colours_that_end_with_their_line() {
        let red = mark(Colour::Red);
        assert_eq!(with_colours(&format!("a {red}b{END_MARK} c")), "a \x1b[31mb\x1b[0m c");
        assert_eq!(with_colours(&format!("{red}b\nc{red}")), "\x1b[31mb\x1b[0m\nc\x1b[31m\x1b[0m");
    }

    #[test]
    fn a_sentence_breaks_between_words() {
        assert_eq!(wrap_to("one two three", 7), "one two\nthree");
        assert_eq!(wrap_to("one two three", 3), "one\ntwo\nthree");
        assert_eq!(wrap_to("one two three", 80), "one two three");
    }

    #[test]
    fn a_long_text_is_cut_and_a_short_one_is_not() {
        assert_eq!((shorten("añb", 3).as_str(), shorten("añbc", 3).as_str()), ("añb", "añ…"));
        assert_eq!((shorten("日本語", 5).as_str(), shorten("日本語", 4).as_str()), ("日本…", "日…"));
    }
}
