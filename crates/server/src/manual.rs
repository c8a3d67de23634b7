//! Generates shell completions and manual pages from the definition of the command line.

use std::path::Path;

use anyhow::Context;
use clap_complete::env::Shells;

/// Environment variable with which the completion script of a shell asks the binary for completions.
pub const COMPLETE: &str = "FAENA_COMPLETE";

/// Returns the script that a shell loads. It runs `faena` for every completion.
pub fn completions(shell: &str) -> anyhow::Result<String> {
    let shells = Shells::builtins();
    let completer = shells.completer(shell).with_context(|| format!("no completions for {shell}"))?;
    let mut script = Vec::new();
    completer.write_registration(COMPLETE, "faena", "faena", "faena", &mut script)?;
    Ok(String::from_utf8_lossy(&script).into_owned())
}

/// Writes a manual page for each command. Returns how many.
pub fn write_pages(command: clap::Command, folder: &Path) -> anyhow::Result<usize> {
    let cannot_write = || format!("cannot write manual pages to {}", folder.display());
    std::fs::create_dir_all(folder).with_context(cannot_write)?;
    let pages = count(&command);
    clap_mangen::generate_to(command, folder).with_context(cannot_write)?;
    Ok(pages)
}

/// Counts a command and its subcommands that are not hidden.
fn count(command: &clap::Command) -> usize {
    1 + command.get_subcommands().filter(|subcommand| !subcommand.is_hide_set()).map(count).sum::<usize>()
}
