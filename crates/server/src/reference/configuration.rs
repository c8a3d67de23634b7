//! Renders the reference of the configuration from the table of keys.

use std::fmt::Write;

use super::{escape_cell, generated_notice};
use crate::config::{Key, UNUSED_VARIABLES, ValueKind, keys, sections};

pub fn render() -> String {
    let mut text = String::from("# Configuration\n\n");
    text.push_str(&generated_notice("configuration"));
    text.push_str(
        "\nFaena needs no configuration to start.\n\
         A value comes from the first of these that sets it: a flag, the environment, `faena.toml`, the default.\n\
         `faena config` shows each effective value and its source.\n\
         With an invalid value or an unknown key, the server does not start: it names the line and exits with code 2.\n\n\
         ```toml\n\
         # faena.toml\n\
         [server]\n\
         port = 8080\n\n\
         [worker]\n\
         concurrency = 20\n\
         ```\n\n\
         Durations are written `500ms`, `30s`, `5m`, `12h` or `7d`.\n\
         Variables that Kubernetes sets for a service named `faena` are ignored.\n\n\
         Variables that other task schedulers need are accepted; the server logs once that they have no effect:\n\n\
         | Variable | Reason |\n|---|---|\n",
    );
    for (variable, reason) in UNUSED_VARIABLES {
        let _ = writeln!(text, "| `{variable}` | {reason} |");
    }
    let mut section = "";
    for key in keys() {
        let current = key.path.split_once('.').map_or(key.path, |(section, _)| section);
        if current != section {
            section = current;
            let _ = write!(
                text,
                "\n## [{section}]\n| Key | Environment | Default | Values | Description |\n|---|---|---|---|---|\n"
            );
        }
        let _ = writeln!(
            text,
            "| `{}` | `{}` | {} | {} | {} |",
            key.path,
            key.env,
            default(key),
            escape_cell(&values(key.kind)),
            escape_cell(key.doc)
        );
    }
    text.push_str("\n## Sections that can be repeated\nEach line shows a key with an example or its default.\n");
    for (name, example) in sections() {
        let example: String = example.trim().lines().map(|line| format!("{}\n", uncommented(line))).collect();
        let _ = write!(text, "\n### [[{name}]]\n```toml\n{example}```\n");
    }
    text
}

/// Turns `#key = 1` into `key = 1` and keeps `# a comment`.
fn uncommented(line: &str) -> &str {
    match line.strip_prefix('#') {
        Some(rest) if !rest.starts_with(' ') => rest,
        _ => line,
    }
}

fn default(key: &Key) -> String {
    if key.default.is_empty() { "empty".into() } else { format!("`{}`", key.default) }
}

fn values(kind: ValueKind) -> String {
    match kind {
        ValueKind::Text | ValueKind::OptionalText => "text".into(),
        ValueKind::Secret => "URL".into(),
        ValueKind::Number { min, max } => format!("{min} to {max}"),
        ValueKind::Limit { max } => format!("1 to {max}, or `none`"),
        ValueKind::Duration => "duration".into(),
        ValueKind::Flag => "`true`, `false`".into(),
        ValueKind::Choice(choices) => choices.iter().map(|choice| format!("`{choice}`")).collect::<Vec<_>>().join(", "),
        ValueKind::Roles => "`api`, `engine`, `worker`".into(),
        ValueKind::Networks => "networks such as `10.0.0.0/8`, separated by commas".into(),
        ValueKind::Origins => "`*`, or origins such as `https://app.example.com`, separated by commas".into(),
        ValueKind::Names => "names, separated by commas".into(),
        ValueKind::Uri => "URI reference".into(),
        ValueKind::Secrets => "secrets, separated by commas".into(),
        ValueKind::Endpoint | ValueKind::Redis => "URL".into(),
        ValueKind::KeyPrefix => "text without spaces".into(),
        ValueKind::Headers | ValueKind::Pairs => "`name=value`, separated by commas".into(),
        ValueKind::Ratio => "0 to 1".into(),
    }
}
