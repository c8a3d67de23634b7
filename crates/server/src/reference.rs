//! `faena reference PAGE`: prints a page of `docs/reference`, generated from the code.
//!
//! A test compares each page in the repository with the output of this command, so that the pages cannot drift.

mod cli;
mod configuration;
mod errors;
mod jobs;
mod metrics;

use clap::ValueEnum;

#[derive(Clone, Copy, ValueEnum)]
pub enum Page {
    Cli,
    Configuration,
    Errors,
    Jobs,
    Metrics,
}

impl Page {
    pub fn render(self, command: clap::Command) -> String {
        match self {
            Page::Cli => cli::render(command),
            Page::Configuration => configuration::render(),
            Page::Errors => errors::render(),
            Page::Jobs => jobs::render(),
            Page::Metrics => metrics::render(),
        }
    }
}

/// Returns the line that marks a page as generated.
fn generated(page: &str) -> String {
    format!("<!-- Generated. Update with: cargo run -- reference {page} > docs/reference/{page}.md -->\n")
}

/// Escapes text for a cell of a Markdown table.
fn cell(text: &str) -> String {
    text.replace('|', "\\|").replace('\n', " ").replace('<', "&lt;")
}
