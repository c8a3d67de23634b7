//! The reference page at `/docs`, generated from the OpenAPI document: plain HTML without scripts, so that it works
//! offline and the browser's search finds everything.

use std::fmt::Write;

use serde_json::Value;

use super::operation::{Content, Tag};
use crate::DeclaredRoute;

pub const STYLE: &str = include_str!("page.css");

pub fn render(routes: &[DeclaredRoute], document: &Value) -> String {
    let mut html = String::with_capacity(512 << 10);
    let (title, version) = (text(&document["info"]["title"]), text(&document["info"]["version"]));
    let _ = write!(
        html,
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <meta name=\"color-scheme\" content=\"light dark\">\n<title>{title} API</title>\n\
         <link rel=\"stylesheet\" href=\"docs/style.css\">\n</head>\n<body>\n"
    );
    let _ = write!(
        html,
        "<main>\n<a class=\"to-contents\" href=\"#contents\">Contents</a>\n<h1>{title} API <small>{version}</small></h1>\n"
    );
    html.push_str(&prose(text(&document["info"]["description"])));
    html.push_str("<p>Generate clients from the <a href=\"openapi.json\">OpenAPI document</a>.</p>\n");
    for tag in Tag::ALL {
        let _ = write!(html, "<section>\n<h2 id=\"{}\">{}</h2>\n{}", anchor(tag), tag.name(), prose(tag.description()));
        for route in routes.iter().filter(|route| route.operation.tag == tag) {
            operation(&mut html, route, document);
        }
        html.push_str("</section>\n");
    }
    errors(&mut html, &document["components"]["responses"]);
    schemas(&mut html, routes, &document["components"]["schemas"]);
    html.push_str("</main>\n");
    contents(&mut html, routes);
    html.push_str("</body>\n</html>\n");
    html
}

/// Adds the list of all operations.
fn contents(html: &mut String, routes: &[DeclaredRoute]) {
    html.push_str("<nav id=\"contents\" aria-label=\"Contents\">\n");
    for tag in Tag::ALL {
        let _ = write!(html, "<h3><a href=\"#{}\">{}</a></h3>\n<ul>\n", anchor(tag), tag.name());
        for route in routes.iter().filter(|route| route.operation.tag == tag) {
            let _ =
                writeln!(html, "<li><a href=\"#{}\">{}</a></li>", route.operation.id, escape(route.operation.summary));
        }
        html.push_str("</ul>\n");
    }
    html.push_str("<h3><a href=\"#errors\">Errors</a></h3>\n<h3><a href=\"#schemas\">Schemas</a></h3>\n</nav>\n");
}

fn anchor(tag: Tag) -> String {
    tag.name().to_lowercase().replace(|c: char| !c.is_ascii_alphanumeric(), "-")
}

fn operation(html: &mut String, route: &DeclaredRoute, document: &Value) {
    let described = &document["paths"][&route.path][route.method.to_lowercase()];
    let (method, id) = (route.method, route.operation.id);
    let _ = write!(
        html,
        "<article id=\"{id}\">\n<h3><a href=\"#{id}\">{}</a></h3>\n\
         <p class=\"route\"><b class=\"{}\">{method}</b> <code>{}</code></p>\n{}",
        escape(route.operation.summary),
        method.to_lowercase(),
        escape(&route.path),
        prose(text(&described["description"]))
    );
    let parameters: Vec<&Value> =
        list(&described["parameters"]).filter(|parameter| parameter.get("$ref").is_none()).collect();
    if !parameters.is_empty() {
        html.push_str("<h4>Parameters</h4>\n<table>\n");
        for parameter in parameters {
            let name = format!("{} <i>{}</i>", escape(text(&parameter["name"])), text(&parameter["in"]));
            row(html, &name, &parameter["schema"], text(&parameter["description"]));
        }
        html.push_str("</table>\n");
    }
    let body = &described["requestBody"];
    if let Some(documented) = &route.operation.body {
        let optional = if documented.is_required { "" } else { " It may be empty." };
        let schema = &document["components"]["schemas"][documented.name];
        let _ = writeln!(html, "<h4>Body</h4>\n<p>A JSON object with no other fields than these.{optional}</p>");
        fields(html, schema);
    }
    example(html, route, &body["content"]["application/json"]["example"]);
    answers(html, route, &described["responses"]);
    html.push_str("</article>\n");
}

/// Adds an example call with curl.
fn example(html: &mut String, route: &DeclaredRoute, body: &Value) {
    let mut command = format!("curl http://127.0.0.1:3000{}", route.path);
    if !matches!((route.method, body.is_null()), ("GET", _) | ("POST", false)) {
        let _ = write!(command, " -X {}", route.method);
    }
    if route.operation.answers.iter().any(|answer| matches!(answer.content, Content::Events(_))) {
        command.push_str(" -N");
    }
    if !route.needs.scopes().is_empty() {
        command.push_str(" \\\n  -H 'Authorization: Bearer fna_…'");
    }
    if !body.is_null() {
        let _ = write!(command, " \\\n  --json '{body}'");
    }
    let _ = writeln!(html, "<pre>{}</pre>", escape(&command));
}

fn answers(html: &mut String, route: &DeclaredRoute, described: &Value) {
    html.push_str("<h4>Answers</h4>\n<table>\n");
    for answer in &route.operation.answers {
        let described = &described[answer.status.to_string()];
        let content: Vec<String> = described["content"].as_object().into_iter().flatten().map(content_of).collect();
        let mut headers = String::new();
        if !answer.headers.is_empty() {
            let _ = write!(
                headers,
                " Headers: {}.",
                answer.headers.iter().map(|name| format!("<code>{name}</code>")).collect::<Vec<_>>().join(", ")
            );
        }
        let meaning = inline(answer.description);
        let _ = writeln!(
            html,
            "<tr><th>{}</th><td>{}</td><td>{meaning}{headers}</td></tr>",
            answer.status,
            content.join("<br>")
        );
    }
    for (status, meaning) in &route.operation.errors {
        let _ = writeln!(
            html,
            "<tr><th>{status}</th><td><a href=\"#errors\">error</a></td><td>{}</td></tr>",
            inline(meaning)
        );
    }
    let is_special = |status: &str| {
        let answered = route.operation.answers.iter().any(|answer| answer.status.to_string() == status);
        answered || route.operation.errors.iter().any(|(special, _)| special.to_string() == status)
    };
    let common: Vec<&str> = described
        .as_object()
        .into_iter()
        .flatten()
        .map(|(status, _)| status.as_str())
        .filter(|status| !is_special(status))
        .collect();
    let _ = writeln!(
        html,
        "<tr><th>other</th><td><a href=\"#errors\">errors</a></td><td>{}</td></tr>\n</table>",
        common.join(", ")
    );
}

fn content_of((kind, content): (&String, &Value)) -> String {
    match kind.as_str() {
        "application/json" => type_of(&content["schema"]),
        "text/event-stream" => format!("<code>{kind}</code> with {}", type_of(&content["schema"]["x-event-data"])),
        _ => format!("<code>{kind}</code>"),
    }
}

fn errors(html: &mut String, responses: &Value) {
    html.push_str("<section>\n<h2 id=\"errors\">Errors</h2>\n<p>Every error has this body: <a href=\"#schema-ErrorBody\">ErrorBody</a>.</p>\n<table>\n");
    for (name, response) in responses.as_object().into_iter().flatten() {
        let headers: Vec<&str> = response["headers"]
            .as_object()
            .into_iter()
            .flatten()
            .map(|(name, _)| name.as_str())
            .filter(|name| !name.starts_with("X-"))
            .collect();
        let headers =
            if headers.is_empty() { String::new() } else { format!(" Headers: <code>{}</code>.", headers.join(", ")) };
        let _ = writeln!(html, "<tr><th>{name}</th><td>{}{headers}</td></tr>", inline(text(&response["description"])));
    }
    html.push_str("</table>\n</section>\n");
}

/// Adds the schemas of answers. Those of bodies are shown with their operations.
fn schemas(html: &mut String, routes: &[DeclaredRoute], schemas: &Value) {
    html.push_str("<section>\n<h2 id=\"schemas\">Schemas</h2>\n");
    let is_body =
        |name: &str| routes.iter().any(|route| route.operation.body.as_ref().is_some_and(|body| body.name == name));
    for (name, schema) in schemas.as_object().into_iter().flatten().filter(|(name, _)| !is_body(name)) {
        let _ = write!(
            html,
            "<article id=\"schema-{name}\">\n<h3><a href=\"#schema-{name}\">{name}</a></h3>\n{}",
            prose(text(&schema["description"]))
        );
        if schema.get("properties").is_some() {
            fields(html, schema);
        } else {
            let _ = writeln!(html, "<p>{}</p>", type_of(schema));
        }
        html.push_str("</article>\n");
    }
    html.push_str("</section>\n");
}

/// Adds the fields of an object, required ones first.
fn fields(html: &mut String, schema: &Value) {
    let is_required = |name: &str| list(&schema["required"]).any(|required| required == name);
    let mut properties: Vec<(&String, &Value)> = schema["properties"].as_object().into_iter().flatten().collect();
    // In answers most fields are always present, so the order says nothing there.
    if schema["additionalProperties"] == false {
        properties.sort_by_key(|(name, _)| !is_required(name));
    }
    html.push_str("<table>\n");
    for (name, property) in properties {
        let mark = if is_required(name) { "" } else { " <i>optional</i>" };
        row(html, &format!("{}{mark}", escape(name)), property, text(&property["description"]));
        // Fields of an object inside another one, such as the filter of a bulk action.
        for (inner, property) in inner_fields(property) {
            row(html, &format!("{}.{}", escape(name), escape(inner)), property, text(&property["description"]));
        }
    }
    html.push_str("</table>\n");
}

fn inner_fields(property: &Value) -> impl Iterator<Item = (&String, &Value)> {
    let object = property.get("properties").or_else(|| property.pointer("/items/properties"));
    object.and_then(Value::as_object).into_iter().flatten()
}

fn row(html: &mut String, name: &str, schema: &Value, description: &str) {
    let default =
        schema.get("default").map(|default| format!(" Default: <code>{}</code>.", escape(&default.to_string())));
    let _ = writeln!(
        html,
        "<tr><th>{name}</th><td>{}</td><td>{}{}</td></tr>",
        type_of(schema),
        inline(description),
        default.unwrap_or_default()
    );
}

/// Describes the type of a value, with links to other schemas.
fn type_of(schema: &Value) -> String {
    if let Some(reference) = schema.get("$ref").and_then(Value::as_str) {
        let name = reference.rsplit('/').next().unwrap_or_default();
        return format!("<a href=\"#schema-{name}\">{name}</a>");
    }
    for alternatives in ["anyOf", "oneOf"] {
        if let (Some(all), None) = (schema.get(alternatives), schema.get("type")) {
            // The introduction says how times are written.
            if list(all).any(|one| one["format"] == "date") {
                return if list(all).any(|one| one["type"] == "null") { "time or null".into() } else { "time".into() };
            }
            return list(all).map(type_of).collect::<Vec<_>>().join(" or ");
        }
    }
    if let Some(values) = schema.get("enum").or(schema.get("const")) {
        let values: Vec<&Value> = values.as_array().map_or_else(|| vec![values], |all| all.iter().collect());
        return values
            .iter()
            .map(|value| format!("<code>{}</code>", escape(&bare(value))))
            .collect::<Vec<_>>()
            .join(" ");
    }
    let kinds: Vec<&str> = match &schema["type"] {
        Value::Array(all) => all.iter().filter_map(Value::as_str).collect(),
        kind => kind.as_str().into_iter().collect(),
    };
    if kinds.is_empty() {
        return "any JSON".into();
    }
    let named: Vec<String> = kinds.into_iter().map(|kind| type_name(schema, kind)).collect();
    named.join(" or ")
}

fn type_name(schema: &Value, kind: &str) -> String {
    let range = |min: &str, max: &str| match (schema.get(min), schema.get(max)) {
        (Some(min), Some(max)) => format!(", {min}–{max}"),
        (Some(min), None) if min != 0 => format!(", from {min}"),
        (None, Some(max)) => format!(", up to {max}"),
        _ => String::new(),
    };
    match kind {
        "array" => format!("list of {}{}", type_of(&schema["items"]), range("minItems", "maxItems")),
        "integer" | "number" => format!("{kind}{}", range("minimum", "maximum")),
        "string" => match text(&schema["format"]) {
            "" => format!("text{}", range("minLength", "maxLength")),
            "date-time" => "time".into(),
            format => escape(format),
        },
        other => other.into(),
    }
}

fn bare(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

fn list(value: &Value) -> impl Iterator<Item = &Value> {
    value.as_array().into_iter().flatten()
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

/// Renders text with `code` in backticks.
fn inline(text: &str) -> String {
    let parts = text.split('`').enumerate();
    parts
        .map(|(index, part)| if index % 2 == 1 { format!("<code>{}</code>", escape(part)) } else { escape(part) })
        .collect()
}

/// Renders paragraphs and lists.
fn prose(text: &str) -> String {
    let mut html = String::new();
    for paragraph in text.split("\n\n").filter(|paragraph| !paragraph.trim().is_empty()) {
        let (words, items): (Vec<&str>, Vec<&str>) = paragraph.lines().partition(|line| !line.starts_with("- "));
        if !words.is_empty() {
            let _ = writeln!(html, "<p>{}</p>", inline(&words.join(" ")));
        }
        if !items.is_empty() {
            let items: String = items.iter().map(|item| format!("<li>{}</li>\n", inline(&item[2..]))).collect();
            let _ = writeln!(html, "<ul>\n{items}</ul>");
        }
    }
    html
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn text_is_escaped_and_code_is_marked() {
        assert_eq!(inline("a <b> `c < d`"), "a &lt;b&gt; <code>c &lt; d</code>");
        assert_eq!(
            prose("One.\n- `a`: b\n\nTwo."),
            "<p>One.</p>\n<ul>\n<li><code>a</code>: b</li>\n</ul>\n<p>Two.</p>\n"
        );
    }

    #[test]
    fn types_are_described_in_words() {
        assert_eq!(type_of(&json!({"type": ["integer", "null"], "minimum": 1, "maximum": 5})), "integer, 1–5 or null");
        assert_eq!(
            type_of(&json!({"type": "array", "items": {"$ref": "#/components/schemas/JobView"}})),
            "list of <a href=\"#schema-JobView\">JobView</a>"
        );
        assert_eq!(type_of(&json!({})), "any JSON");
    }
}
