//! Tests which callers may call which routes: every route with every kind of key.

use std::time::Duration;

use axum::{body::Body, http::Request};
use faena_api::{DeclaredRoute, declared_routes};
use faena_auth::new_key_text;
use faena_domain::{ApiKeyText, KeyScope, NewApiKey, StoredApiKey, Timestamp};
use futures_util::StreamExt;
use serde_json::json;
use tower::ServiceExt;

use crate::app::App;

/// Stores a key and returns its text.
pub async fn key(app: &App, scopes: &[KeyScope], queues: Option<&[&str]>) -> ApiKeyText {
    let queues = queues.map(|names| names.iter().map(|name| (*name).to_owned()).collect());
    let new = NewApiKey {
        name: "test".into(),
        scopes: scopes.to_vec(),
        queues,
        groups: vec![],
        without_payloads: false,
        expires_at: None,
    };
    store(app, new, Timestamp::now()).await.0
}

pub async fn store(app: &App, new: NewApiKey, now: Timestamp) -> (ApiKeyText, StoredApiKey) {
    let text = new_key_text();
    let stored = StoredApiKey::new(new, &text, "test", now);
    app.engine.store.api_key_create(stored.clone(), "test", now).await.unwrap();
    (text, stored)
}

fn request(method: &str, path: &str, key: Option<&str>) -> Request<Body> {
    let mut request = Request::builder().method(method).uri(path);
    if let Some(key) = key {
        request = request.header("authorization", format!("Bearer {key}"));
    }
    request.body(Body::empty()).unwrap()
}

async fn status(app: &App, method: &str, path: &str, key: Option<&str>) -> u16 {
    app.send(request(method, path, key)).await.status.as_u16()
}

/// Replaces the variable segments of a path by values that exist nowhere.
fn sample_path(route: &DeclaredRoute) -> String {
    let id = "0199a3c4-7e1b-7c51-9d3e-5a7c2f6b8d10";
    let filled = [("{id}", id), ("{job}", id), ("{name}", "none"), ("{action}", "cancel")];
    filled.into_iter().fold(route.path.clone(), |path, (name, value)| path.replace(name, value))
}

/// Routes whose answer never ends.
fn is_stream(route: &DeclaredRoute) -> bool {
    route.method == "GET" && route.path.ends_with("/events")
}

/// Returns the scopes of which a route needs one, by rules that do not come from its declaration.
fn needed_scopes(route: &DeclaredRoute) -> Vec<KeyScope> {
    use KeyScope::{Admin, Read, Worker, Write};
    let path = route.path.strip_prefix("/api/v1").unwrap_or(&route.path);
    let is_of_workers = path.starts_with("/workers/") && !path.ends_with("/drain");
    match (route.method, path) {
        (_, "/health" | "/health/live" | "/health/ready" | "/openapi.json" | "/docs" | "/docs/style.css") => vec![],
        (_, "/machine.schema.json") => vec![],
        ("GET", "/workers/connect") => vec![],
        ("GET", "/tasks" | "/tasks/{id}" | "/events") => vec![Read, Worker],
        ("POST", "/tasks/{id}/events") => vec![Write, Worker],
        ("GET", "/workers/{id}") | ("POST", "/schedules/validate") => vec![Read],
        _ if is_of_workers => vec![Worker],
        _ if path.starts_with("/api-keys") || path.starts_with("/outbox/") || ["/audit", "/doctor"].contains(&path) => {
            vec![Admin]
        }
        ("GET", _) => vec![Read],
        (_, "/limits" | "/limits/reset") => vec![Admin],
        _ => vec![Write],
    }
}

#[tokio::test]
async fn every_route_accepts_the_scope_it_needs_and_rejects_every_other_caller() {
    let app = App::start().await;
    let mut keys = Vec::new();
    for scope in KeyScope::ALL {
        keys.push((scope, key(&app, &[scope], None).await));
    }
    let now = Timestamp::now();
    let expired = NewApiKey {
        name: "expired".into(),
        scopes: vec![KeyScope::Admin],
        queues: None,
        groups: vec![],
        without_payloads: false,
        expires_at: Some(now.plus_ms(-1)),
    };
    let (expired, _) = store(&app, expired, now.plus_ms(-10)).await;
    let revoked = NewApiKey {
        name: "revoked".into(),
        scopes: vec![KeyScope::Admin],
        queues: None,
        groups: vec![],
        without_payloads: false,
        expires_at: None,
    };
    let (revoked, stored) = store(&app, revoked, now).await;
    app.engine.store.api_key_revoke(stored.key.id, "test", now).await.unwrap();
    let bogus = new_key_text();

    let routes = declared_routes().declared();
    assert!(routes.len() > 60, "the list is complete");
    for route in &routes {
        let path = sample_path(route);
        let name = format!("{} {}", route.method, route.path);
        for wrong in [&bogus, &expired, &revoked] {
            assert_eq!(status(&app, route.method, &path, Some(wrong.reveal())).await, 401, "{name} {wrong:?}");
        }
        let needed = needed_scopes(route);
        assert_eq!(route.needs.scopes(), needed, "{name}");
        if needed.is_empty() {
            continue;
        }
        let is_allowed = |scope: &KeyScope| needed.iter().any(|needed| scope.includes(*needed));
        assert_eq!(status(&app, route.method, &path, None).await, 401, "{name} without a key");
        for (scope, key) in &keys {
            if is_allowed(scope) && is_stream(route) {
                continue;
            }
            let got = status(&app, route.method, &path, Some(key.reveal())).await;
            assert_eq!(got != 403, is_allowed(scope), "{name} with a {scope} key: {got}");
            assert!(got < 500 || got == 503, "{name}: {got}");
        }
    }
}

#[tokio::test]
async fn health_needs_no_key_and_a_wrong_key_is_rejected_there_too() {
    let app = App::start().await;
    key(&app, &[KeyScope::Read], None).await;
    assert_eq!(status(&app, "GET", "/health/live", None).await, 200);
    assert_eq!(status(&app, "GET", "/health/live", Some("fna_wrong")).await, 401);
}

#[tokio::test]
async fn a_rejection_says_what_to_do() {
    let app = App::start().await;
    let read = key(&app, &[KeyScope::Read], None).await;
    let without = app.get("/api/v1/jobs").await;
    assert_eq!(without.headers["www-authenticate"], "Bearer realm=\"faena\"");
    assert_eq!(without.json()["error"]["code"], "UNAUTHORIZED");
    let message = without.json()["error"]["message"].as_str().unwrap().to_owned();
    assert!(message.contains("Authorization: Bearer"), "{message}");
    let forbidden = app.send(request("POST", "/api/v1/jobs", Some(read.reveal()))).await;
    assert_eq!(forbidden.status, 403);
    assert_eq!(forbidden.json()["error"]["message"], "this API key needs the scope \"write\"");
}

#[tokio::test]
async fn a_key_is_created_used_rotated_and_revoked() {
    let app = App::start().await;
    let body = json!({"name": "ops", "scopes": ["admin"]}).to_string();
    let created = app.post("/api/v1/api-keys", body).await;
    assert_eq!(created.status, 201, "the first key needs none: {}", created.text);
    assert_eq!(created.headers["cache-control"], "no-store");
    let created = created.json();
    let (first, id) = (created["key"].as_str().unwrap(), created["id"].as_str().unwrap());
    assert_eq!(status(&app, "GET", "/api/v1/jobs", None).await, 401, "from now on a key is needed");

    let listed = app.send(request("GET", "/api/v1/api-keys", Some(first))).await;
    assert_eq!(listed.json()["total"], 1);
    assert!(!listed.text.contains(first) && !listed.text.contains("hash"), "{}", listed.text);

    let rotate = format!("/api/v1/api-keys/{id}/rotate");
    let rotated = app.send(request("POST", &rotate, Some(first))).await;
    assert_eq!(rotated.status, 200, "{}", rotated.text);
    let second = rotated.json()["key"].as_str().unwrap().to_owned();
    assert_ne!(second, first);
    for key in [first, &second] {
        assert_eq!(status(&app, "GET", "/api/v1/jobs", Some(key)).await, 200, "both are valid during the overlap");
    }
    assert_eq!(status(&app, "DELETE", &format!("/api/v1/api-keys/{id}"), Some(&second)).await, 200);
    assert_eq!(status(&app, "GET", "/api/v1/jobs", Some(&second)).await, 401);

    let audit = app.engine.store.audit_list(Default::default(), 10).await.unwrap();
    let entries: Vec<_> = audit.iter().rev().map(|row| (row.actor.clone(), row.action.clone())).collect();
    assert_eq!(entries[0], ("loopback".into(), "key.create".into()));
    assert!(entries[1].0.starts_with("key ops ("), "the audit log names the key: {entries:?}");
    assert_eq!((entries[1].1.as_str(), entries[2].1.as_str()), ("key.rotate", "key.revoke"));
}

#[tokio::test]
async fn an_invalid_key_request_names_every_bad_field() {
    let app = App::start().await;
    let body = json!({"scopes": ["root"], "queues": [], "expiresAt": "2020-01-01T00:00:00Z", "colour": 1}).to_string();
    let response = app.post("/api/v1/api-keys", body).await;
    assert_eq!(response.status, 400);
    let details = response.json()["error"]["details"].clone();
    let mut paths: Vec<&str> = details.as_array().unwrap().iter().map(|d| d["path"].as_str().unwrap()).collect();
    paths.sort_unstable();
    assert_eq!(paths, ["colour", "expiresAt", "name", "queues", "scopes"]);
    let reader = app.post("/api/v1/api-keys", json!({"name": "reader", "scopes": ["read"]}).to_string()).await;
    assert_eq!(reader.status, 400, "it would lock everyone out: {}", reader.text);
    assert!(app.engine.store.api_keys().is_empty(), "nothing was created");
}

#[tokio::test]
async fn the_last_use_of_a_key_is_stored() {
    let app = App::start().await;
    let text = key(&app, &[KeyScope::Read], None).await;
    assert_eq!(status(&app, "GET", "/api/v1/queues", Some(text.reveal())).await, 200);
    app.engine.run_loop("key-usage", Timestamp::now()).await.unwrap();
    let keys = app.engine.store.api_keys_load().await.unwrap();
    assert!(keys[text.lookup()].key.last_used_at.is_some());
}

/// Calls with a key. Returns the status and the JSON of the answer.
pub async fn call(
    app: &App,
    key: &ApiKeyText,
    method: &str,
    path: &str,
    body: serde_json::Value,
) -> (u16, serde_json::Value) {
    let request = Request::builder()
        .method(method)
        .uri(path)
        .header("x-api-key", key.reveal())
        .body(Body::from(if body.is_null() { String::new() } else { body.to_string() }))
        .unwrap();
    let answer = app.send(request).await;
    (answer.status.as_u16(), serde_json::from_str(&answer.text).unwrap_or_default())
}

/// An app with an admin key and a key that is restricted to the queue `mail`.
pub struct TwoQueues {
    pub app: App,
    pub mail: ApiKeyText,
    pub admin: ApiKeyText,
}

impl TwoQueues {
    pub async fn start() -> TwoQueues {
        let app = App::start().await;
        let scopes = [KeyScope::Write, KeyScope::Worker];
        let (admin, mail) = (key(&app, &[KeyScope::Admin], None).await, key(&app, &scopes, Some(&["mail"])).await);
        TwoQueues { app, mail, admin }
    }

    pub async fn call(
        &self,
        key: &ApiKeyText,
        method: &str,
        path: &str,
        body: serde_json::Value,
    ) -> (u16, serde_json::Value) {
        call(&self.app, key, method, path, body).await
    }

    /// Calls as a worker, with the session token of the answer to its registration.
    async fn call_worker(
        &self,
        key: &ApiKeyText,
        registered: &serde_json::Value,
        path: &str,
        body: serde_json::Value,
    ) -> (u16, serde_json::Value) {
        let path = format!("/api/v1/workers/{}{path}", registered["workerId"].as_str().unwrap());
        let mut request = Request::builder().method("POST").uri(path).header("x-api-key", key.reveal());
        if let Some(token) = registered["sessionToken"].as_str() {
            request = request.header("x-session-token", token);
        }
        let body = if body.is_null() { String::new() } else { body.to_string() };
        let response = self.app.send(request.body(Body::from(body)).unwrap()).await;
        (response.status.as_u16(), response.json())
    }

    /// Submits a job with the admin key and returns its id.
    pub async fn job(&self, queue: &str) -> String {
        let body = json!({"type": "someone.elses", "queue": queue, "correlationId": "both"});
        let (status, created) = self.call(&self.admin, "POST", "/api/v1/jobs", body).await;
        assert_eq!(status, 201, "{created}");
        created["id"].as_str().unwrap().to_owned()
    }

    async fn status(&self, method: &str, path: &str, body: serde_json::Value) -> u16 {
        self.call(&self.mail, method, path, body).await.0
    }

    async fn get(&self, path: &str) -> serde_json::Value {
        let (status, json) = self.call(&self.mail, "GET", path, json!(null)).await;
        assert_eq!(status, 200, "{path}: {json}");
        json
    }
}

#[tokio::test]
async fn a_restricted_key_sees_and_changes_jobs_of_its_queues_only() {
    let queues = TwoQueues::start().await;
    let (mine, other) = (queues.job("mail").await, queues.job("other").await);
    for rest in ["", "/why", "/dependencies"] {
        assert_eq!(queues.status("GET", &format!("/api/v1/jobs/{mine}{rest}"), json!(null)).await, 200, "{rest}");
        assert_eq!(queues.status("GET", &format!("/api/v1/jobs/{other}{rest}"), json!(null)).await, 404, "{rest}");
    }
    assert_eq!(queues.status("PATCH", &format!("/api/v1/jobs/{other}"), json!({"priority": "LOW"})).await, 404);
    assert_eq!(queues.status("POST", &format!("/api/v1/jobs/{other}/cancel"), json!(null)).await, 404);
    assert_eq!(queues.status("POST", &format!("/api/v1/jobs/{other}/retry"), json!(null)).await, 404);
    assert_eq!(queues.status("DELETE", &format!("/api/v1/jobs/{other}"), json!(null)).await, 404);
    let listed = queues.get("/api/v1/jobs").await;
    assert_eq!((&listed["total"], &listed["jobs"][0]["id"]), (&json!(1), &json!(mine)));
    assert_eq!(queues.get("/api/v1/jobs?queue=other").await["total"], 0);
    assert_eq!(queues.get("/api/v1/jobs?correlationId=both").await["total"], 1);
    let trace = queues.get("/api/v1/trace/both").await;
    assert_eq!(trace["jobs"].as_array().unwrap().len(), 1);
    assert!(!trace.to_string().contains(&other), "{trace}");
    let names: Vec<_> = queues.get("/api/v1/queues").await["queues"].as_array().unwrap().clone();
    assert_eq!((names.len(), &names[0]["name"]), (1, &json!("mail")));
    assert_eq!(queues.status("GET", "/api/v1/queues/other", json!(null)).await, 403);
    assert_eq!(queues.status("POST", "/api/v1/queues/other/pause", json!(null)).await, 403);
}

#[tokio::test]
async fn a_restricted_key_submits_to_its_queues_only() {
    let queues = TwoQueues::start().await;
    let other = queues.job("other").await;
    let job = |queue: &str| json!({"type": "a", "queue": queue});
    assert_eq!(queues.status("POST", "/api/v1/jobs", job("mail")).await, 201);
    assert_eq!(queues.status("POST", "/api/v1/jobs", job("other")).await, 403);
    assert_eq!(queues.status("POST", "/api/v1/jobs", json!({"type": "a"})).await, 403, "the default queue is another");
    let batch = json!({"jobs": [job("mail"), job("other")]});
    assert_eq!(queues.status("POST", "/api/v1/jobs/batch", batch).await, 403);
    let child = json!({"type": "a", "queue": "mail", "dependsOn": [other]});
    let (status, answer) = queues.call(&queues.mail, "POST", "/api/v1/jobs", child).await;
    assert_eq!((status, &answer["error"]["details"][0]["path"]), (400, &json!("dependsOn")), "{answer}");
    assert_eq!(queues.get("/api/v1/jobs").await["total"], 1, "only the allowed job was stored");
}

#[tokio::test]
async fn a_conflict_does_not_name_a_job_of_another_queue() {
    let app = App::start().await;
    let foreign = app.create(r#"{"type": "unhandled.type", "queue": "secret", "uniqueKey": "taken"}"#).await;
    let own = app.create(r#"{"type": "unhandled.type", "queue": "mail", "uniqueKey": "own"}"#).await;
    let mailer = key(&app, &[KeyScope::Write], Some(&["mail"])).await;
    let submit = async |unique: &str| {
        let body = json!({"type": "unhandled.type", "queue": "mail", "uniqueKey": unique}).to_string();
        let (parts, _) = request("POST", "/api/v1/jobs", Some(mailer.reveal())).into_parts();
        app.send(Request::from_parts(parts, Body::from(body))).await.json()
    };
    let hidden = submit("taken").await["error"].take();
    assert_eq!(
        (&hidden["code"], &hidden["message"]),
        (&json!("CONFLICT"), &json!("a job with this uniqueKey has not finished"))
    );
    assert!(!hidden.to_string().contains(&foreign), "{hidden}");
    let shown = submit("own").await["error"].take();
    assert_eq!(shown["details"][0]["message"], json!(own), "{shown}");
}

#[tokio::test]
async fn bulk_actions_dead_letters_and_schedules_of_a_restricted_key_stay_in_its_queues() {
    let queues = TwoQueues::start().await;
    let (mine, other) = (queues.job("mail").await, queues.job("other").await);
    let bulk = json!({"filter": {"type": "someone.elses"}});
    let (status, answer) = queues.call(&queues.mail, "POST", "/api/v1/jobs/bulk/cancel", bulk).await;
    assert_eq!((status, &answer["matched"]), (200, &json!(1)), "{answer}");
    let state = async |id: &str| {
        let path = format!("/api/v1/jobs/{id}");
        queues.call(&queues.admin, "GET", &path, json!(null)).await.1["status"].clone()
    };
    assert_eq!((state(&mine).await, state(&other).await), (json!("CANCELLED"), json!("QUEUED")));
    assert_eq!(queues.get("/api/v1/dead-letter").await["total"], 0);
    assert_eq!(queues.get("/api/v1/dead-letter/stats").await["total"], 0);

    let schedule = |queue: &str| json!({"name": "s", "cronExpression": "0 0 1 1 *", "jobType": "a", "queue": queue});
    assert_eq!(queues.status("POST", "/api/v1/schedules", schedule("other")).await, 403);
    let create = async |key: &ApiKeyText, queue: &str| {
        let (status, created) = queues.call(key, "POST", "/api/v1/schedules", schedule(queue)).await;
        assert_eq!(status, 201, "{created}");
        created["id"].as_str().unwrap().to_owned()
    };
    let (mine, other) = (create(&queues.mail, "mail").await, create(&queues.admin, "other").await);
    let listed = queues.get("/api/v1/schedules").await;
    assert_eq!((&listed["total"], &listed["schedules"][0]["id"]), (&json!(1), &json!(mine)));
    for (method, rest) in [("GET", ""), ("DELETE", ""), ("POST", "/trigger"), ("GET", "/preview"), ("GET", "/ticks")] {
        assert_eq!(
            queues.status(method, &format!("/api/v1/schedules/{other}{rest}"), json!(null)).await,
            404,
            "{rest}"
        );
    }
    let moved = json!({"queue": "other"});
    assert_eq!(queues.status("PATCH", &format!("/api/v1/schedules/{mine}"), moved).await, 400);
}

#[tokio::test]
async fn the_metrics_of_a_restricted_key_are_those_of_its_queues() {
    let queues = TwoQueues::start().await;
    for queue in ["mail", "other", "other"] {
        queues.job(queue).await;
    }
    let schedule = json!({"name": "s", "cronExpression": "0 0 1 1 *", "jobType": "a", "queue": "other"});
    assert_eq!(queues.call(&queues.admin, "POST", "/api/v1/schedules", schedule).await.0, 201);
    queues.app.engine.run_loop("history", faena_domain::Timestamp::now()).await.unwrap();
    let all = queues.call(&queues.admin, "GET", "/api/v1/metrics/overview", json!(null)).await.1;
    assert_eq!((&all["jobs"]["total"], &all["schedules"]["total"]), (&json!(3), &json!(1)), "{all}");
    let overview = queues.get("/api/v1/metrics/overview").await;
    assert_eq!(overview["queues"], json!({"priority": 1, "delayed": 0, "processing": 0, "dlq": 0}));
    assert_eq!((&overview["jobs"]["total"], &overview["jobs"]["last24h"]["created"]), (&json!(1), &json!(1)));
    assert_eq!((&overview["schedules"]["total"], overview.get("workers")), (&json!(0), None));
    for part in ["queues", "jobs", "schedules"] {
        assert_eq!(queues.get(&format!("/api/v1/metrics/{part}")).await, overview[part], "{part}");
    }
    let history = queues.get("/api/v1/metrics/history?byQueue=true").await["history"].clone();
    let names: Vec<_> = history.as_array().unwrap().iter().map(|entry| &entry["queue"]).collect();
    assert_eq!(names, [&json!("mail")]);
    assert_eq!(queues.status("GET", "/api/v1/metrics/history?queue=other", json!(null)).await, 403);
}

#[tokio::test]
async fn a_restricted_key_is_rejected_by_routes_about_all_queues() {
    let queues = TwoQueues::start().await;
    for path in [
        "/api/v1/outbox",
        "/api/v1/limits",
        "/api/v1/bulk",
        "/api/v1/workers",
        "/api/v1/webhooks",
        "/api/v1/metrics/workers",
        "/metrics",
    ] {
        assert_eq!(queues.status("GET", path, json!(null)).await, 403, "{path}");
    }
}

#[tokio::test]
async fn a_worker_gets_jobs_of_the_queues_of_its_key_only() {
    let queues = TwoQueues::start().await;
    let (_, other) = (queues.job("other").await, queues.job("other").await);
    let mine = queues.job("mail").await;
    let worker = json!({"workerId": "w", "capabilities": ["someone.elses"]});
    let elsewhere = json!({"workerId": "x", "capabilities": ["*"], "queues": ["other"]});
    assert_eq!(queues.status("POST", "/api/v1/workers/register", elsewhere).await, 403);
    let (status, registered) = queues.call(&queues.mail, "POST", "/api/v1/workers/register", worker).await;
    assert_eq!(status, 201, "{registered}");
    let claim = json!({"max": 10, "waitMs": 2000});
    let (status, claimed) = queues.call_worker(&queues.mail, &registered, "/claim", claim).await;
    assert_eq!(status, 200, "{claimed}");
    let ids: Vec<_> = claimed["jobs"].as_array().unwrap().iter().map(|job| job["id"].clone()).collect();
    assert_eq!(ids, [json!(mine)], "{claimed}, not {other}");
}

/// The session token proves which worker calls; the API key that registered it may resume it without the token.
#[tokio::test]
async fn a_worker_is_used_with_its_session_token_and_resumed_with_its_key() {
    let queues = TwoQueues::start().await;
    let mine = queues.job("mail").await;
    let worker = json!({"workerId": "w", "capabilities": ["someone.elses"]});
    let register = "/api/v1/workers/register";
    let (_, registered) = queues.call(&queues.mail, "POST", register, worker.clone()).await;
    let (_, claimed) = queues.call_worker(&queues.mail, &registered, "/claim", json!({"waitMs": 2000})).await;
    let second = key(&queues.app, &[KeyScope::Worker], None).await;
    let (status, answer) = queues.call(&second, "POST", register, worker.clone()).await;
    assert_eq!((status, &answer["error"]["code"]), (409, &json!("CONFLICT")), "{answer}");
    let complete = format!("/jobs/{mine}/complete");
    let body = json!({"run": claimed["jobs"][0]["run"]});
    let (wrong, none) = (json!({"workerId": "w", "sessionToken": "fst_wrong"}), json!({"workerId": "w"}));
    for key in [&queues.mail, &second] {
        for (path, body) in [("/claim", json!({})), ("/heartbeat", json!(null)), (&*complete, body.clone())] {
            assert_eq!(queues.call_worker(key, &none, path, body.clone()).await.0, 401, "{path} without a token");
            assert_eq!(queues.call_worker(key, &wrong, path, body).await.0, 403, "{path} with a wrong token");
        }
    }
    let (status, resumed) = queues.call(&queues.mail, "POST", register, worker).await;
    assert_eq!((status, &resumed["resumed"]), (201, &json!(true)), "{resumed}");
    assert_eq!(queues.call_worker(&second, &registered, "/heartbeat", json!(null)).await.0, 403, "it was replaced");
    let (status, answer) = queues.call_worker(&second, &resumed, &complete, body).await;
    assert_eq!(status, 200, "the token is enough: {answer}");
    let (_, shown) = queues.call(&queues.admin, "GET", "/api/v1/workers/w", json!(null)).await;
    assert!(!shown.to_string().contains("fst_") && shown["sessionToken"].is_null(), "{shown}");
}

#[tokio::test]
async fn authorization_of_another_scheme_is_left_to_the_proxy_in_front() {
    let app = App::start().await;
    let basic = || Request::builder().uri("/api/v1/jobs").header("authorization", "Basic YTpi").body(Body::empty());
    assert_eq!(app.send(basic().unwrap()).await.status, 200, "while there are no keys");
    key(&app, &[KeyScope::Read], None).await;
    assert_eq!(app.send(basic().unwrap()).await.status, 401);
}

#[tokio::test]
async fn the_host_is_not_checked_once_there_are_keys() {
    let app = App::start().await;
    let named = |key: Option<&str>| {
        let request = Request::builder().uri("/api/v1/jobs").header("host", "jobs.example");
        let request = key.iter().fold(request, |request, key| request.header("x-api-key", *key));
        request.body(Body::empty()).unwrap()
    };
    assert_eq!(app.send(named(None)).await.status, 403, "a page could reach this machine under another name");
    let text = key(&app, &[KeyScope::Read], None).await;
    assert_eq!(app.send(named(Some(text.reveal()))).await.status, 200);
}

/// Opens a stream and returns its body once it has begun.
async fn open_stream(app: &App, path: &str, key: &ApiKeyText) -> axum::body::BodyDataStream {
    let response = app.router.clone().oneshot(request("GET", path, Some(key.reveal()))).await.unwrap();
    assert_eq!(response.status(), 200, "{path}");
    let mut body = response.into_body().into_data_stream();
    body.next().await.unwrap().unwrap();
    body
}

async fn wait_for_end(mut body: axum::body::BodyDataStream) {
    let rest = async { while body.next().await.is_some() {} };
    tokio::time::timeout(Duration::from_secs(60), rest).await.expect("the stream ends");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_streams_of_a_revoked_or_expired_key_end() {
    let app = App::start().await;
    let job = app.create(r#"{"name": "later", "scheduledAt": "2100-01-01T00:00:00Z"}"#).await;
    let now = Timestamp::now();
    let new = |expires_at| NewApiKey {
        name: "k".into(),
        scopes: vec![KeyScope::Read],
        queues: None,
        groups: vec![],
        without_payloads: false,
        expires_at,
    };
    let (revoked, stored) = store(&app, new(None), now).await;
    let (expiring, _) = store(&app, new(Some(now.plus_ms(2_000))), now).await;
    let (valid, _) = store(&app, new(None), now).await;
    let paths = ["/api/v1/events".to_owned(), format!("/api/v1/jobs/{job}/events")];
    let mut open = Vec::new();
    for path in &paths {
        // The key may expire before its stream is open; then there is no stream.
        if Timestamp::now() < now.plus_ms(1_000) {
            open.push(open_stream(&app, path, &expiring).await);
        }
        open.push(open_stream(&app, path, &revoked).await);
    }
    let mut unaffected = open_stream(&app, "/api/v1/events?types=job.created", &valid).await;
    app.engine.store.api_key_revoke(stored.key.id, "test", now).await.unwrap();
    for body in open {
        wait_for_end(body).await;
    }
    // The job is created with a new key, because the calls of `App` have none.
    let writer = key(&app, &[KeyScope::Write], None).await;
    let create = Request::post("/api/v1/jobs").header("authorization", format!("Bearer {}", writer.reveal()));
    let create = create.header("content-type", "application/json").body(Body::from(r#"{"name": "noop"}"#)).unwrap();
    assert_eq!(app.send(create).await.status, 201);
    assert!(unaffected.next().await.is_some(), "the stream of another key stays open");
}
