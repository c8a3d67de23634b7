//! The form that creates and edits schedules, and explains when they run while a person types.

use askama::Template;
use axum::{
    extract::{Path, RawQuery},
    response::{Html, IntoResponse, Response},
};
use faena_domain::{Timestamp, schedule::Timing};
use serde_json::{Map, Value, json};

use super::schedules::{Preview, explained, local_time};
use crate::{
    error::Failure,
    form::Fields,
    inputs::{Control, Entries, FieldKinds, Inputs, Kind, Section, TIME_EXAMPLE, message, value_of},
    layout::Page,
    markup::Markup,
    query::{Pairs, segment},
    session::{self, Notice},
    texts::Texts,
    viewer::Viewer,
};

/// The fields of the form. Their names are those of the API.
const FIELDS: FieldKinds = &[
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
const TIMING: &[&str] =
    &["cronExpression", "intervalMs", "timezone", "startAt", "endAt", "dstGap", "dstOverlap", "except"];

/// Returns the entries that show a schedule of the API.
fn entries_of(schedule: &Value) -> Entries {
    let mut entries = Entries::of(FIELDS, schedule);
    if schedule["jobType"] == schedule["jobName"] {
        entries.0.remove("jobType");
    }
    entries
}

/// Returns the timing without its end and its rules for daylight saving.
fn timing(t: &Texts, entries: &Entries) -> Timing {
    let value = |name: &str, kind| value_of(t, entries.get(name), kind).unwrap_or_default();
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

/// Returns the type of the jobs: their name unless the form says otherwise.
fn job_type(entries: &Entries) -> &str {
    match entries.get("jobType").trim() {
        "" => entries.get("jobName"),
        kind => kind,
    }
}

/// Returns the body that changes what differs from `original`.
fn change(t: &Texts, entries: &Entries, original: &Entries) -> Result<Map<String, Value>, Failure> {
    let mut values = entries.changed(t, FIELDS, original)?;
    if job_type(entries) != job_type(original) || values.contains_key("jobName") {
        values.insert("jobType".into(), json!(job_type(entries)));
    } else {
        values.remove("jobType");
    }
    Ok(values)
}

/// Returns the fields with their values from `entries`. `invalid` names the fields with errors.
fn sections(t: &'static Texts, entries: &Entries, invalid: &[(String, String)]) -> Vec<Section> {
    let inputs = Inputs { t, entries, invalid, timing: TIMING };
    vec![
        Section {
            title: t.timing,
            inputs: vec![
                inputs.line("name", t.name).required(),
                inputs.line("cronExpression", t.cron_expression),
                inputs.line("intervalMs", t.interval),
                inputs.line("timezone", t.time_zone).placeholder("UTC"),
                inputs.line("startAt", t.start_at).placeholder(TIME_EXAMPLE),
                inputs.line("endAt", t.end_at).placeholder(TIME_EXAMPLE),
                inputs.choice("dstGap", t.dst_gap, &["", "next", "skip"]),
                inputs.choice("dstOverlap", t.dst_overlap, &["", "first", "both"]),
                inputs.line("maxRuns", t.max_runs).placeholder(t.unlimited),
                inputs.area("except", t.except),
            ],
        },
        Section {
            title: t.job,
            inputs: vec![
                inputs.line("jobName", t.name_or_type).required(),
                inputs.line("jobType", t.job_type_if_different),
                inputs.line("queue", t.queue).placeholder("default"),
                inputs.priority("jobPriority"),
                inputs.line("maxRetries", t.max_retries).placeholder("3"),
                inputs.line("retryDelay", t.retry_delay).placeholder("1s"),
                inputs.line("timeoutMs", t.time_limit).placeholder("5m"),
                inputs.line("webhookUrl", t.webhook_url),
                inputs.line("concurrencyKey", t.concurrency_key),
                inputs.line("tags", t.tags_help),
                inputs.json("jobPayload"),
            ],
        },
        Section {
            title: t.policies,
            inputs: vec![
                inputs.choice("misfire", t.misfire, &["run_once", "skip", "catch_up"]),
                inputs.line("misfireGraceMs", t.misfire_grace).placeholder("1m"),
                inputs.line("catchUpLimit", t.catch_up_limit).placeholder("100"),
                inputs.choice("overlap", t.overlap, &["allow", "skip", "queue_one", "cancel_previous"]),
                inputs.line("jitterMs", t.jitter).placeholder("30s"),
                inputs.area("description", t.description),
            ],
        },
    ]
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
    /// The id of an edited schedule, and the entries that it had when the form was opened.
    edited: Option<(&'a str, String)>,
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
        edited: edited.map(|edited| (edited.id.as_str(), edited.original.to_json())),
        error: failure.map(|failure| message(&sections, failure)),
        explained: explanation(viewer, edited, entries).await,
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
    let edited = read_edited(&viewer, id).await?;
    form(&viewer, Some(&edited), &edited.original, None).await
}

async fn read_edited(viewer: &Viewer, id: String) -> Result<Edited, Failure> {
    let schedule: Value = viewer.get(&format!("/api/v1/schedules/{}", segment(&id))).await?;
    Ok(Edited { id, original: entries_of(&schedule) })
}

pub async fn create(viewer: Viewer, Fields(fields): Fields) -> Result<Response, Failure> {
    let (t, entries) = (viewer.texts(), Entries::from_pairs(fields));
    let result = match entries.filled(t, FIELDS) {
        Ok(body) => viewer.post_json("/api/v1/schedules", &Value::Object(body)).await,
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
    let edited = Edited { id, original: entries.original()? };
    let result = match change(t, &entries, &edited.original) {
        // The API rejects an empty change.
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
///
/// An interval is counted from the time when it was set. So while the timing of an edited schedule is unchanged, its own
/// due times are listed.
async fn explanation(viewer: &Viewer, edited: Option<&Edited>, entries: &Entries) -> Markup {
    let t = viewer.texts();
    let unchanged = edited.filter(|edited| TIMING.iter().all(|name| entries.get(name) == edited.original.get(name)));
    let answer = match unchanged {
        Some(edited) => viewer.get(&format!("/api/v1{}/preview?count=5", edited.path())).await,
        None => validate(viewer, entries).await,
    };
    Markup::of(&match answer {
        Ok(Preview { explanation, next_runs }) => Explained {
            t,
            explanation: explained(viewer, &timing(t, entries), &explanation.unwrap_or_default()),
            runs: next_runs.into_iter().take(5).map(|run| (local_time(&run.local), run.note(t))).collect(),
            error: None,
        },
        Err(failure) => {
            let error = Some(message(&sections(t, entries, &[]), &failure));
            Explained { t, explanation: String::new(), runs: Vec::new(), error }
        }
    })
}

/// Returns when a schedule with this timing would be due if it was saved now.
async fn validate(viewer: &Viewer, entries: &Entries) -> Result<Preview, Failure> {
    let is_wanted = |name: &str| TIMING.contains(&name) && !entries.get(name).trim().is_empty();
    let mut body = entries.values(viewer.texts(), FIELDS, is_wanted)?;
    body.extend([("name".to_owned(), json!("preview")), ("jobName".to_owned(), json!("noop"))]);
    let answer = viewer.post_json("/api/v1/schedules/validate", &Value::Object(body)).await?;
    serde_json::from_value(answer).map_err(Failure::internal)
}

/// Explains the timing while a person types it. `schedule` is the id of the schedule that is edited.
pub async fn explain(viewer: Viewer, RawQuery(query): RawQuery) -> Html<String> {
    let query = Pairs::parse(query.as_deref());
    let entry = |name: &&str| Some(((*name).to_owned(), query.get(name)?.to_owned()));
    let entries = Entries::from_pairs(TIMING.iter().filter_map(entry));
    let edited = match query.get("schedule") {
        Some(id) => read_edited(&viewer, id.to_owned()).await.ok(),
        None => None,
    };
    Html(explanation(&viewer, edited.as_ref(), &entries).await.to_string())
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
        let original = entries_of(&schedule());
        let mut entries = original.clone();
        entries.0.extend(edit.iter().map(|(name, text)| ((*name).to_owned(), (*text).to_owned())));
        Value::Object(change(Language::English.texts(), &entries, &original).expect("values"))
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
}
