//! Shows the progress of long operations on standard error, if that is a terminal.

use std::{io::IsTerminal, time::Duration};

use faena_wire::BulkView;
use indicatif::{ProgressBar, ProgressStyle};

use crate::{Api, CommandError, output::one_line};

/// Time between two requests for the progress of a bulk action.
const PERIOD: Duration = Duration::from_millis(500);

/// Shows that something takes time, until it is cleared.
pub fn spinner(what: impl Into<String>) -> ProgressBar {
    start(ProgressBar::new_spinner(), "{spinner} {msg} ({elapsed})", what.into())
}

/// Shows how much of something is done, until it is cleared.
pub fn bar(total: u64, what: impl Into<String>) -> ProgressBar {
    start(
        ProgressBar::new(total),
        "{spinner} [{bar:30}] {human_pos} of {human_len}  {msg} ({elapsed}, {eta} left)",
        what.into(),
    )
}

fn start(bar: ProgressBar, template: &str, what: String) -> ProgressBar {
    if !std::io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    if let Ok(style) = ProgressStyle::with_template(template) {
        bar.set_style(style.progress_chars("=> "));
    }
    bar.set_message(one_line(&what));
    bar.enable_steady_tick(Duration::from_millis(120));
    bar
}

/// Follows an action that the server performs in the background until it ends.
pub async fn follow_bulk(api: &Api, id: &str, matched: u64, what: &str) -> Result<BulkView, CommandError> {
    let bar = bar(matched, what);
    loop {
        let action: BulkView = api.get(&format!("/api/v1/bulk/{id}")).send().await?;
        bar.set_length(action.matched);
        bar.set_position(action.done + action.skipped);
        if action.finished_at.is_some() {
            bar.finish_and_clear();
            return Ok(action);
        }
        tokio::time::sleep(PERIOD).await;
    }
}
