//! The README's first steps, run as they are written.
//!
//! Every block marked `sh` between `<!-- test:start -->` and `<!-- test:end -->` is run, in order, in one shell, in a fresh
//! clone. Only `cargo` is replaced: building a release again would take minutes, so it hands over the binary under test.

use std::{
    fs,
    os::unix::{fs::PermissionsExt, process::CommandExt},
    path::Path,
    process::{Command, Stdio},
};

const REPOSITORY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");

/// The code that is to be run, with the line of the README where each block begins.
fn blocks(readme: &str) -> Vec<(usize, String)> {
    let mut found = Vec::new();
    let (mut wanted, mut inside) = (false, None::<(usize, String)>);
    for (number, line) in readme.lines().enumerate() {
        match (line.trim(), &mut inside) {
            ("```", Some(_)) => found.extend(inside.take()),
            (_, Some((_, block))) => {
                block.push_str(line);
                block.push('\n');
            }
            ("<!-- test:start -->", None) => wanted = true,
            ("<!-- test:end -->", None) => wanted = false,
            ("```sh", None) if wanted => inside = Some((number + 2, String::new())),
            _ => {}
        }
    }
    assert!(!wanted, "README.md: a <!-- test:start --> without its <!-- test:end -->");
    assert!(inside.is_none(), "README.md: a code block has no end");
    found
}

#[test]
fn blocks_outside_the_marks_and_of_other_languages_are_left_out() {
    let readme = "```sh\nno\n```\n<!-- test:start -->\n```sh\none\ntwo\n```\n```json\nno\n```\n```sh\nthree\n```\n\
                  <!-- test:end -->\n```sh\nno\n```\n";
    assert_eq!(blocks(readme), [(6, "one\ntwo\n".to_owned()), (13, "three\n".to_owned())]);
}

/// `cargo run --release -- …` and `cargo install …` as they would end, without building.
fn write_shim(folder: &Path) {
    let script = format!(
        r#"#!/usr/bin/env bash
set -eu
case "${{1:-}}" in
    run | r)
        while [ $# -gt 0 ] && [ "$1" != -- ]; do shift; done
        [ $# -eq 0 ] || shift
        exec '{0}' "$@" ;;
    build | b)
        mkdir -p target/release && cp '{0}' target/release/faena ;;
    install)
        cp '{0}' "$(dirname "$0")/faena" ;;
    *)
        echo "the README test knows no cargo $*" >&2
        exit 1 ;;
esac
"#,
        env!("CARGO_BIN_EXE_faena")
    );
    fs::create_dir(folder).unwrap();
    let path = folder.join("cargo");
    fs::write(&path, script).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
}

#[test]
fn the_first_steps_of_the_readme_work_as_they_are_written() {
    let readme = fs::read_to_string(Path::new(REPOSITORY).join("README.md")).expect("README.md is missing");
    let blocks = blocks(&readme);
    assert!(
        !blocks.is_empty(),
        "README.md has no ```sh block between <!-- test:start --> and <!-- test:end -->, so there is nothing to try"
    );
    let folder = tempfile::tempdir().unwrap();
    write_shim(&folder.path().join("bin"));
    let clone = folder.path().join("faena");
    let cloned = Command::new("git").args(["clone", "--quiet", REPOSITORY]).arg(&clone).status().unwrap();
    assert!(cloned.success());
    // Stops at the first command that fails, and tells which block it was in.
    let mut script = String::from("set -eu -o pipefail\n");
    for (line, block) in &blocks {
        script.push_str(&format!("echo '--- README.md, line {line}' >&2\n{block}"));
    }
    let path = format!("{}:{}", folder.path().join("bin").display(), std::env::var("PATH").unwrap());
    let child = Command::new("bash")
        .args(["-c", &script])
        .current_dir(&clone)
        .env_clear()
        .env("PATH", path)
        .env("HOME", folder.path())
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        // What a block leaves running in the background ends with the test.
        .process_group(0)
        .spawn()
        .unwrap();
    let group = format!("-{}", child.id());
    let watched = std::thread::spawn(move || {
        // A server that a block leaves behind holds the pipes, so the shell's own end is what counts.
        let mut child = child;
        let status = child.wait().unwrap();
        let _ = Command::new("kill").args(["-s", "KILL", "--", &group]).stderr(Stdio::null()).status();
        (status, child.wait_with_output().unwrap())
    });
    let (status, output) = watched.join().unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(status.success(), "{status}\n{}\n{}", text(&output.stdout), text(&output.stderr));
}
