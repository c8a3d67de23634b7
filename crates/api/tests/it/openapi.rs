//! The OpenAPI document and its page.

use std::collections::BTreeSet;

use axum::{body::Body, http::Request};
use faena_api::{DeclaredRoute, declared_routes};
use serde_json::{Value, json};

use crate::{
    app::App,
    conformance::{DOCUMENT, resolve, violations},
};

/// Returns every operation of the document with its method and its path.
fn operations() -> Vec<(String, &'static str, &'static Value)> {
    let paths = DOCUMENT["paths"].as_object().unwrap();
    let of_path = |(path, operations): (&'static String, &'static Value)| {
        let operations = operations.as_object().unwrap().iter();
        operations.map(|(method, operation)| (method.to_uppercase(), path.as_str(), operation))
    };
    paths.iter().flat_map(of_path).collect()
}

fn parameters(operation: &'static Value, location: &str) -> BTreeSet<&'static str> {
    let all = operation["parameters"].as_array().unwrap().iter().map(resolve);
    all.filter(|parameter| parameter["in"] == location).filter_map(|parameter| parameter["name"].as_str()).collect()
}

#[test]
fn the_document_has_exactly_the_routes_of_the_router() {
    let routes: BTreeSet<(String, String)> = declared_routes()
        .declared()
        .into_iter()
        .map(|DeclaredRoute { method, path, .. }| (method.into(), path))
        .collect();
    let documented: BTreeSet<(String, String)> =
        operations().into_iter().map(|(method, path, _)| (method, path.to_owned())).collect();
    assert_eq!(routes, documented);
    assert!(documented.len() > 80, "the list is complete");
}

#[tokio::test]
async fn the_router_serves_every_operation_of_the_document() {
    let app = App::start().await;
    for (method, path, _) in operations().into_iter().filter(|(_, path, _)| !path.ends_with("/events")) {
        let path =
            path.split('/').map(|part| if part.starts_with('{') { "x" } else { part }).collect::<Vec<_>>().join("/");
        let answer = app.call(&method, &path, "").await;
        let is_unknown = answer.status == 405 || answer.text.contains("no resource at");
        assert!(!is_unknown, "{method} {path}: {}", answer.text);
    }
}

#[test]
fn every_operation_is_described_completely() {
    let mut ids = BTreeSet::new();
    let tags: Vec<&Value> = DOCUMENT["tags"].as_array().unwrap().iter().map(|tag| &tag["name"]).collect();
    for (method, path, operation) in operations() {
        let name = format!("{method} {path}");
        assert!(ids.insert(operation["operationId"].as_str().unwrap()), "{name}: the operation id is used twice");
        assert!(tags.contains(&&operation["tags"][0]), "{name}: the tag is unknown");
        assert!(!operation["summary"].as_str().unwrap().ends_with('.'), "{name}: a summary is a title");
        assert!(!operation["description"].as_str().unwrap().is_empty(), "{name}");
        let variables = path.split('/').filter_map(|part| part.strip_prefix('{')?.strip_suffix('}')).collect();
        assert_eq!(parameters(operation, "path"), variables, "{name}: the variables of the path");
        for parameter in operation["parameters"].as_array().unwrap().iter().map(resolve) {
            assert!(!parameter["description"].as_str().unwrap().is_empty(), "{name}: {parameter}");
        }
        for (status, answer) in operation["responses"].as_object().unwrap() {
            let answer = resolve(answer);
            assert!(!answer["description"].as_str().unwrap().is_empty(), "{name} {status}");
            for header in answer["headers"].as_object().unwrap().values() {
                assert!(resolve(header)["schema"].is_object(), "{name} {status}");
            }
        }
    }
}

#[test]
fn every_link_leads_to_a_parameter_of_an_operation() {
    for (_, path, operation) in operations() {
        let answers = operation["responses"].as_object().unwrap().values().map(resolve);
        for (name, link) in answers.filter_map(|answer| answer["links"].as_object()).flatten() {
            let (_, _, target) = operations()
                .into_iter()
                .find(|(_, _, target)| target["operationId"] == link["operationId"])
                .unwrap_or_else(|| panic!("{path}: the link {name} leads nowhere"));
            for parameter in link["parameters"].as_object().unwrap().keys() {
                assert!(parameters(target, "path").contains(parameter.as_str()), "{path}: {name} has no {parameter}");
            }
        }
    }
}

#[test]
fn every_example_is_valid_and_every_reference_leads_somewhere() {
    fn visit(value: &'static Value, count: &mut usize) {
        resolve(value);
        if let (Some(schema), Some(example)) = (value.get("schema"), value.get("example")) {
            assert_eq!(violations(schema, example), Vec::<String>::new(), "{example:#}");
            *count += 1;
        }
        match value {
            Value::Object(fields) => fields.values().for_each(|field| visit(field, count)),
            Value::Array(items) => items.iter().for_each(|item| visit(item, count)),
            _ => {}
        }
    }
    let mut count = 0;
    visit(&DOCUMENT, &mut count);
    for (name, schema) in DOCUMENT["components"]["schemas"].as_object().unwrap() {
        for example in schema["examples"].as_array().into_iter().flatten().filter(|_| schema["type"] == "object") {
            assert_eq!(violations(schema, example), Vec::<String>::new(), "{name}: {example:#}");
            count += 1;
        }
    }
    assert!(count > 80, "{count} examples");
}

/// Sends a body to an operation and returns the fields that it rejects. Nothing changes, because no field has a valid
/// value.
async fn rejected_fields(app: &App, id: &str, method: &str, path: &str, body: Value) -> Vec<(String, String)> {
    let path = path.replace("{id}", id).replace("{job}", id).replace("{name}", "none").replace("{action}", "retry");
    let request = Request::builder().method(method).uri(path).body(Body::from(body.to_string())).unwrap();
    let answer = app.send(request).await;
    let details = answer.json()["error"]["details"].clone();
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    details.as_array().into_iter().flatten().map(|error| (text(&error["path"]), text(&error["message"]))).collect()
}

/// The parsers read fields by name, so a schema could name a field that no parser knows, or omit one that a parser
/// knows.
#[tokio::test]
async fn the_parsers_know_exactly_the_fields_of_the_documented_bodies() {
    let app = App::start().await;
    let schedule = json!({"name": "s", "intervalMs": 60_000, "jobType": "a"}).to_string();
    let schedule = app.post("/api/v1/schedules", schedule).await.json();
    let id = schedule["id"].as_str().unwrap();
    let bodies: Vec<_> =
        operations().into_iter().filter(|(_, _, operation)| operation.get("requestBody").is_some()).collect();
    let schema =
        |operation: &'static Value| resolve(&operation["requestBody"]["content"]["application/json"]["schema"]);
    let all: BTreeSet<&str> = bodies
        .iter()
        .flat_map(|(_, _, operation)| schema(operation)["properties"].as_object().unwrap().keys().map(String::as_str))
        .collect();
    assert!(all.len() > 50, "{all:?}");
    for (method, path, operation) in bodies {
        let known = schema(operation)["properties"].as_object().unwrap();
        let mut body: serde_json::Map<String, Value> =
            all.iter().map(|name| ((*name).to_owned(), json!([[]]))).collect();
        body.insert("no_such_field".into(), json!(1));
        // Actions on tasks share one schema, and each knows a part of its fields.
        let paths = match path {
            "/api/v1/tasks/bulk/{action}" => vec!["/api/v1/tasks/bulk/send", "/api/v1/tasks/bulk/cancel"],
            path => vec![path],
        };
        let mut unknown: BTreeSet<String> =
            all.iter().map(ToString::to_string).chain(["no_such_field".into()]).collect();
        for path in paths {
            let rejected = rejected_fields(&app, id, &method, path, Value::Object(body.clone())).await;
            unknown.retain(|name| rejected.iter().any(|(path, message)| message == "unknown field" && path == name));
        }
        let expected: BTreeSet<String> = all
            .iter()
            .filter(|name| !known.contains_key(**name))
            .map(ToString::to_string)
            .chain(["no_such_field".into()])
            .collect();
        assert_eq!(unknown, expected, "{method} {path}");
    }
}

#[tokio::test]
async fn the_document_and_its_page_need_no_key_and_load_nothing_else() {
    let app = App::start().await;
    let body = json!({"name": "ops", "scopes": ["admin"]}).to_string();
    assert_eq!(app.post("/api/v1/api-keys", body).await.status, 201);
    let document = app.get("/openapi.json").await;
    assert_eq!((document.status.as_u16(), &document.json()["openapi"]), (200, &json!("3.1.0")));
    let page = app.get("/docs").await;
    assert_eq!((page.status.as_u16(), page.header("content-type")), (200, "text/html; charset=utf-8"));
    let policy = page.header("content-security-policy");
    assert!(policy.starts_with("default-src 'none'; style-src 'self'"), "{policy}");
    for forbidden in ["<script", "style=", "onclick", "src=\"http", "href=\"http"] {
        assert!(!page.text.contains(forbidden), "{forbidden}");
    }
    assert_eq!(app.get("/docs/style.css").await.header("content-type"), "text/css; charset=utf-8");
    for (method, path, operation) in operations() {
        let id = operation["operationId"].as_str().unwrap();
        assert!(page.text.contains(&format!("id=\"{id}\"")), "the page has no {method} {path}");
    }
}
