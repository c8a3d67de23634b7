//! The form that creates and edits schedules, and explains when they run while a person types.

mod inputs;

use std::collections::BTreeMap;

use askama::Template;
use axum::{
    extract::{Path, RawQuery},
    response::{Html, IntoResponse, Response},
};
use faena_domain::{Timestamp, parse_duration, schedule::Timing};
use serde_json::{Map, Value, json};

use self::inputs::{Control, Section, sections};
use super::schedules::{Preview, explained, local_time};
use crate::{
    content::pretty,
    error::Failure,
    form::Fields,
    layout::Page,
    markup::Markup,
    query::{Pairs, segment},
    session::{self, Notice},
    texts::Texts,
    viewer::Viewer,
};

/// How the text of a field becomes a value of the API. An empty text is `null`.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Text,
    Number,
    /// Like `15m`; milliseconds in the API.
    Duration,
    Json,
    /// Separated by commas.
    List,
    /// One per line.
    Lines,
}

/// The fields of the form. Their names are those of the API.
const FIELDS: [(&str, Kind); 27] = [
    ("name", Kind::Text),
    ("description", Kind::Text),
    ("cronExpression", Kind::Text),
    ("intervalMs", Kind::Duration),
    ("timezone", Kind::Text),
    ("startAt", Kind::Text),
    ("endAt", Kind::Text),
    ("dstGap", Kind::Text),
    ("dstOverlap", Kind::Text),
    ("except", Kind::Lines),
    ("jitterMs", Kind::Duration),
    ("maxRuns", Kind::Number),
    ("misfire", Kind::Text),
    ("misfireGraceMs", Kind::Duration),
    ("catchUpLimit", Kind::Number),
    ("overlap", Kind::Text),
    ("jobName", Kind::Text),
    ("jobType", Kind::Text),
    ("queue", Kind::Text),
    ("jobPriority", Kind::Text),
    ("maxRetries", Kind::Number),
    ("retryDelay", Kind::Duration),
    ("timeoutMs", Kind::Duration),
    ("webhookUrl", Kind::Text),
    ("concurrencyKey", Kind::Text),
    ("tags", Kind::List),
    ("jobPayload", Kind::Json),
];

/// The fields that decide when a schedule runs. The form explains them while a person types.
const TIMING: [&str; 8] =
    ["cronExpression", "intervalMs", "timezone", "startAt", "endAt", "dstGap", "dstOverlap", "except"];

/// Name of the hidden field with the entries that the form was filled with.
const ORIGINAL: &str = "original";

/// What the fields contain, as a person typed it.
#[derive(Clone, Default)]
struct Entries(BTreeMap<String, String>);

impl Entries {
    fn get(&self, name: &str) -> &str {
        self.0.get(name).map(String::as_str).unwrap_or_default()
    }

    fn from_pairs(pairs: impl IntoIterator<Item = (String, String)>) -> Entries {
        // Browsers send line breaks as CR LF.
        Entries(pairs.into_iter().map(|(name, text)| (name, text.replace("\r\n", "\n"))).collect())
    }

    /// Returns the entries that show a schedule of the API.
    fn of(schedule: &Value) -> Entries {
        let entry = |&(name, kind): &(&str, Kind)| (name.to_owned(), text_of(&schedule[name], kind));
        let mut entries = Entries(FIELDS.iter().map(entry).collect());
        if schedule["jobType"] == schedule["jobName"] {
            entries.0.remove("jobType");
        }
        entries
    }

    /// Returns what decides when the schedule is due, apart from its start and end.
    fn timing(&self, t: &Texts) -> Timing {
        let value = |name: &str, kind| value_of(t, self.get(name), kind).unwrap_or_default();
        let text = |name: &str| value(name, Kind::Text).as_str().map(str::to_owned);
        let default = Timing::default();
        Timing {
            cron_expression: text("cronExpression"),
            interval_ms: value("intervalMs", Kind::Duration).as_u64(),
            timezone: text("timezone").unwrap_or(default.timezone),
            start_at: text("startAt").and_then(|at| Timestamp::parse(&at)),
            except: serde_json::from_value(value("except", Kind::Lines)).unwrap_or_default(),
            ..Timing::default()
        }
    }

    fn to_json(&self) -> String {
        serde_json::to_string(&self.0).unwrap_or_default()
    }

    /// Returns the type of the jobs: their name unless the form says otherwise.
    fn job_type(&self) -> &str {
        match self.get("jobType").trim() {
            "" => self.get("jobName"),
            kind => kind,
        }
    }

    /// Returns the values of some fields, or every field that cannot be read.
    fn values(&self, t: &Texts, is_wanted: impl Fn(&str) -> bool) -> Result<Map<String, Value>, Vec<(String, String)>> {
        let (mut values, mut errors) = (Map::new(), Vec::new());
        for (name, kind) in FIELDS.into_iter().filter(|(name, _)| is_wanted(name)) {
            match value_of(t, self.get(name), kind) {
                Ok(value) => drop(values.insert(name.to_owned(), value)),
                Err(message) => errors.push((name.to_owned(), message)),
            }
        }
        if errors.is_empty() { Ok(values) } else { Err(errors) }
    }

    /// Returns the body that creates a schedule. Empty fields get their defaults.
    fn creation(&self, t: &Texts) -> Result<Value, Failure> {
        let values = self.values(t, |name| !self.get(name).trim().is_empty()).map_err(Failure::invalid)?;
        Ok(Value::Object(values))
    }

    /// Returns the body that changes what differs from `original`, so that it does not undo what another person changed
    /// meanwhile in other fields.
    fn change(&self, t: &Texts, original: &Entries) -> Result<Map<String, Value>, Failure> {
        let differs = |name: &str| self.get(name) != original.get(name);
        let mut values = self.values(t, differs).map_err(Failure::invalid)?;
        // Another layout of the same JSON changes nothing.
        if serde_json::from_str::<Value>(original.get("jobPayload")).ok().as_ref() == values.get("jobPayload") {
            values.remove("jobPayload");
        }
        if self.job_type() != original.job_type() || values.contains_key("jobName") {
            values.insert("jobType".into(), json!(self.job_type()));
        } else {
            values.remove("jobType");
        }
        Ok(values)
    }
}

/// Returns what a field shows of a value of the API.
fn text_of(value: &Value, kind: Kind) -> String {
    let list = |separator: &str| {
        let texts: Vec<&str> = value.as_array().into_iter().flatten().filter_map(Value::as_str).collect();
        texts.join(separator)
    };
    match (kind, value) {
        (_, Value::Null) => String::new(),
        (Kind::Json, value) => pretty(value),
        (Kind::List, _) => list(", "),
        (Kind::Lines, _) => list("\n"),
        (Kind::Duration, Value::Number(ms)) => duration_text(ms.as_u64().unwrap_or_default()),
        (_, Value::String(text)) => text.clone(),
        (_, other) => other.to_string(),
    }
}

/// Writes a duration in the largest unit that divides it, as [`parse_duration`] reads it: `15m`.
fn duration_text(ms: u64) -> String {
    let units = [(86_400_000, "d"), (3_600_000, "h"), (60_000, "m"), (1_000, "s")];
    match units.into_iter().find(|(size, _)| ms > 0 && ms.is_multiple_of(*size)) {
        Some((size, unit)) => format!("{}{unit}", ms / size),
        None => format!("{ms}ms"),
    }
}

/// Returns the value of the API that a text stands for.
fn value_of(t: &Texts, text: &str, kind: Kind) -> Result<Value, String> {
    let trimmed = text.trim();
    let list = |parts: std::str::Split<'_, char>| -> Value {
        parts.map(str::trim).filter(|part| !part.is_empty()).map(Value::from).collect()
    };
    if trimmed.is_empty() {
        return Ok(Value::Null);
    }
    match kind {
        Kind::Text => Ok(json!(trimmed)),
        Kind::Number => trimmed.parse::<u64>().map(Value::from).map_err(|_| t.must_be_a_number.to_owned()),
        Kind::Duration => {
            let ms = parse_duration(trimmed).and_then(|duration| u64::try_from(duration.as_millis()).ok());
            ms.map(Value::from).ok_or_else(|| t.must_be_a_duration.to_owned())
        }
        Kind::Json => serde_json::from_str(trimmed).map_err(|error| format!("{}: {error}", t.not_json)),
        Kind::List => Ok(list(trimmed.split(','))),
        Kind::Lines => Ok(list(trimmed.split('\n'))),
    }
}

/// The schedule that a form edits.
struct Edited {
    id: String,
    original: Entries,
}

impl Edited {
    fn path(&self) -> String {
        format!("/schedules/{}", segment(&self.id))
    }
}

#[derive(Template)]
#[template(path = "schedule_form.html")]
struct FormPage<'a> {
    t: &'static Texts,
    base: &'a str,
    title: &'static str,
    name: &'a str,
    action: String,
    back: String,
    /// The entries that an edited schedule had when the form was opened.
    original: Option<String>,
    sections: Vec<Section>,
    error: Option<String>,
    explained: Markup,
}

async fn form(
    viewer: &Viewer,
    edited: Option<&Edited>,
    entries: &Entries,
    failure: Option<&Failure>,
) -> Result<Page, Failure> {
    let (t, base) = (viewer.texts(), viewer.base());
    let invalid = failure.map(|failure| failure.fields.as_slice()).unwrap_or_default();
    let sections = sections(t, entries, invalid);
    let page = FormPage {
        t,
        base,
        title: if edited.is_some() { t.edit_schedule } else { t.new_schedule },
        name: edited.map(|edited| edited.original.get("name")).unwrap_or_default(),
        action: edited.map_or("/schedules/new".to_owned(), |edited| format!("{}/edit", edited.path())),
        back: edited.map_or("/schedules".to_owned(), Edited::path),
        original: edited.map(|edited| edited.original.to_json()),
        error: failure.map(|failure| inputs::message(&sections, failure)),
        explained: explanation(viewer, entries).await,
        sections,
    };
    Page::exact(page.title, "/schedules", &page)
}

pub async fn show_new(viewer: Viewer) -> Result<Page, Failure> {
    let default = [
        ("cronExpression", "0 2 * * *"),
        ("timezone", "UTC"),
        ("misfire", "run_once"),
        ("overlap", "allow"),
        ("queue", "default"),
        ("jobPriority", "NORMAL"),
        ("jobPayload", "{}"),
    ];
    let default = Entries::from_pairs(default.map(|(name, text)| (name.to_owned(), text.to_owned())));
    form(&viewer, None, &default, None).await
}

pub async fn show_edit(viewer: Viewer, Path(id): Path<String>) -> Result<Page, Failure> {
    let schedule: Value = viewer.get(&format!("/api/v1/schedules/{}", segment(&id))).await?;
    let original = Entries::of(&schedule);
    form(&viewer, Some(&Edited { id, original: original.clone() }), &original, None).await
}

pub async fn create(viewer: Viewer, Fields(fields): Fields) -> Result<Response, Failure> {
    let (t, entries) = (viewer.texts(), Entries::from_pairs(fields));
    let result = match entries.creation(t) {
        Ok(body) => viewer.post_json("/api/v1/schedules", &body).await,
        Err(failure) => Err(failure),
    };
    match result {
        Ok(created) => {
            let id = created["id"].as_str().unwrap_or_default();
            let notice = Notice { is_error: false, text: t.schedule_was_created.to_owned() };
            Ok(session::redirect(&viewer, &format!("/schedules/{id}"), Some(notice)))
        }
        Err(failure) => again(&viewer, None, &entries, failure).await,
    }
}

pub async fn save_edit(viewer: Viewer, Path(id): Path<String>, Fields(fields): Fields) -> Result<Response, Failure> {
    let (t, entries) = (viewer.texts(), Entries::from_pairs(fields));
    let original = serde_json::from_str(entries.get(ORIGINAL)).map(Entries);
    let edited = Edited { id, original: original.map_err(|error| Failure::bad_request(error.to_string()))? };
    let result = match entries.change(t, &edited.original) {
        // The API rejects a change of nothing.
        Ok(body) if body.is_empty() => Ok(Value::Null),
        Ok(body) => viewer.patch(&format!("/api/v1{}", edited.path()), &Value::Object(body)).await,
        Err(failure) => Err(failure),
    };
    match result {
        Ok(_) => {
            let notice = Notice { is_error: false, text: t.saved.to_owned() };
            Ok(session::redirect(&viewer, &edited.path(), Some(notice)))
        }
        Err(failure) => again(&viewer, Some(&edited), &entries, failure).await,
    }
}

/// Shows the form again with the submitted entries and the error.
async fn again(
    viewer: &Viewer,
    edited: Option<&Edited>,
    entries: &Entries,
    failure: Failure,
) -> Result<Response, Failure> {
    if failure.needs_login() {
        return Err(failure);
    }
    let page = form(viewer, edited, entries, Some(&failure)).await?;
    Ok(page.with_status(failure.status).into_response())
}

#[derive(Template)]
#[template(path = "explanation.html")]
struct Explained {
    t: &'static Texts,
    explanation: String,
    runs: Vec<(String, String)>,
    error: Option<String>,
}

/// Describes when a schedule is due, and lists its next due times.
async fn explanation(viewer: &Viewer, entries: &Entries) -> Markup {
    let t = viewer.texts();
    let is_wanted = |name: &str| TIMING.contains(&name) && !entries.get(name).trim().is_empty();
    let answer = match entries.values(t, is_wanted) {
        Ok(mut body) => {
            body.extend([("name".to_owned(), json!("preview")), ("jobName".to_owned(), json!("noop"))]);
            viewer.post_json("/api/v1/schedules/validate", &Value::Object(body)).await
        }
        Err(errors) => Err(Failure::invalid(errors)),
    };
    let parsed = answer.and_then(|value| serde_json::from_value::<Preview>(value).map_err(Failure::internal));
    Markup::of(&match parsed {
        Ok(preview) => Explained {
            t,
            explanation: explained(viewer, &entries.timing(t), &preview.explanation.unwrap_or_default()),
            runs: preview.next_runs.into_iter().take(5).map(|run| (local_time(&run.local), run.note(t))).collect(),
            error: None,
        },
        Err(failure) => {
            let error = Some(inputs::message(&sections(t, entries, &[]), &failure));
            Explained { t, explanation: String::new(), runs: Vec::new(), error }
        }
    })
}

/// Explains the timing while a person types it.
pub async fn explain(viewer: Viewer, RawQuery(query): RawQuery) -> Html<String> {
    let query = Pairs::parse(query.as_deref());
    let entry = |name: &str| Some((name.to_owned(), query.get(name)?.to_owned()));
    let entries = Entries::from_pairs(TIMING.into_iter().filter_map(entry));
    Html(explanation(&viewer, &entries).await.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::texts::Language;

    fn schedule() -> Value {
        json!({
            "name": "nightly", "description": "a\nb", "cronExpression": "0 2 * * *", "intervalMs": null, "timezone": "UTC",
            "except": ["2026-12-25", "0 0 1,15 * *"], "jitterMs": 90_000, "misfire": "skip", "jobName": "sync", "jobType": "sync",
            "queue": "q", "maxRetries": 3, "tags": ["a", "b"], "jobPayload": {"n": 1}, "webhookUrl": null,
        })
    }

    fn changed(edit: &[(&str, &str)]) -> Value {
        let original = Entries::of(&schedule());
        let mut entries = original.clone();
        entries.0.extend(edit.iter().map(|(name, text)| ((*name).to_owned(), (*text).to_owned())));
        Value::Object(entries.change(Language::English.texts(), &original).expect("values"))
    }

    #[test]
    fn only_what_a_person_changed_is_sent() {
        assert_eq!(changed(&[]), json!({}));
        assert_eq!(changed(&[("jobPayload", "{\"n\":1}")]), json!({}), "another layout of the same JSON");
        assert_eq!(
            changed(&[("jitterMs", "2m"), ("description", ""), ("except", "2026-12-25\n\n2027-01-01")]),
            json!({"jitterMs": 120_000, "description": null, "except": ["2026-12-25", "2027-01-01"]})
        );
        let interval = json!({"cronExpression": null, "intervalMs": 900_000});
        assert_eq!(changed(&[("cronExpression", ""), ("intervalMs", "15m")]), interval);
    }

    #[test]
    fn the_type_of_the_jobs_follows_their_name_unless_it_is_set() {
        assert_eq!(changed(&[("jobName", "load")]), json!({"jobName": "load", "jobType": "load"}));
        assert_eq!(changed(&[("jobType", "load")]), json!({"jobType": "load"}));
        assert_eq!(changed(&[("jobType", "sync")]), json!({}), "the type it has already");
    }

    #[test]
    fn every_field_that_cannot_be_read_is_named() {
        let edit = [("jitterMs", "soon"), ("maxRetries", "-1"), ("jobPayload", "{")];
        let entries = Entries::from_pairs(edit.map(|(name, text)| (name.to_owned(), text.to_owned())));
        let failure = entries.creation(Language::English.texts()).expect_err("three errors");
        let names: Vec<&str> = failure.fields.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names, ["jitterMs", "maxRetries", "jobPayload"]);
    }

    #[test]
    fn a_duration_is_written_as_it_is_read() {
        for (ms, text) in [(0, "0ms"), (250, "250ms"), (90_000, "90s"), (7_200_000, "2h"), (172_800_000, "2d")] {
            assert_eq!(duration_text(ms), text);
            assert_eq!(value_of(Language::English.texts(), text, Kind::Duration), Ok(json!(ms)));
        }
    }
}
