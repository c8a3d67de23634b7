//! Hides the payloads, results, data, logs and errors of jobs and tasks from callers whose key has `withoutPayloads`.
//!
//! Every answer to such a caller passes through here, whatever its route: JSON and server-sent events are compared with
//! their schema in the OpenAPI document, gRPC messages with their descriptor. Numbers, times, ids and values of enums pass. A
//! text or a value of any form passes only if [`visible`] lists it, so a new field or route shows nothing until it is listed
//! there. A hidden value is replaced by an empty one, and `hidden` next to it names the fields.
//!
//! Error responses pass unchanged, because they are about the request.

mod event_stream;
mod grpc;
mod json;
mod visible;

use axum::{
    body::{self, Body},
    http::header,
    response::{IntoResponse, Response},
};
use faena_domain::ErrorCode;
use serde_json::Value;

use crate::{Api, ApiError, ApiResult, context};
pub use grpc::hide_in_call;
use json::Schemas;
pub use json::{document_hidden_fields, hidden_fields};

/// A route whose answers are documented.
#[derive(Clone, Debug)]
pub struct DocumentedRoute {
    pub method: &'static str,
    pub path: String,
}

/// Returns whether the caller of the current request may see payloads. A request without a known caller may not.
pub fn are_visible() -> bool {
    context::access().is_ok_and(|access| access.sees_payloads())
}

/// Returns a text that may contain parts of a payload, or `hidden` if the caller may not see it.
pub fn shown_text(text: Option<String>) -> Option<String> {
    if are_visible() { text } else { text.map(|_| "hidden".to_owned()) }
}

/// Fails if the caller filters by a text that it may not see: the number of matches would tell what the text is.
pub fn require_searchable(field: &str, filter: Option<&String>) -> ApiResult<()> {
    if filter.is_some() && !are_visible() {
        let message = format!("{field}: this API key may not see payloads, so it cannot search in them");
        return Err(ApiError::new(ErrorCode::Forbidden, message));
    }
    Ok(())
}

/// Returns the answer of a route as the caller of the current request may see it.
pub async fn hide(api: &Api, route: &DocumentedRoute, response: Response) -> Response {
    let status = response.status();
    if are_visible() || status.is_client_error() || status.is_server_error() {
        return response;
    }
    let media_type = media_type(&response);
    let document = api.documentation().document(&api.parser().limits);
    let pointer = |name: &str| name.replace('~', "~0").replace('/', "~1");
    let content = document.pointer(&format!(
        "/paths/{}/{}/responses/{}/content/{}",
        pointer(&route.path),
        route.method.to_lowercase(),
        status.as_u16(),
        pointer(&media_type)
    ));
    let schema = content.map_or(&Value::Null, |content| &content["schema"]);
    let schemas = Schemas::new(document);
    match media_type.as_str() {
        "application/json" => hide_in_json(&schemas, schema, response).await,
        "text/event-stream" => {
            let data = schema["x-event-data"].clone();
            let document = api.clone();
            response.map(|body| {
                event_stream::hide(body, move |value| {
                    let document = document.documentation().document(&document.parser().limits);
                    Schemas::new(document).hide(&data, value);
                })
            })
        }
        "" => response.map(|_| Body::empty()),
        text if visible::MEDIA_TYPES.contains(&text) => response,
        other => {
            let message = format!("this API key may not see payloads, so it cannot read {other}");
            ApiError::new(ErrorCode::Forbidden, message).into_response()
        }
    }
}

/// Returns the media type of an answer without its parameters.
fn media_type(response: &Response) -> String {
    let value = response.headers().get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok());
    value.and_then(|value| value.split(';').next()).unwrap_or_default().trim().to_ascii_lowercase()
}

async fn hide_in_json(schemas: &Schemas<'_>, schema: &Value, response: Response) -> Response {
    let (mut parts, content) = response.into_parts();
    let Ok(bytes) = body::to_bytes(content, usize::MAX).await else {
        return ApiError::internal("the answer could not be read").into_response();
    };
    // The answer to `HEAD` has no body.
    if bytes.is_empty() {
        return Response::from_parts(parts, Body::empty());
    }
    let Ok(mut value) = serde_json::from_slice::<Value>(&bytes) else {
        return ApiError::internal("the answer is not JSON").into_response();
    };
    schemas.hide(schema, &mut value);
    parts.headers.remove(header::CONTENT_LENGTH);
    Response::from_parts(parts, Body::from(value.to_string()))
}
