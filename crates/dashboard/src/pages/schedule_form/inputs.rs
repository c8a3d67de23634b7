//! The fields of the form in their order, each with its label and its error.

use super::{Entries, TIMING};
use crate::{error::Failure, texts::Texts};

/// A group of fields with a title.
pub struct Section {
    pub title: &'static str,
    pub inputs: Vec<Input>,
    /// Whether the explanation of the timing follows.
    pub is_explained: bool,
}

pub struct Input {
    pub name: &'static str,
    pub label: &'static str,
    pub value: String,
    pub placeholder: &'static str,
    pub control: Control,
    pub is_required: bool,
    /// Whether the explanation depends on it.
    pub is_timing: bool,
    pub is_invalid: bool,
}

pub enum Control {
    Line,
    /// Several lines.
    Area,
    /// Values and the words for them.
    Choice(Vec<(&'static str, &'static str)>),
}

impl Input {
    fn required(mut self) -> Input {
        self.is_required = true;
        self
    }

    fn placeholder(mut self, text: &'static str) -> Input {
        self.placeholder = text;
        self
    }

    /// Returns the class of the label: what has several lines gets the whole width.
    pub fn class(&self) -> &'static str {
        if matches!(self.control, Control::Area) { "wide" } else { "" }
    }
}

const TIME_EXAMPLE: &str = "2026-12-01T00:00:00Z";

/// Returns the fields with what `entries` has for them. `invalid` names the fields with errors.
pub fn sections(t: &'static Texts, entries: &Entries, invalid: &[(String, String)]) -> Vec<Section> {
    let input = |name: &'static str, label: &'static str, control: Control| Input {
        name,
        label,
        value: entries.get(name).to_owned(),
        placeholder: "",
        control,
        is_required: false,
        is_timing: TIMING.contains(&name),
        is_invalid: invalid.iter().any(|(path, _)| is_about(path, name)),
    };
    let line = |name, label| input(name, label, Control::Line);
    let area = |name, label| input(name, label, Control::Area);
    let choice = |name, label, values: &[&'static str]| {
        let word = |value: &&'static str| (*value, if value.is_empty() { t.automatic } else { t.word(value) });
        input(name, label, Control::Choice(values.iter().map(word).collect()))
    };
    let priorities = ["LOW", "NORMAL", "HIGH", "CRITICAL"].map(|priority| (priority, t.priority_word(priority)));
    vec![
        Section {
            title: t.timing,
            is_explained: true,
            inputs: vec![
                line("name", t.name).required(),
                line("cronExpression", t.cron_expression),
                line("intervalMs", t.interval),
                line("timezone", t.time_zone).placeholder("UTC"),
                line("startAt", t.start_at).placeholder(TIME_EXAMPLE),
                line("endAt", t.end_at).placeholder(TIME_EXAMPLE),
                choice("dstGap", t.dst_gap, &["", "next", "skip"]),
                choice("dstOverlap", t.dst_overlap, &["", "first", "both"]),
                line("maxRuns", t.max_runs).placeholder(t.unlimited),
                area("except", t.except),
            ],
        },
        Section {
            title: t.job,
            is_explained: false,
            inputs: vec![
                line("jobName", t.name_or_type).required(),
                line("jobType", t.job_type_if_different),
                line("queue", t.queue).placeholder("default"),
                input("jobPriority", t.priority_title, Control::Choice(priorities.to_vec())),
                line("maxRetries", t.max_retries).placeholder("3"),
                line("retryDelay", t.retry_delay).placeholder("1s"),
                line("timeoutMs", t.time_limit).placeholder("5m"),
                line("webhookUrl", t.webhook_url),
                line("concurrencyKey", t.concurrency_key),
                line("tags", t.tags_help),
                area("jobPayload", t.payload_json),
            ],
        },
        Section {
            title: t.policies,
            is_explained: false,
            inputs: vec![
                choice("misfire", t.misfire, &["run_once", "skip", "catch_up"]),
                line("misfireGraceMs", t.misfire_grace).placeholder("1m"),
                line("catchUpLimit", t.catch_up_limit).placeholder("100"),
                choice("overlap", t.overlap, &["allow", "skip", "queue_one", "cancel_previous"]),
                line("jitterMs", t.jitter).placeholder("30s"),
                area("description", t.description),
            ],
        },
    ]
}

/// Returns whether an error of the API at `path` is about a field: `except[2]` is about `except`.
fn is_about(path: &str, name: &str) -> bool {
    path.strip_prefix(name).is_some_and(|rest| rest.is_empty() || rest.starts_with(['.', '[']))
}

/// Returns what is wrong, with the labels of the form instead of the names of the API.
pub fn message(sections: &[Section], failure: &Failure) -> String {
    if failure.fields.is_empty() {
        return failure.message.clone();
    }
    let label = |path: &str| {
        let mut inputs = sections.iter().flat_map(|section| &section.inputs);
        inputs.find(|input| is_about(path, input.name)).map_or_else(|| path.to_owned(), |input| input.label.to_owned())
    };
    let errors = failure.fields.iter().map(|(path, message)| format!("{}: {message}", label(path)));
    errors.collect::<Vec<_>>().join("; ")
}
