//! A scripted coding agent.

use std::{fs, os::unix::fs::PermissionsExt, path::Path};

/// Writes an executable shell script and returns its path.
pub fn write_script(path: &Path, code: &str) -> String {
    fs::write(path, format!("#!/bin/sh\nset -eu\n{code}")).unwrap();
    fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
    path.display().to_string()
}

/// Prints a plan that repeats the request, and adds a line to `plans` in the home folder.
pub const PLAN: &str = r#"
echo "planned" >>"$HOME/plans"
echo "1. Do this:"
cat
"#;

/// Writes a wrong greeting, or the right one if there is feedback. Each run adds a line to `codes` in the home folder.
pub const CODE: &str = r#"
cat >"$HOME/last-request"
test "$FAENA_PHASE" = code
test -n "$FAENA_TASK_ID"
grep -q "Do this" "$FAENA_PLAN_FILE"
if [ -s "$FAENA_FEEDBACK_FILE" ]; then
    echo corrected >>"$HOME/codes"
    echo hello >greeting
else
    echo written >>"$HOME/codes"
    echo helo >greeting
fi
"#;

/// Passes if the greeting is right.
pub const TEST: &str = r#"
echo "testing the greeting of $FAENA_BRANCH"
[ "$(cat greeting)" = hello ] || { echo "the greeting is $(cat greeting)"; exit 1; }
"#;
