//! `faena reference PAGE`: prints a page of `docs/reference`, or the OpenAPI document, generated from the code.
//!
//! A test compares each page in the repository with the output of this command, so that the pages cannot drift.

mod cli;
mod coding_task;
mod configuration;
mod errors;
mod jobs;
mod metrics;

use clap::ValueEnum;

#[derive(Clone, Copy, ValueEnum)]
pub enum Page {
    Cli,
    CodingTask,
    #[value(name = "coding-task.es")]
    CodingTaskSpanish,
    Configuration,
    Errors,
    Jobs,
    Metrics,
    Openapi,
}

impl Page {
    pub fn render(self, command: clap::Command) -> String {
        match self {
            Page::Cli => cli::render(command),
            Page::CodingTask => coding_task::render(coding_task::Language::English),
            Page::CodingTaskSpanish => coding_task::render(coding_task::Language::Spanish),
            Page::Configuration => configuration::render(),
            Page::Errors => errors::render(),
            Page::Jobs => jobs::render(),
            Page::Metrics => metrics::render(),
            Page::Openapi => openapi(),
        }
    }
}

/// Returns the OpenAPI document with the default limits.
fn openapi() -> String {
    let document = faena_api::document(&faena_domain::JobLimits::default());
    format!("{}\n", serde_json::to_string_pretty(&document).expect("a value is JSON"))
}

/// Returns the line that marks a page as generated.
fn generated_notice(page: &str) -> String {
    format!("<!-- Generated. Update with: cargo run -- reference {page} > docs/reference/{page}.md -->\n")
}

/// Escapes text for a cell of a Markdown table.
fn escape_cell(text: &str) -> String {
    text.replace('|', "\\|").replace('\n', " ").replace('<', "&lt;")
}
