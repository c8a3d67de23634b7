//! `/machines`: registers, lists, shows and draws machines.

use std::sync::Arc;

use axum::{
    Json,
    body::Body,
    extract::{RawQuery, State},
    http::{StatusCode, header},
    response::{IntoResponse, Response},
};
use faena_domain::{FieldError, Timestamp};
use faena_machine::{Definition, Finding};
use faena_store::{MachineStatus, NewMachine, Registered, StoredMachine};
use schemars::JsonSchema;
use serde::Serialize;
use serde_json::Value;

use crate::{
    Api, ApiError, ApiResult,
    context::actor,
    request::{Segment, UNKNOWN_PARAMETER, check, parse_number, read_body, read_query},
};

/// A registered version.
#[derive(Serialize, JsonSchema)]
pub struct RegisteredMachine {
    pub name: String,
    pub version: u32,
    /// SHA-256 of the definition. Neither the order of keys nor the format of the text changes it.
    pub hash: String,
}

#[derive(Serialize, JsonSchema)]
pub struct MachineList {
    pub machines: Vec<MachineStatus>,
}

#[derive(Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct MachineView {
    pub name: String,
    pub version: u32,
    pub hash: String,
    pub created_at: Timestamp,
    pub created_by: String,
    /// All versions, newest first.
    pub versions: Vec<u32>,
    /// The registered definition, as JSON.
    pub definition: Value,
}

/// Registers the definition in the field `definition`: an object, or text in YAML or JSON.
pub async fn register(State(api): State<Api>, body: Body) -> ApiResult<Response> {
    let body = read_body(&api, body).await?;
    let (answer, existed) = register_from(&api, &body).await?;
    let location = [(header::LOCATION, format!("/api/v1/machines/{}?version={}", answer.name, answer.version))];
    let status = if existed { StatusCode::OK } else { StatusCode::CREATED };
    Ok((status, location, Json(answer)).into_response())
}

/// Registers the machine of a request. Returns it, and whether the same definition was registered before.
pub async fn register_from(api: &Api, body: &[u8]) -> ApiResult<(RegisteredMachine, bool)> {
    let mut fields = api.parser().fields(body)?;
    let definition: Option<Value> = fields.take("definition", "an object, or text in YAML or JSON");
    let mut errors = fields.finish();
    if definition.is_none() && errors.is_empty() {
        errors.push(FieldError::new("definition", "is required"));
    }
    check(errors)?;
    let text = match definition.unwrap_or_default() {
        Value::String(text) => text,
        other => other.to_string(),
    };
    let definition = Arc::new(parse(text).await?.map_err(|findings| invalid(&findings))?);
    let machine = NewMachine { definition: definition.clone() };
    let registered = api.engine.store.machine_register(machine, &actor(), Timestamp::now()).await?;
    let answer = RegisteredMachine {
        name: definition.machine.clone(),
        version: definition.version,
        hash: definition.hash.clone(),
    };
    Ok((answer, registered == Registered::Known))
}

/// Reads and checks a definition.
pub async fn parse(text: String) -> ApiResult<Result<Definition, Vec<Finding>>> {
    // The checks of a large definition take long enough to delay other requests.
    let parsed = tokio::task::spawn_blocking(move || Definition::parse(&text)).await;
    parsed.map_err(|error| ApiError::internal(&error.to_string()))
}

fn invalid(findings: &[Finding]) -> ApiError {
    let details = findings.iter().map(|finding| {
        let path = if finding.path.is_empty() { "definition" } else { &finding.path };
        let position =
            if finding.position.line > 0 { format!("line {}: ", finding.position.line) } else { String::new() };
        FieldError::new(path, format!("{position}{}", finding.message))
    });
    ApiError::invalid(details.collect())
}

pub async fn list(State(api): State<Api>, RawQuery(query): RawQuery) -> ApiResult<Json<MachineList>> {
    read_query(query.as_deref(), &[], |_, _| Err(UNKNOWN_PARAMETER.into()))?;
    Ok(Json(MachineList { machines: find(&api).await? }))
}

/// Returns every version of every machine.
pub async fn find(api: &Api) -> ApiResult<Vec<MachineStatus>> {
    Ok(api.engine.store.machine_list().await?)
}

pub async fn show(
    State(api): State<Api>,
    Segment(name): Segment,
    RawQuery(query): RawQuery,
) -> ApiResult<Json<MachineView>> {
    Ok(Json(read_view(&api, &name, query.as_deref()).await?))
}

/// Returns the version of a machine that a query asks for.
pub async fn read_view(api: &Api, name: &str, query: Option<&str>) -> ApiResult<MachineView> {
    let machine = load_requested(api, name, query).await?;
    let all = find(api).await?;
    Ok(MachineView {
        versions: all.iter().filter(|status| status.name == name).map(|status| status.version).collect(),
        name: name.to_owned(),
        version: machine.definition.version,
        hash: machine.definition.hash.clone(),
        created_at: machine.created_at,
        created_by: machine.created_by,
        definition: machine.definition.source.clone(),
    })
}

/// Shows the drawing of a machine as SVG.
pub async fn diagram(State(api): State<Api>, Segment(name): Segment, RawQuery(query): RawQuery) -> ApiResult<Response> {
    let machine = load_requested(&api, &name, query.as_deref()).await?;
    Ok(([(header::CONTENT_TYPE, "image/svg+xml")], machine.definition.to_svg(&[])).into_response())
}

/// Shows the JSON Schema of definitions.
pub async fn schema() -> Json<Value> {
    Json(faena_machine::schema())
}

/// Returns the machine of a path, in the version that a query asks for.
pub async fn load_requested(api: &Api, name: &str, query: Option<&str>) -> ApiResult<StoredMachine> {
    let mut version = None;
    read_query(query, &[], |parameter, value| match parameter {
        "version" => {
            version = Some(parse_number(&value, i32::MAX as usize)? as u32);
            Ok(())
        }
        _ => Err(UNKNOWN_PARAMETER.into()),
    })?;
    load(api, name, version).await
}

/// Returns a version of a machine, or its newest version.
pub async fn load(api: &Api, name: &str, version: Option<u32>) -> ApiResult<StoredMachine> {
    let found = api.engine.store.machine_get(name, version).await?;
    found.ok_or_else(|| match version {
        Some(version) => ApiError::not_found(format!("no version {version} of machine \"{name}\"")),
        None => ApiError::not_found(format!("no machine \"{name}\"; register it with POST /api/v1/machines")),
    })
}
