//! Forms to submit a job, new or as a copy of another job, and to edit a job that has not started.

use askama::Template;
use axum::{
    extract::{Path, RawQuery},
    response::Response,
};
use serde::Deserialize;
use serde_json::{Map, Value, json};

use crate::{
    action::show_result,
    content::pretty,
    error::Failure,
    form::Form,
    format::short_id,
    layout::Page,
    query::{Pairs, segment},
    session::{self, Notice},
    texts::Texts,
    viewer::Viewer,
};

/// The fields of the form, as the viewer typed them.
#[derive(Deserialize, Default, Clone)]
#[serde(default)]
pub struct Fields {
    name: String,
    queue: String,
    priority: String,
    payload: String,
    tags: String,
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
    fields: &'a Fields,
    /// The job that is edited; `None`: the form submits a new one.
    edited: Option<String>,
    is_new: bool,
    priorities: [&'static str; 4],
    error: Option<String>,
}

#[derive(Deserialize)]
struct Source {
    name: String,
    queue: String,
    priority: String,
    payload: Value,
    #[serde(default)]
    tags: Vec<String>,
}

impl Source {
    fn fields(self) -> Fields {
        Fields {
            name: self.name,
            queue: self.queue,
            priority: self.priority,
            payload: pretty(&self.payload),
            tags: self.tags.join(", "),
        }
    }
}

fn form(viewer: &Viewer, id: Option<&str>, fields: &Fields, error: Option<String>) -> Result<Page, Failure> {
    let (t, base) = (viewer.texts(), viewer.base());
    let (title, path) = match id {
        Some(id) => (t.edit_job, format!("{base}/jobs/{}/edit", segment(id))),
        None => (t.new_job, format!("{base}/jobs/new")),
    };
    let back = id.map_or(format!("{base}/jobs"), |id| format!("{base}/jobs/{}", segment(id)));
    let priorities = ["LOW", "NORMAL", "HIGH", "CRITICAL"];
    let edited = id.map(short_id);
    let page = FormPage { t, base, title, action: path, back, fields, edited, is_new: id.is_none(), priorities, error };
    Page::exact(title, "/jobs", &page)
}

pub async fn show(viewer: Viewer, RawQuery(query): RawQuery) -> Result<Page, Failure> {
    let fields = match Pairs::parse(query.as_deref()).get("from") {
        Some(id) => viewer.get::<Source>(&format!("/api/v1/jobs/{}", segment(id))).await?.fields(),
        None => {
            Fields { queue: "default".into(), priority: "NORMAL".into(), payload: "{}".into(), ..Fields::default() }
        }
    };
    form(&viewer, None, &fields, None)
}

pub async fn show_edit(viewer: Viewer, Path(id): Path<String>) -> Result<Page, Failure> {
    let source: Source = viewer.get(&format!("/api/v1/jobs/{}", segment(&id))).await?;
    form(&viewer, Some(&id), &source.fields(), None)
}

/// Returns the body of the request to the API.
fn body(fields: &Fields, t: &Texts) -> Result<Map<String, Value>, Failure> {
    let payload = fields.payload.trim();
    let payload: Value = serde_json::from_str(if payload.is_empty() { "{}" } else { payload })
        .map_err(|error| Failure::bad_request(format!("{}: {error}", t.payload)))?;
    let tags: Vec<&str> = fields.tags.split(',').map(str::trim).filter(|tag| !tag.is_empty()).collect();
    let mut body = Map::new();
    body.insert("priority".into(), json!(fields.priority));
    body.insert("payload".into(), payload);
    body.insert("tags".into(), json!(tags));
    Ok(body)
}

pub async fn submit(viewer: Viewer, Form(fields): Form<Fields>) -> Result<Response, Failure> {
    let t = viewer.texts();
    let result = match body(&fields, t) {
        Ok(mut body) => {
            body.insert("name".into(), json!(fields.name));
            body.insert("queue".into(), json!(fields.queue));
            viewer.post_json("/api/v1/jobs", &Value::Object(body)).await
        }
        Err(failure) => Err(failure),
    };
    match result {
        Ok(created) => {
            let id = created["id"].as_str().unwrap_or_default();
            let notice = Notice { is_error: false, text: t.job_was_submitted.to_owned() };
            Ok(session::redirect(&viewer, &format!("/jobs/{id}"), Some(notice)))
        }
        Err(failure) => again(&viewer, None, &fields, failure),
    }
}

pub async fn save_edit(
    viewer: Viewer,
    Path(id): Path<String>,
    Form(fields): Form<Fields>,
) -> Result<Response, Failure> {
    let t = viewer.texts();
    let result = match body(&fields, t) {
        Ok(body) => viewer.patch(&format!("/api/v1/jobs/{}", segment(&id)), &Value::Object(body)).await,
        Err(failure) => Err(failure),
    };
    match result {
        Err(failure) => again(&viewer, Some(&id), &fields, failure),
        saved => show_result(&viewer, &format!("/jobs/{}", segment(&id)), saved, t.saved),
    }
}

/// Shows the form again with the submitted values and the error.
fn again(viewer: &Viewer, id: Option<&str>, fields: &Fields, failure: Failure) -> Result<Response, Failure> {
    use axum::response::IntoResponse;
    if failure.needs_login() {
        return Err(failure);
    }
    let page = form(viewer, id, fields, Some(failure.message))?;
    Ok(page.with_status(failure.status).into_response())
}
