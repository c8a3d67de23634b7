//! Reads actions, deadlines, polls, timers and approvals.

use faena_domain::check_url_form;
use serde_json::Value;

use super::{
    Names,
    reader::{Fields, Findings, join},
};
use crate::{
    Template,
    definition::{Action, ApprovalRule, Deadline, Escalation, Expiry, JobAction, MAX_RECEIVERS, Poll, TimerRule},
    format, job,
    node::Node,
};

/// The type of job that calls a language model.
pub const LLM_JOB: &str = "llm.chat";

/// Maximum number of timers of one state, and of reminders of one approval. Every task in the state stores each of them.
const MAX_TIMERS: usize = 50;

/// Reads a list of actions.
pub(super) fn action_list(findings: &mut Findings, fields: &Fields<'_>, key: &str) -> Vec<Action> {
    let Some((node, path)) = fields.get(key) else { return Vec::new() };
    let items = findings.items(node);
    items.iter().flat_map(|item| action(findings, item, &path)).collect()
}

fn action(findings: &mut Findings, node: &Node, path: &str) -> Vec<Action> {
    let fields = findings.fields(node, path, &format::ACTION);
    let actions = actions_of(findings, &fields);
    if actions.is_empty() {
        findings.add(node.position, path, "an action needs one of set, emit, job or llm");
    }
    actions
}

/// Reads the actions that are written into one map: `set` first, then one of `emit`, `job` and `llm`.
pub(super) fn actions_of(findings: &mut Findings, fields: &Fields<'_>) -> Vec<Action> {
    let mut actions = Vec::new();
    if let Some((node, path)) = fields.get("set") {
        let entries = findings.entries(node, &path).iter();
        let mut values: Vec<_> = entries
            .map(|entry| {
                // A key whose value has an error still counts as set, so that its uses are not reported as well.
                let template = findings.template(&entry.value, &join(&path, &entry.key));
                (entry.key.clone(), template.unwrap_or(Template::Constant(Value::Null)))
            })
            .collect();
        // All values are computed before any is set, so the order has no effect. Sorted keys give a text and its
        // canonical form the same definition.
        values.sort_by(|(a, _), (b, _)| a.cmp(b));
        actions.push(Action::Set(values));
    }
    let written: Vec<&str> = ["emit", "job", "llm"].into_iter().filter(|key| fields.get(key).is_some()).collect();
    if written.len() > 1 {
        let message = format!("{} are separate actions: write them as a list under \"do\"", written.join(" and "));
        findings.add(fields.position, &fields.path, message);
    }
    let data = fields.read("data", |node, path| findings.template(node, path)).unwrap_or(Template::Map(Vec::new()));
    match written.first() {
        Some(&"emit") => {
            let event = fields.read("emit", |node, path| {
                let event = findings.text(node, path)?;
                findings.mention(&event, node.position, path);
                Some(event)
            });
            actions.extend(event.map(|event| Action::Emit { event, data }));
        }
        Some(&"job") => {
            let job_type = fields.read("job", |node, path| findings.text(node, path));
            let name = job_name(findings, fields, "name");
            actions
                .extend(job_type.zip(name).map(|(job_type, name)| job_action(findings, fields, name, job_type, data)));
        }
        Some(_) => {
            let name = job_name(findings, fields, "llm");
            actions.extend(name.map(|name| job_action(findings, fields, name, LLM_JOB.to_owned(), data)));
        }
        None => {}
    }
    check_misplaced(findings, fields, &written);
    actions
}

/// Reports keys of an action that would have no effect.
fn check_misplaced(findings: &mut Findings, fields: &Fields<'_>, written: &[&str]) {
    let owners: [(&str, &[&str], &str); 3] = [
        ("data", &["emit", "job", "llm"], "has no effect without emit, job or llm"),
        ("name", &["job"], "has no effect without job"),
        ("options", &["job", "llm"], "has no effect without job or llm"),
    ];
    for (key, owners, message) in owners {
        if let Some((node, path)) = fields.get(key)
            && !owners.iter().any(|owner| written.contains(owner))
        {
            findings.add(node.position, &path, message);
        }
    }
}

/// Reads the name of a job. It is one part of the name of the event that reports the job's end, so it has no dot.
fn job_name(findings: &mut Findings, fields: &Fields<'_>, key: &str) -> Option<String> {
    let Some((node, path)) = fields.get(key) else {
        findings.add(fields.position, &fields.path, "a job needs a \"name\": its end arrives as job.NAME.completed");
        return None;
    };
    let name = findings.text(node, &path)?;
    if name.contains('.') {
        findings.add(node.position, &path, "the name of a job must not contain a dot");
    }
    findings.name(&name, node.position, &path)
}

fn job_action(
    findings: &mut Findings,
    fields: &Fields<'_>,
    name: String,
    job_type: String,
    payload: Template,
) -> Action {
    let options = fields.read("options", |node, path| match node.to_json() {
        Value::Object(options) => Some(options),
        _ => {
            findings.add(node.position, path, "must be a map of a job's fields, such as queue or timeoutMs");
            None
        }
    });
    let options = options.unwrap_or_default();
    for error in job::check(&job_type, &options) {
        let path =
            if error.path == "type" { fields.path.clone() } else { join(&join(&fields.path, "options"), &error.path) };
        findings.add(fields.position, &path, error.message);
    }
    Action::Job(JobAction { name, job_type, payload, options })
}

pub(super) fn deadline(names: &Names<'_>, findings: &mut Findings, fields: &Fields<'_>) -> Option<Deadline> {
    let (node, path) = fields.get("deadline")?;
    let fields = findings.fields(node, &path, &format::DEADLINE);
    let mut duration = |key| fields.read(key, |node, path| findings.duration(node, path));
    let (silence_ms, no_progress_ms, total_ms) = (duration("silence"), duration("no_progress"), duration("total"));
    if ["silence", "no_progress", "total"].iter().all(|key| fields.get(key).is_none()) {
        findings.add(node.position, &path, "a deadline needs silence, no_progress or total");
    }
    let to = names.target(findings, &fields, "to")?;
    Some(Deadline { silence_ms, no_progress_ms, total_ms, to })
}

pub(super) fn poll(findings: &mut Findings, fields: &Fields<'_>) -> Option<Poll> {
    let (node, path) = fields.get("poll")?;
    let fields = findings.fields(node, &path, &format::POLL);
    let data = fields.read("data", |node, path| findings.template(node, path)).unwrap_or(Template::Map(Vec::new()));
    let every_ms = fields.read("every", |node, path| findings.period(node, path));
    let event = fields.read("emit", |node, path| {
        let event = findings.text(node, path)?;
        findings.mention(&event, node.position, path);
        Some(event)
    });
    Some(Poll { position: node.position, every_ms: every_ms?, event: event?, data })
}

pub(super) fn timers(findings: &mut Findings, fields: &Fields<'_>) -> Vec<TimerRule> {
    let Some((node, path)) = fields.get("timers") else { return Vec::new() };
    let mut timers = Vec::new();
    for entry in findings.entries(node, &path) {
        let path = join(&path, &entry.key);
        let name = entry.key.clone();
        findings.name(&name, entry.position, &path);
        let fields = findings.fields(&entry.value, &path, &format::TIMER);
        if fields.get("after").is_some() == fields.get("every").is_some() {
            findings.add(entry.position, &path, "a timer needs either \"after\" or \"every\"");
        }
        let after = fields.read("after", |node, path| findings.duration(node, path));
        let every = fields.read("every", |node, path| findings.period(node, path));
        // A timer with an error still exists, so that its event is not reported as well.
        timers.push(TimerRule { name, after_ms: after.or(every).unwrap_or(i64::MAX), repeats: every.is_some() });
    }
    if timers.len() > MAX_TIMERS {
        findings.add(node.position, &path, format!("a state may have at most {MAX_TIMERS} timers"));
    }
    timers
}

pub(super) fn approval(names: &Names<'_>, findings: &mut Findings, fields: &Fields<'_>) -> Option<ApprovalRule> {
    let (node, path) = fields.get("approval")?;
    let position = node.position;
    let fields = findings.fields(node, &path, &format::APPROVAL);
    let remind_ms = fields.get("remind").map(|(node, path)| {
        let items = findings.items(node);
        if items.len() > MAX_TIMERS {
            findings.add(node.position, &path, format!("there may be at most {MAX_TIMERS} reminders"));
        }
        items.iter().filter_map(|item| findings.duration(item, &path)).collect()
    });
    let escalate = fields.get("escalate").and_then(|(node, path)| {
        let fields = findings.fields(node, &path, &format::ESCALATION);
        let groups = texts(findings, &fields, "groups");
        let after_ms = fields.read("after", |node, path| findings.duration(node, path));
        if groups.is_empty() && fields.get("groups").is_some() {
            findings.add(node.position, &join(&path, "groups"), "needs at least one group");
        }
        Some(Escalation { after_ms: after_ms?, groups })
    });
    let expires = fields.get("expires").and_then(|(node, path)| {
        let fields = findings.fields(node, &path, &format::EXPIRY);
        let after_ms = fields.read("after", |node, path| findings.duration(node, path));
        let to = names.target(findings, &fields, "to");
        Some(Expiry { after_ms: after_ms?, to: to? })
    });
    Some(ApprovalRule {
        position,
        subject: fields.read("subject", |node, path| findings.template(node, path))?,
        quorum: fields.read("quorum", |node, path| findings.whole_number(node, path, 1)).unwrap_or(1),
        allow_creator: fields.read("self", |node, path| findings.flag(node, path)).unwrap_or_default(),
        groups: texts(findings, &fields, "groups"),
        remind_ms: remind_ms.unwrap_or_default(),
        escalate,
        expires,
        webhooks: receivers(findings, &fields),
    })
}

/// Reads URLs, and expressions that return URLs. The server that calls them decides which addresses are allowed.
fn receivers(findings: &mut Findings, fields: &Fields<'_>) -> Vec<Template> {
    let Some((node, path)) = fields.get("webhook") else { return Vec::new() };
    let items = findings.items(node);
    if items.len() > MAX_RECEIVERS {
        findings.add(node.position, &path, format!("there may be at most {MAX_RECEIVERS} receivers"));
    }
    let mut receivers = Vec::new();
    for item in items {
        let Some(text) = findings.text(item, &path) else { continue };
        if text.starts_with("http://") || text.starts_with("https://") {
            match check_url_form(&text) {
                Ok(()) => receivers.push(Template::Constant(Value::String(text))),
                Err(error) => findings.add(item.position, &path, error),
            }
        } else {
            receivers.extend(findings.expression(item, &path).map(Template::Expression));
        }
    }
    receivers
}

fn texts(findings: &mut Findings, fields: &Fields<'_>, key: &str) -> Vec<String> {
    let Some((node, path)) = fields.get(key) else { return Vec::new() };
    let items = findings.items(node);
    items.iter().filter_map(|item| findings.text(item, &path)).collect()
}
