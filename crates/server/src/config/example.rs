//! Writes `faena.example.toml`: every key with its default and its description.

use std::fmt::Write;

use super::{ValueKind, inboxes, keys, pools, rules, sinks, sources};

/// Returns the text of `faena.example.toml`.
pub fn example() -> String {
    let mut text = String::from(
        "# Every key with its default. Copy the keys that you want to change into faena.toml.\n\
         # Order: defaults < faena.toml < environment < flags. `faena config` shows each effective value and its source.\n",
    );
    let mut section = "";
    for key in keys() {
        let (current, name) = key.path.split_once('.').expect("a section and a name");
        if current != section {
            let _ = write!(text, "\n[{current}]\n");
            section = current;
        }
        let value = match key.kind {
            ValueKind::Number { .. } | ValueKind::Flag | ValueKind::Ratio => key.default.to_owned(),
            ValueKind::Limit { .. } if key.default != "none" => key.default.to_owned(),
            _ => format!("{:?}", key.default),
        };
        let _ = write!(text, "# {} Environment: {}\n#{name} = {value}\n", key.doc, key.env);
    }
    for (_, example) in sections() {
        text.push_str(example);
    }
    text
}

/// Returns the sections that can be repeated, each with its example.
pub fn sections() -> [(&'static str, &'static str); 5] {
    [
        ("queues", rules::EXAMPLE),
        ("pool", pools::EXAMPLE),
        ("sink", sinks::EXAMPLE),
        ("outbox.source", sources::EXAMPLE),
        ("inbox", inboxes::EXAMPLE),
    ]
}
