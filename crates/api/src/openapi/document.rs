//! Builds the OpenAPI document from the declared routes.

use std::collections::{BTreeMap, BTreeSet};

use faena_domain::{ErrorCode, JobLimits};
use faena_wire::ErrorBody;
use schemars::{SchemaGenerator, generate::SchemaSettings};
use serde_json::{Map, Value, json};

use super::{
    example::add_examples,
    operation::{Answer, Content, Link, Operation, Parameter, RequestBody, Tag, schema_of},
};
use crate::{DeclaredRoute, Needs, payloads::document_hidden_fields};

const INTRODUCTION: &str = "Durable background jobs over HTTP.\n\n\
    Bodies are JSON, and an unknown field is rejected. Times in requests are RFC 3339 with any offset, a date (midnight in UTC) or \
    milliseconds since 1970; times in answers are RFC 3339 in UTC. A slash at the end of a path is ignored.\n\n\
    Send an API key in `Authorization: Bearer` or `X-Api-Key`. Each operation names the scope that the key needs: `write` includes \
    `read`, and `admin` includes everything. While there are no keys, programs on the server's machine need none.\n\n\
    Every error has the same body; `error.code` is for programs, `error.message` for people, and `error.details` names every bad \
    field. gRPC is on the same port and follows the same rules.\n\n\
    A key with `withoutPayloads` sees no payloads, results, data, events, progress texts, logs or errors: they are empty, and \
    `hidden` next to them names the fields.";

/// Schemas of bodies by name, collected from the operations.
type Bodies = BTreeMap<&'static str, Value>;

pub fn build(routes: &[DeclaredRoute], limits: &JobLimits) -> Value {
    let settings = SchemaSettings::draft2020_12().for_serialize().with(|settings| {
        settings.definitions_path = "/components/schemas".into();
        settings.meta_schema = None;
    });
    let mut generator = settings.into_generator();
    let mut bodies = Bodies::new();
    let mut paths: BTreeMap<&str, Map<String, Value>> = BTreeMap::new();
    for route in routes {
        let operation = operation(route, limits, &mut generator, &mut bodies);
        paths.entry(&route.path).or_default().insert(route.method.to_lowercase(), operation);
    }
    let error = schema_of::<ErrorBody>(&mut generator);
    let mut schemas = generator.take_definitions(true);
    schemas.values_mut().for_each(simplify);
    add_examples(&mut schemas);
    document_hidden_fields(&mut schemas);
    schemas.extend(bodies.into_iter().map(|(name, schema)| (name.to_owned(), schema)));
    json!({
        "openapi": "3.1.0",
        "info": {
            "title": "Faena",
            "version": env!("CARGO_PKG_VERSION"),
            "summary": "A durable job server",
            "description": INTRODUCTION,
            "license": {"name": "MIT OR Apache-2.0", "identifier": "MIT OR Apache-2.0"},
        },
        "servers": [{"url": "/", "description": "The server that returned this document."}],
        "tags": Tag::ALL.map(|tag| json!({"name": tag.name(), "description": tag.description()})),
        "paths": paths,
        "components": {
            "schemas": schemas,
            "headers": headers(),
            "parameters": common_parameters(),
            "responses": common_errors(&error),
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer", "bearerFormat": "fna_…", "description": "An API key."},
                "apiKey": {"type": "apiKey", "in": "header", "name": "X-Api-Key", "description": "An API key."},
            },
        },
    })
}

fn operation(route: &DeclaredRoute, limits: &JobLimits, generator: &mut SchemaGenerator, bodies: &mut Bodies) -> Value {
    let documented = &route.operation;
    let mut answers: Map<String, Value> = Map::new();
    for answer in &documented.answers {
        answers.insert(answer.status.to_string(), describe_answer(answer, generator));
    }
    for status in error_statuses(route) {
        let special = documented.errors.iter().find(|(special, _)| *special == status);
        answers.entry(status.to_string()).or_insert_with(|| match special {
            Some((_, description)) => error_answer(status, description),
            None => json!({"$ref": format!("#/components/responses/{}", error_name(status))}),
        });
    }
    let common = ["RequestId", "CorrelationId"].map(|name| json!({"$ref": format!("#/components/parameters/{name}")}));
    let parameters: Vec<Value> = documented.parameters.iter().map(describe_parameter).chain(common).collect();
    let mut operation = json!({
        "operationId": documented.id,
        "tags": [documented.tag.name()],
        "summary": documented.summary,
        "description": description(route),
        "parameters": parameters,
        "responses": answers,
        "security": security(route.needs),
    });
    if let Some(body) = &documented.body {
        bodies.insert(body.name, (body.schema)(limits));
        operation["requestBody"] = describe_body(body);
    }
    operation
}

/// Returns the description of an operation, including the access that its route needs.
fn description(route: &DeclaredRoute) -> String {
    let scopes: Vec<String> = route.needs.scopes().iter().map(|scope| format!("`{scope}`")).collect();
    let access = match scopes.is_empty() {
        true => "Needs no API key.".to_owned(),
        false => format!("Needs the scope {}.{}", scopes.join(" or "), queue_rule(route.needs)),
    };
    let text = route.operation.description.trim();
    if text.is_empty() { access } else { format!("{text}\n\n{access}") }
}

/// Returns what applies to a key that is restricted to some queues.
fn queue_rule(needs: Needs) -> &'static str {
    match needs {
        Needs::Nothing | Needs::Scope(_) => "",
        Needs::AllQueues(_) | Needs::Task(_) => " A key that is restricted to queues is rejected.",
        Needs::Job(_) => " Jobs of other queues do not exist for a key that is restricted to queues.",
        Needs::Queue(_) => " A key that is restricted to queues must include this one.",
        Needs::Schedule(_) => " Schedules of other queues do not exist for a key that is restricted to queues.",
        Needs::Events => {
            " A key that is restricted to queues sees the events of its queues; one with `worker` alone sees the events of tasks."
        }
        Needs::Webhook(_) => " Webhooks of other queues do not exist for a key that is restricted to queues.",
    }
}

/// Returns the alternatives: an API key with the scope, in either header.
fn security(needs: Needs) -> Value {
    let scopes = needs.scopes().into_iter();
    scopes.flat_map(|scope| [json!({"bearer": [scope]}), json!({"apiKey": [scope]})]).collect()
}

/// Returns the errors that an operation can answer with: its own, and those of the layers before it.
fn error_statuses(route: &DeclaredRoute) -> BTreeSet<u16> {
    let Operation { parameters, body, errors, .. } = &route.operation;
    let mut statuses = BTreeSet::from([401, 403, 429, 500, 503]);
    if body.is_some() || !parameters.is_empty() {
        statuses.insert(400);
    }
    if parameters.iter().any(|parameter| parameter.location == "path") {
        statuses.insert(404);
    }
    if body.is_some() {
        statuses.extend([408, 413, 415]);
    }
    statuses.extend(errors.iter().map(|(status, _)| *status));
    statuses
}

fn describe_parameter(parameter: &Parameter) -> Value {
    let mut schema = parameter.schema.clone();
    let description = schema.as_object_mut().and_then(|schema| schema.remove("description"));
    let is_list = schema["type"] == "array";
    let mut described = json!({"name": parameter.name, "in": parameter.location, "schema": schema});
    described["description"] = description.unwrap_or_default();
    if parameter.is_required {
        described["required"] = json!(true);
    }
    if is_list {
        described["style"] = json!("form");
        described["explode"] = json!(true);
    }
    described
}

fn describe_body(body: &RequestBody) -> Value {
    json!({
        "required": body.is_required,
        "content": {"application/json": {
            "schema": {"$ref": format!("#/components/schemas/{}", body.name)},
            "example": body.example,
        }},
    })
}

fn describe_answer(answer: &Answer, generator: &mut SchemaGenerator) -> Value {
    let mut described = json!({"description": answer.description, "headers": header_references(&answer.headers)});
    match &answer.content {
        Content::Empty => {}
        Content::Json(schema) => {
            described["content"] = json!({"application/json": {"schema": schema(generator)}});
        }
        Content::Text(types) => {
            let text = |kind: &&str| ((*kind).to_owned(), json!({"schema": {"type": "string"}}));
            described["content"] = Value::Object(types.iter().map(text).collect());
        }
        Content::Events(schema) => {
            let data = schema(generator);
            let schema = json!({"type": "string", "contentMediaType": "text/event-stream", "x-event-data": data});
            described["content"] = json!({"text/event-stream": {"schema": schema}});
        }
    }
    if !answer.links.is_empty() {
        let links: Map<String, Value> = answer.links.iter().map(describe_link).collect();
        described["links"] = Value::Object(links);
    }
    described
}

fn describe_link(link: &Link) -> (String, Value) {
    let expression = format!("$response.body#{}", link.pointer);
    (link.operation.to_owned(), json!({"operationId": link.operation, "parameters": {link.parameter: expression}}))
}

fn header_references(names: &[&str]) -> Value {
    let always = ["X-Request-Id", "X-Correlation-Id", "X-Response-Time"];
    let reference = |name: &&str| ((*name).to_owned(), json!({"$ref": format!("#/components/headers/{name}")}));
    Value::Object(always.iter().chain(names).map(reference).collect())
}

fn headers() -> Value {
    let text = json!({"type": "string"});
    let number = json!({"type": "integer", "minimum": 0});
    let all = [
        ("X-Request-Id", &text, "The id that the caller sent, or a new one. The server's log contains it."),
        (
            "X-Correlation-Id",
            &text,
            "The id that the caller sent, or a new one. Jobs that the request creates have it.",
        ),
        (
            "X-Response-Time",
            &json!({"type": "string", "pattern": "^[0-9]+\\.[0-9]{2}ms$"}),
            "How long the answer took.",
        ),
        ("X-Total-Count", &number, "All matching entries."),
        ("X-Limit", &number, "Entries per page."),
        ("X-Total-Pages", &number, "Pages that `page` can reach."),
        ("X-Page", &number, "Number of the page. Absent with `cursor`."),
        ("X-Next-Cursor", &text, "`cursor` of the next page. Absent on the last page."),
        ("X-Total-Is-Exact", &json!({"const": "false"}), "Present if counting stopped at 10 000."),
        ("X-Sort-Is-Exact", &json!({"const": "false"}), "Present if only the newest entries were sorted."),
        ("X-Is-Partial", &json!({"const": "true"}), "Present if the search stopped before the page was full."),
        ("Location", &json!({"type": "string", "format": "uri-reference"}), "Path of the created resource."),
        ("Cache-Control", &text, "`no-store`: the answer contains a secret."),
        ("Retry-After", &number, "Seconds to wait before the next attempt."),
        ("RateLimit", &text, "Requests that are left, and seconds until the whole limit is available again."),
        ("RateLimit-Policy", &text, "The limits that apply, present where one is configured."),
        ("WWW-Authenticate", &text, "`Bearer realm=\"faena\"`"),
    ];
    let entry = |(name, schema, description): (&str, &Value, &str)| {
        (name.to_owned(), json!({"schema": schema, "description": description}))
    };
    Value::Object(all.into_iter().map(entry).collect())
}

fn common_parameters() -> Value {
    let header = |name: &str, description: &str| json!({"name": name, "in": "header", "description": description, "schema": {"type": "string"}});
    json!({
        "RequestId": header("X-Request-Id", "Id of the request, up to 255 bytes. An invalid one is replaced."),
        "CorrelationId": header(
            "X-Correlation-Id",
            "Id shared by everything that the request causes, up to 255 bytes. An invalid one is replaced.",
        ),
    })
}

fn error_name(status: u16) -> &'static str {
    match status {
        400 => "BadRequest",
        401 => "Unauthorized",
        403 => "Forbidden",
        404 => "NotFound",
        408 => "RequestTimeout",
        409 => "Conflict",
        413 => "PayloadTooLarge",
        415 => "UnsupportedMediaType",
        429 => "TooManyRequests",
        503 => "Unavailable",
        _ => "InternalError",
    }
}

fn common_errors(error: &Value) -> Value {
    let describe = |(status, description): (u16, &str)| {
        let mut answer = error_answer(status, description);
        answer["content"]["application/json"]["schema"] = error.clone();
        (error_name(status).to_owned(), answer)
    };
    let all = [
        (400, "The request is not valid; `details` names every bad field."),
        (401, "No valid API key where one is needed, or a wrong, expired or revoked key anywhere."),
        (403, "The key lacks the scope or the queue, or a web page from another origin sent the request."),
        (404, "The resource does not exist, has expired, or belongs to a queue that the key may not access."),
        (408, "The body did not arrive in time."),
        (413, "The body is too large."),
        (415, "The body is not JSON, or its encoding is not gzip."),
        (429, "Too many requests."),
        (500, "The server failed; its log has the reason under the request id."),
        (503, "The database is unreachable, or the server is full or stopping."),
    ];
    Value::Object(all.into_iter().map(describe).collect())
}

fn error_answer(status: u16, description: &str) -> Value {
    let codes: Vec<&str> =
        ErrorCode::ALL.into_iter().filter(|code| code.http_status() == status).map(ErrorCode::as_str).collect();
    let headers = match status {
        401 => vec!["WWW-Authenticate"],
        429 => vec!["Retry-After", "RateLimit", "RateLimit-Policy"],
        503 => vec!["Retry-After"],
        _ => Vec::new(),
    };
    let mut description = description.to_owned();
    if !codes.is_empty() {
        let codes: Vec<String> = codes.iter().map(|code| format!("`{code}`")).collect();
        description = format!("{description} Code: {}.", codes.join(", "));
    }
    let mut content = json!({"schema": {"$ref": "#/components/schemas/ErrorBody"}});
    if let Some(code) = codes.first() {
        let request_id = "01a1e51a-e40a-7625-9f28-87ac389ab671";
        content["example"] = json!({"error": {"code": code, "message": "…", "requestId": request_id}});
    }
    json!({"description": description, "headers": header_references(&headers), "content": {"application/json": content}})
}

/// Turns the alternatives of an enum into a plain `enum`, which every generator of clients understands.
fn simplify(schema: &mut Value) {
    if let Some(alternatives) = schema.get("oneOf").and_then(Value::as_array) {
        let lists: Option<Vec<Vec<(Value, String)>>> = alternatives.iter().map(named_values).collect();
        if let Some(lists) = lists {
            let values: Vec<(Value, String)> = lists.into_iter().flatten().collect();
            let mut text = schema.get("description").and_then(Value::as_str).unwrap_or_default().to_owned();
            for (value, meaning) in values.iter().filter(|(_, meaning)| !meaning.is_empty()) {
                text.push_str(&format!("\n- `{}`: {meaning}", value.as_str().unwrap_or_default()));
            }
            let values: Vec<Value> = values.into_iter().map(|(value, _)| value).collect();
            *schema = json!({"type": "string", "enum": values, "description": text.trim()});
            return;
        }
    }
    match schema {
        Value::Object(fields) => fields.values_mut().for_each(simplify),
        Value::Array(items) => items.iter_mut().for_each(simplify),
        _ => {}
    }
}

/// Returns the strings of one alternative of an enum, with their meaning. `None`: it is not an enum of strings.
fn named_values(alternative: &Value) -> Option<Vec<(Value, String)>> {
    let meaning = alternative.get("description").and_then(Value::as_str).unwrap_or_default().replace('\n', " ");
    match alternative.get("const") {
        Some(value) => Some(vec![(value.clone(), meaning)]),
        None => {
            Some(alternative.get("enum")?.as_array()?.iter().map(|value| (value.clone(), meaning.clone())).collect())
        }
    }
}
