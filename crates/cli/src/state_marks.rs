//! The shape and colour of a job state, the same as in the dashboard.

use faena::JobState;

/// A colour of the terminal's own palette.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Colour {
    Red,
    Green,
    Yellow,
    Blue,
    Magenta,
    Cyan,
    Grey,
}

impl Colour {
    pub const ALL: [Colour; 7] =
        [Colour::Red, Colour::Green, Colour::Yellow, Colour::Blue, Colour::Magenta, Colour::Cyan, Colour::Grey];

    /// Returns the escape sequence that begins this colour.
    pub fn sequence(self) -> &'static str {
        match self {
            Colour::Red => "\x1b[31m",
            Colour::Green => "\x1b[32m",
            Colour::Yellow => "\x1b[33m",
            Colour::Blue => "\x1b[34m",
            Colour::Magenta => "\x1b[35m",
            Colour::Cyan => "\x1b[36m",
            Colour::Grey => "\x1b[90m",
        }
    }
}

/// Returns the shape and the colour of a state.
pub fn state_mark(state: &JobState) -> (&'static str, Colour) {
    match state {
        JobState::Queued => ("○", Colour::Cyan),
        JobState::Pending => ("◌", Colour::Magenta),
        JobState::Scheduled | JobState::Assigned | JobState::Processing => ("▸", Colour::Blue),
        JobState::Completed => ("✓", Colour::Green),
        JobState::Retrying => ("↻", Colour::Yellow),
        JobState::Failed => ("✕", Colour::Red),
        _ => ("–", Colour::Grey),
    }
}

/// Returns the colour of a word that stands for the state of anything: a job, a task, a worker, a webhook, a key.
pub fn word_colour(word: &str) -> Option<Colour> {
    let lower = word.to_ascii_lowercase();
    Some(match lower.split(' ').next().unwrap_or_default() {
        "queued" => Colour::Cyan,
        "pending" | "waiting" => Colour::Magenta,
        "scheduled" | "assigned" | "processing" | "running" | "sending" | "busy" => Colour::Blue,
        "completed" | "delivered" | "ready" | "active" | "created" | "applied" => Colour::Green,
        "retrying" | "paused" | "draining" | "skipped" | "missed" | "expires" => Colour::Yellow,
        "failed" | "rejected" | "revoked" | "expired" | "down" | "forbidden" | "invalid" => Colour::Red,
        "cancelled" | "disabled" | "terminated" | "ignored" | "stale" => Colour::Grey,
        _ => return None,
    })
}

/// Returns whether `NO_COLOR` disables colours.
pub fn is_colour_disabled() -> bool {
    std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty())
}
