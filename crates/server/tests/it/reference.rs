//! The pages under `docs/reference` that the binary generates are up to date.

use std::{path::Path, process::Command};

fn assert_up_to_date(page: &str) {
    let file = if page == "openapi" { "openapi.json".to_owned() } else { format!("{page}.md") };
    assert_prints(&["reference", page], &format!("docs/reference/{file}"));
}

/// Asserts that a command prints exactly this file of the repository.
fn assert_prints(arguments: &[&str], file: &str) {
    let output = Command::new(env!("CARGO_BIN_EXE_faena")).args(arguments).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let generated = String::from_utf8(output.stdout).unwrap();
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(file);
    let stored = std::fs::read_to_string(path).unwrap_or_default();
    assert!(stored == generated, "{file} is outdated; run `cargo run -- {} > {file}`", arguments.join(" "));
}

#[test]
fn the_schema_of_machines_is_up_to_date() {
    assert_prints(&["machines", "schema"], "docs/reference/machine.schema.json");
}

#[test]
fn the_pages_and_the_drawing_of_the_coding_task_are_up_to_date() {
    assert_up_to_date("coding-task");
    assert_up_to_date("coding-task.es");
    assert_prints(&["machines", "draw", "coding-task", "--format", "svg"], "docs/images/coding-task.svg");
}

#[test]
fn the_command_line_page_is_up_to_date() {
    assert_up_to_date("cli");
}

#[test]
fn the_configuration_page_is_up_to_date() {
    assert_up_to_date("configuration");
}

#[test]
fn the_jobs_and_events_page_is_up_to_date() {
    assert_up_to_date("jobs");
}

#[test]
fn the_error_codes_page_is_up_to_date() {
    assert_up_to_date("errors");
}

#[test]
fn the_metrics_page_is_up_to_date() {
    assert_up_to_date("metrics");
}

#[test]
fn the_openapi_document_is_up_to_date() {
    assert_up_to_date("openapi");
}
