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

/// Returns whether `NO_COLOR` asks for output without colours.
pub fn is_colour_refused() -> bool {
    std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty())
}
