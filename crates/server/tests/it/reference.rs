//! The pages under `docs/reference` that the binary generates are up to date.

use std::{path::Path, process::Command};

fn assert_up_to_date(page: &str) {
    let output = Command::new(env!("CARGO_BIN_EXE_faena")).args(["reference", page]).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let generated = String::from_utf8(output.stdout).unwrap();
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("../../docs/reference/{page}.md"));
    let stored = std::fs::read_to_string(path).unwrap_or_default();
    assert!(
        stored == generated,
        "docs/reference/{page}.md is outdated; run `cargo run -- reference {page} > docs/reference/{page}.md`"
    );
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
fn the_page_of_jobs_and_events_is_up_to_date() {
    assert_up_to_date("jobs");
}

#[test]
fn the_page_of_error_codes_is_up_to_date() {
    assert_up_to_date("errors");
}

#[test]
fn the_page_of_metrics_is_up_to_date() {
    assert_up_to_date("metrics");
}
