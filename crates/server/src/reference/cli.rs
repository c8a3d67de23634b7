//! Renders the reference of the command line from the definitions of the commands.

use std::fmt::Write;

use clap::{Arg, ArgAction, Command};

use super::{escape_cell, generated_notice};

pub fn render(mut command: Command) -> String {
    command.build();
    let mut text = String::from("# Command line\n\n");
    text.push_str(&generated_notice("cli"));
    text.push_str(
        "\nCommands that talk to a server find it at `FAENA_URL` (default `http://127.0.0.1:3000`) or `--url`.\n\
         Every command that prints a table also prints JSON with `--json`.\n\
         Exit code 0 means success, 1 a failure, 2 wrong usage or configuration, 3 that the server cannot be reached, 74 that the disk of the database failed.\n\n",
    );
    let visible: Vec<&Command> = command.get_subcommands().filter(|command| !is_internal(command)).collect();
    text.push_str("| Command | Description |\n|---|---|\n");
    for command in &visible {
        let name = command.get_name();
        let _ = writeln!(text, "| [`faena {name}`](#faena-{name}) | {} |", about(command));
    }
    for command in visible {
        section(&mut text, &format!("faena {}", command.get_name()), command);
    }
    text
}

fn section(text: &mut String, path: &str, command: &Command) {
    let _ = write!(text, "\n## {path}\n{}.\n", about(command));
    let usage = command.clone().render_usage().to_string();
    let usage = usage.trim_start_matches("Usage:").trim();
    let _ = write!(text, "```\n{usage}\n```\n");
    let shown = |argument: &&Arg| {
        !argument.is_hide_set() && !matches!(argument.get_action(), ArgAction::Help | ArgAction::Version)
    };
    let arguments: Vec<&Arg> = command.get_arguments().filter(shown).collect();
    if !arguments.is_empty() {
        text.push_str("| Argument | Description | Default |\n|---|---|---|\n");
        for argument in arguments {
            let _ = writeln!(text, "| `{}` | {} | {} |", name(argument), description(argument), default(argument));
        }
    }
    if let Some(examples) = command.get_after_help() {
        let _ = write!(text, "\n```\n{}\n```\n", examples.to_string().trim());
    }
    for child in command.get_subcommands().filter(|child| !is_internal(child)) {
        section(text, &format!("{path} {}", child.get_name()), child);
    }
}

fn is_internal(command: &Command) -> bool {
    command.is_hide_set() || command.get_name() == "help"
}

fn about(command: &Command) -> String {
    escape_cell(&command.get_about().map(ToString::to_string).unwrap_or_default())
}

fn name(argument: &Arg) -> String {
    let takes_value = argument.get_action().takes_values();
    let value = argument.get_value_names().unwrap_or_default().first().map(ToString::to_string);
    let value = value.unwrap_or_else(|| argument.get_id().as_str().to_uppercase());
    match argument.get_long() {
        Some(long) if takes_value => format!("--{long} {value}"),
        Some(long) => format!("--{long}"),
        None => value,
    }
}

fn description(argument: &Arg) -> String {
    let help = help(argument).0;
    let values: Vec<String> =
        argument.get_possible_values().iter().map(|value| format!("`{}`", value.get_name())).collect();
    let is_flag = !argument.get_action().takes_values();
    if values.is_empty() || is_flag {
        escape_cell(&help)
    } else {
        format!("{}: {}", escape_cell(&help), values.join(", "))
    }
}

fn default(argument: &Arg) -> String {
    if !argument.get_action().takes_values() {
        return String::new();
    }
    let values = argument.get_default_values().iter().map(|value| value.to_string_lossy().into_owned());
    let values: Vec<String> = values.chain(help(argument).1).map(|value| format!("`{value}`")).collect();
    values.join(", ")
}

/// Returns the help text, and the default if the text ends with `[default: …]`: options whose default depends on the configuration
/// describe it there.
fn help(argument: &Arg) -> (String, Option<String>) {
    let text = argument.get_help().map(ToString::to_string).unwrap_or_default();
    match text.strip_suffix(']').and_then(|text| text.rsplit_once(" [default: ")) {
        Some((text, default)) => (text.to_owned(), Some(default.to_owned())),
        None => (text, None),
    }
}
