//! Forms to submit a job, new or as a copy of another job, and to edit a waiting job.

use askama::Template;
use axum::{
    extract::{Path, RawQuery},
    response::{IntoResponse, Response},
};
use serde_json::{Map, Value, json};

use crate::{
    action::show_result,
    error::Failure,
    form::Fields,
    format::short_id,
    inputs::{Control, Entries, FieldKinds, Inputs, Kind, ORIGINAL, Section, TIME_EXAMPLE, message},
    layout::Page,
    query::{Pairs, segment},
    session::{self, Notice},
    texts::Texts,
    viewer::Viewer,
};

/// The fields of a new job. Their names are those of the API.
const FIELDS: FieldKinds = &[
    ("name", Kind::Text),
    ("type", Kind::Text),
    ("queue", Kind::Text),
    ("priority", Kind::Text),
    ("tags", Kind::List),
    ("payload", Kind::Json),
    ("scheduledAt", Kind::Text),
    ("expiresAt", Kind::Text),
    ("timeoutMs", Kind::Duration),
    ("maxRetries", Kind::Number),
    ("retryDelay", Kind::Duration),
    ("uniqueKey", Kind::Text),
    ("concurrencyKey", Kind::Text),
    ("webhookUrl", Kind::Text),
];

/// The fields that cannot be changed later.
const ONLY_NEW: [&str; 4] = ["type", "queue", "uniqueKey", "concurrencyKey"];

/// Name of the hidden field with the options of a copied job that have no field, as JSON.
const OTHERS: &str = "others";

/// Which job the form is about.
#[derive(Clone, Copy)]
enum Subject<'a> {
    New,
    CopyOf(&'a str),
    Edited(&'a str),
}

#[derive(Template)]
#[template(path = "job_form.html")]
struct FormPage<'a> {
    t: &'static Texts,
    base: &'a str,
    title: &'static str,
    /// Where the form is sent.
    action: String,
    back: String,
    /// The job that is edited or copied.
    other_job: Option<String>,
    /// Hidden fields.
    hidden: Vec<(&'static str, String)>,
    sections: Vec<Section>,
    button: &'static str,
    error: Option<String>,
}

fn form(viewer: &Viewer, subject: Subject, entries: &Entries, failure: Option<&Failure>) -> Result<Page, Failure> {
    let t = viewer.texts();
    let invalid = failure.map(|failure| failure.fields.as_slice()).unwrap_or_default();
    let sections = sections(t, subject, &Inputs { t, entries, invalid, timing: &[] });
    let page_of = |id: &str| format!("/jobs/{}", segment(id));
    let (title, action, other) = match subject {
        Subject::New => (t.new_job, "/jobs/new".to_owned(), None),
        Subject::CopyOf(id) => (t.new_job, Pairs::default().with("from", id).link("/jobs/new"), Some(id)),
        Subject::Edited(id) => (t.edit_job, format!("{}/edit", page_of(id)), Some(id)),
    };
    let hidden = match subject {
        Subject::Edited(_) => vec![(ORIGINAL, entries.get(ORIGINAL).to_owned())],
        _ => vec![(OTHERS, entries.get(OTHERS).to_owned())],
    };
    let page = FormPage {
        t,
        base: viewer.base(),
        title,
        action,
        back: other.map_or("/jobs".to_owned(), page_of),
        other_job: other.map(short_id),
        hidden,
        button: if matches!(subject, Subject::Edited(_)) { t.save } else { t.submit_job },
        error: failure.map(|failure| message(&sections, failure)),
        sections,
    };
    Page::exact(title, "/jobs", &page)
}

fn sections(t: &'static Texts, subject: Subject, inputs: &Inputs) -> Vec<Section> {
    let is_new = !matches!(subject, Subject::Edited(_));
    let only_new = |input| if is_new { vec![input] } else { Vec::new() };
    let mut job = vec![inputs.line("name", t.name_or_type).required()];
    job.extend(only_new(inputs.line("type", t.job_type_if_different)));
    job.extend(only_new(inputs.line("queue", t.queue).placeholder("default")));
    job.extend([inputs.priority("priority"), inputs.line("tags", t.tags_help), inputs.json("payload")]);
    let mut options = vec![
        inputs.line("scheduledAt", t.scheduled_for).placeholder(TIME_EXAMPLE),
        inputs.line("expiresAt", t.expires).placeholder(TIME_EXAMPLE),
        inputs.line("timeoutMs", t.time_limit).placeholder("30m"),
        inputs.line("maxRetries", t.max_retries).placeholder("3"),
        inputs.line("retryDelay", t.retry_delay).placeholder("1s"),
    ];
    options.extend(only_new(inputs.line("uniqueKey", t.unique_key)));
    options.extend(only_new(inputs.line("concurrencyKey", t.concurrency_key)));
    options.push(inputs.line("webhookUrl", t.webhook_url));
    vec![Section { title: t.job, inputs: job }, Section { title: t.options, inputs: options }]
}

/// Options of a job that have no effect on a copy if they have this value.
fn defaults() -> [(&'static str, Value); 8] {
    [
        ("queue", json!("default")),
        ("priority", json!("NORMAL")),
        ("maxRetries", json!(3)),
        ("retryDelay", json!(1_000)),
        ("backoffMultiplier", json!(2.0)),
        ("maxDelay", json!(60_000)),
        ("jitter", json!(0.0)),
        ("retryOn", json!("all")),
    ]
}

/// Returns the body that submits a job of the API again, without what only applies to the first one: times,
/// dependencies, correlation and idempotency key.
pub fn resubmission(job: &Value) -> Map<String, Value> {
    const COPIED: [&str; 17] = [
        "name",
        "type",
        "queue",
        "priority",
        "payload",
        "tags",
        "maxRetries",
        "retryDelay",
        "backoffMultiplier",
        "maxDelay",
        "retryDelays",
        "jitter",
        "retryOn",
        "timeoutMs",
        "uniqueKey",
        "concurrencyKey",
        "webhookUrl",
    ];
    let defaults = defaults();
    let is_default = |name: &str, value: &Value| {
        value.is_null()
            || value.as_array().is_some_and(Vec::is_empty)
            || defaults.iter().any(|(known, default)| *known == name && default == value)
            || (name == "type" && *value == job["name"])
    };
    let copied = COPIED.into_iter().filter(|name| !is_default(name, &job[*name]));
    copied.map(|name| (name.to_owned(), job[name].clone())).collect()
}

/// Returns the entries of a form that copies a job.
fn copy(job: &Value) -> Entries {
    let mut body = resubmission(job);
    // The form shows these even if they are the default.
    for name in ["queue", "priority"] {
        body.insert(name.to_owned(), job[name].clone());
    }
    let body = Value::Object(body);
    let mut entries = Entries::of(FIELDS, &body);
    let has_field = |name: &str| FIELDS.iter().any(|(known, _)| *known == name);
    let others = body.as_object().into_iter().flatten().filter(|(name, _)| !has_field(name));
    let others: Map<String, Value> = others.map(|(name, value)| (name.clone(), value.clone())).collect();
    if !others.is_empty() {
        entries.0.insert(OTHERS.to_owned(), Value::Object(others).to_string());
    }
    entries
}

/// Returns the entries of a form that edits a job.
fn editable(job: &Value) -> Entries {
    let mut entries = Entries::of(FIELDS, job);
    entries.0.retain(|name, _| !ONLY_NEW.contains(&name.as_str()));
    entries.0.insert(ORIGINAL.to_owned(), entries.to_json());
    entries
}

async fn read(viewer: &Viewer, id: &str) -> Result<Value, Failure> {
    viewer.get(&format!("/api/v1/jobs/{}", segment(id))).await
}

pub async fn show(viewer: Viewer, RawQuery(query): RawQuery) -> Result<Page, Failure> {
    if let Some(id) = Pairs::parse(query.as_deref()).get("from") {
        return form(&viewer, Subject::CopyOf(id), &copy(&read(&viewer, id).await?), None);
    }
    let default = [("queue", "default"), ("priority", "NORMAL"), ("payload", "{}")];
    let default = Entries::from_pairs(default.map(|(name, text)| (name.to_owned(), text.to_owned())));
    form(&viewer, Subject::New, &default, None)
}

pub async fn show_edit(viewer: Viewer, Path(id): Path<String>) -> Result<Page, Failure> {
    let entries = editable(&read(&viewer, &id).await?);
    form(&viewer, Subject::Edited(&id), &entries, None)
}

/// Returns the body that submits a job. Empty fields get their defaults.
fn submission(t: &Texts, entries: &Entries) -> Result<Value, Failure> {
    let mut body = match entries.get(OTHERS) {
        "" => Map::new(),
        others => serde_json::from_str(others).map_err(|error| Failure::bad_request(error.to_string()))?,
    };
    body.extend(entries.filled(t, FIELDS)?);
    Ok(Value::Object(body))
}

pub async fn submit(viewer: Viewer, RawQuery(query): RawQuery, Fields(fields): Fields) -> Result<Response, Failure> {
    let (t, entries) = (viewer.texts(), Entries::from_pairs(fields));
    let result = match submission(t, &entries) {
        Ok(body) => viewer.post_json("/api/v1/jobs", &body).await,
        Err(failure) => Err(failure),
    };
    match result {
        Ok(created) => {
            let id = created["id"].as_str().unwrap_or_default();
            let notice = Notice { is_error: false, text: t.job_was_submitted.to_owned() };
            Ok(session::redirect(&viewer, &format!("/jobs/{id}"), Some(notice)))
        }
        Err(failure) => {
            let query = Pairs::parse(query.as_deref());
            again(&viewer, query.get("from").map_or(Subject::New, Subject::CopyOf), &entries, failure)
        }
    }
}

/// Returns the body that changes what differs from the entries that the form was filled with.
fn change(t: &Texts, entries: &Entries) -> Result<Map<String, Value>, Failure> {
    let mut body = entries.changed(t, FIELDS, &entries.original()?)?;
    if body.get("payload") == Some(&Value::Null) {
        body.insert("payload".into(), json!({}));
    }
    let needs =
        [("timeoutMs", t.must_be_a_duration), ("maxRetries", t.must_be_a_number), ("retryDelay", t.must_be_a_duration)];
    let missing = needs.into_iter().filter(|(name, _)| body.get(*name) == Some(&Value::Null));
    let missing: Vec<_> = missing.map(|(name, message)| (name.to_owned(), message.to_owned())).collect();
    if missing.is_empty() { Ok(body) } else { Err(Failure::invalid(missing)) }
}

pub async fn save_edit(viewer: Viewer, Path(id): Path<String>, Fields(fields): Fields) -> Result<Response, Failure> {
    let (t, entries) = (viewer.texts(), Entries::from_pairs(fields));
    let path = format!("/jobs/{}", segment(&id));
    let result = match change(t, &entries) {
        // The API rejects an empty change.
        Ok(body) if body.is_empty() => Ok(Value::Null),
        Ok(body) => viewer.patch(&format!("/api/v1{path}"), &Value::Object(body)).await,
        Err(failure) => Err(failure),
    };
    match result {
        Err(failure) => again(&viewer, Subject::Edited(&id), &entries, failure),
        saved => show_result(&viewer, &path, saved, t.saved),
    }
}

/// Shows the form again with the submitted entries and the error.
fn again(viewer: &Viewer, subject: Subject, entries: &Entries, failure: Failure) -> Result<Response, Failure> {
    if failure.needs_login() {
        return Err(failure);
    }
    let page = form(viewer, subject, entries, Some(&failure))?;
    Ok(page.with_status(failure.status).into_response())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::texts::Language;

    fn job() -> Value {
        json!({
            "id": "j1", "name": "Charge order 94", "type": "payment.charge", "queue": "default", "priority": "HIGH",
            "payload": {"n": 94}, "tags": ["a", "b"], "maxRetries": 1, "retryDelay": 1000, "backoffMultiplier": 3.0,
            "maxDelay": 60_000, "jitter": 0.0, "retryOn": "transient", "timeoutMs": 90_000, "scheduledAt": "2026-11-18T14:00:00Z",
            "webhookUrl": "https://example.com/hook", "uniqueKey": null, "concurrencyKey": "customer-7",
            "correlationId": "c1", "idempotencyKey": "i1",
        })
    }

    #[test]
    fn a_copy_has_every_option_of_its_job_and_no_time_or_id() {
        let again = submission(Language::English.texts(), &copy(&job())).expect("a body");
        let expected = json!({
            "name": "Charge order 94", "type": "payment.charge", "queue": "default", "priority": "HIGH", "payload": {"n": 94},
            "tags": ["a", "b"], "maxRetries": 1, "backoffMultiplier": 3.0, "retryOn": "transient", "timeoutMs": 90_000,
            "webhookUrl": "https://example.com/hook", "concurrencyKey": "customer-7",
        });
        assert_eq!(again, expected);
    }

    #[test]
    fn only_what_a_person_changed_is_sent() {
        let t = Language::English.texts();
        let mut entries = editable(&job());
        let mut changed = |name: &str, text: &str| {
            entries.0.insert(name.to_owned(), text.to_owned());
            change(t, &entries).map(Value::Object)
        };
        assert_eq!(changed("payload", "{\"n\":94}").expect("nothing"), json!({}));
        assert_eq!(changed("payload", " ").expect("a payload"), json!({"payload": {}}));
        let failure = changed("maxRetries", "").expect_err("a number is needed");
        assert_eq!(failure.fields, [("maxRetries".to_owned(), t.must_be_a_number.to_owned())]);
        let both = json!({"payload": {}, "maxRetries": 5});
        assert_eq!(changed("maxRetries", "5").expect("a number"), both);
    }
}
