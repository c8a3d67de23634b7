//! The pages of the dashboard, with the real binary: what they show, who may see them, and that hostile data is harmless.

mod dead_letters;
mod jobs;
mod queues;
mod schedules;
mod tasks;
mod workers;

use std::time::Duration;

use futures_util::StreamExt;
use reqwest::{Client, Response, StatusCode, header, redirect::Policy};
use serde_json::{Value, json};

use crate::{
    faena::{Faena, eventually, http},
    shell::Shell,
};

/// Every page that needs no id.
pub const PAGES: [&str; 20] = [
    "/",
    "/jobs",
    "/jobs/new",
    "/jobs/bulk/retry?status=FAILED",
    "/queues",
    "/limits",
    "/schedules",
    "/schedules/new",
    "/dead-letters",
    "/dead-letters/bulk/delete?type=invoice.send&error=503",
    "/tasks",
    "/approvals",
    "/machines",
    "/machines/coding-task",
    "/workers",
    "/events",
    "/webhooks",
    "/audit",
    "/keys",
    "/about",
];

/// A browser without script: it does not follow redirects, so that tests see them.
pub struct Browser {
    http: Client,
    url: String,
    cookies: Vec<(String, String)>,
    pub language: &'static str,
}

impl Browser {
    pub fn new(faena: &Faena) -> Browser {
        let _ = http();
        let http =
            Client::builder().no_proxy().redirect(Policy::none()).timeout(Duration::from_secs(60)).build().unwrap();
        Browser { http, url: faena.url.clone(), cookies: Vec::new(), language: "en" }
    }

    fn cookie(&self) -> String {
        let pairs: Vec<String> = self.cookies.iter().map(|(name, value)| format!("{name}={value}")).collect();
        pairs.join("; ")
    }

    /// Keeps the cookies of an answer.
    fn remember(&mut self, answer: &Response) {
        for cookie in answer.headers().get_all(header::SET_COOKIE) {
            let (name, rest) = cookie.to_str().unwrap().split_once('=').unwrap();
            let value = rest.split(';').next().unwrap();
            self.cookies.retain(|(known, _)| known != name);
            if !value.is_empty() {
                self.cookies.push((name.to_owned(), value.to_owned()));
            }
        }
    }

    pub async fn get(&mut self, path: &str) -> Response {
        let request = self.http.get(format!("{}{path}", self.url)).header(header::COOKIE, self.cookie());
        let answer = request.header(header::ACCEPT_LANGUAGE, self.language).send().await.unwrap();
        self.remember(&answer);
        answer
    }

    pub async fn text(&mut self, path: &str) -> String {
        let answer = self.get(path).await;
        let status = answer.status();
        let text = answer.text().await.unwrap();
        assert!(status.is_success(), "{path}: {status} {text}");
        text
    }

    /// Submits a form, as a page of this server does.
    pub async fn submit(&mut self, path: &str, fields: &[(&str, &str)]) -> Response {
        let origin = self.url.clone();
        self.submit_from(path, fields, &origin).await
    }

    pub async fn submit_from(&mut self, path: &str, fields: &[(&str, &str)], origin: &str) -> Response {
        let body = url::form_urlencoded::Serializer::new(String::new()).extend_pairs(fields).finish();
        let request = self.http.post(format!("{}{path}", self.url)).header(header::COOKIE, self.cookie());
        let request =
            request.header(header::ORIGIN, origin).header(header::CONTENT_TYPE, "application/x-www-form-urlencoded");
        let answer = request.body(body).send().await.unwrap();
        self.remember(&answer);
        answer
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn every_page_works_in_both_languages_and_loads_nothing_from_other_sites() {
    let shell = Shell::start(&[]).await;
    let mut browser = Browser::new(&shell.faena);
    for language in ["en", "es"] {
        browser.language = language;
        for path in PAGES.into_iter().chain(["/jobs?q=type:noop+state:failed", "/trace?id=none"]) {
            let answer = browser.get(path).await;
            assert_eq!(answer.status(), StatusCode::OK, "{path}");
            let policy = answer.headers()[header::CONTENT_SECURITY_POLICY].to_str().unwrap().to_owned();
            assert!(policy.contains("default-src 'none'") && !policy.contains("unsafe"), "{policy}");
            let html = answer.text().await.unwrap();
            assert!(html.contains(&format!("<html lang=\"{language}\"")), "{path}");
            for inline in ["<style", "style=\"", "onclick", "javascript:", "http://fonts", "https://"] {
                assert!(!html.contains(inline), "{path} contains {inline}");
            }
        }
    }
    browser.language = "es";
    assert!(browser.text("/jobs").await.contains("Trabajos"));
    browser.submit("/preferences", &[("language", "en"), ("theme", "dark"), ("next", "/jobs")]).await;
    let html = browser.text("/jobs").await;
    assert!(html.contains("<h1>Jobs</h1>") && html.contains("data-theme=\"dark\""), "the preference decides: {html}");
}

#[tokio::test(flavor = "multi_thread")]
async fn hostile_data_is_shown_as_text() {
    let shell = Shell::start(&[]).await;
    let hostile = "<script>alert(1)</script>\u{202e}\"'><img src=x onerror=alert(1)>";
    let tags: Vec<String> = (0..30).map(|n| format!("{hostile}{n}")).collect();
    let body = json!({"name": hostile, "queue": "<b>q</b>", "payload": {hostile: hostile}, "tags": tags, "correlationId": hostile});
    let id = shell.faena.submit(body).await;
    let mut browser = Browser::new(&shell.faena);
    for path in
        ["/".to_owned(), "/jobs".into(), format!("/jobs/{id}"), format!("/jobs/new?from={id}"), "/queues".into()]
    {
        let html = browser.text(&path).await;
        assert!(
            !html.contains("<script>alert") && !html.contains("<img src=x") && !html.contains("<b>q</b>"),
            "{path}"
        );
    }
    let search = browser.text("/jobs?q=%22%3E%3Cscript%3Ealert(1)%3C/script%3E").await;
    assert!(!search.contains("<script>alert"), "{search}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_job_is_submitted_changed_and_cancelled_in_the_browser() {
    let shell = Shell::start(&[]).await;
    let mut browser = Browser::new(&shell.faena);
    let fields = [
        ("name", "invoice.send"),
        ("queue", "billing"),
        ("priority", "HIGH"),
        ("payload", "{\"order\": 7}"),
        ("tags", "a, b"),
    ];
    let answer = browser.submit("/jobs/new", &fields).await;
    assert_eq!(answer.status(), StatusCode::SEE_OTHER);
    let page = answer.headers()[header::LOCATION].to_str().unwrap().to_owned();
    let html = browser.text(&page).await;
    assert!(html.contains("The job was submitted.") && html.contains("Queued"), "{html}");
    assert!(html.contains("No worker can run type"), "the page says why the job does not run: {html}");
    assert!(!browser.text(&page).await.contains("The job was submitted."), "a notice is shown once");

    let broken =
        browser.submit(&format!("{page}/edit"), &[("original", "{}"), ("payload", "{broken"), ("tags", "")]).await;
    assert_eq!(broken.status(), StatusCode::BAD_REQUEST);
    let html = broken.text().await.unwrap();
    assert!(html.contains("{broken") && html.contains("Payload"), "what was typed stays, with the reason: {html}");

    browser.submit(&format!("{page}/cancel"), &[]).await;
    let html = browser.text(&page).await;
    assert!(html.contains("The job was cancelled.") && html.contains("Cancelled"), "{html}");
    let again = browser.submit(&format!("{page}/cancel"), &[]).await;
    assert_eq!(again.status(), StatusCode::SEE_OTHER);
    assert!(browser.text(&page).await.contains("class=\"notice error\""), "an action that fails says why");
}

#[tokio::test(flavor = "multi_thread")]
async fn failed_jobs_are_retried_together_after_a_dry_run() {
    let shell = Shell::start(&[]).await;
    for host in ["10.0.0.1", "10.0.0.2"] {
        let payload = json!({"method": "GET", "url": format!("http://{host}/")});
        shell.faena.submit(json!({"name": "http.request", "payload": payload, "maxRetries": 0})).await;
    }
    let mut browser = Browser::new(&shell.faena);
    eventually("two dead letters", async || {
        browser.text("/dead-letters").await.contains("<span class=\"n urgent\">2</span>").then_some(())
    })
    .await;
    let question = browser.text("/jobs/bulk/retry?status=FAILED&type=http.request").await;
    assert!(question.contains("Retry: 2 jobs") && question.contains("http.request"), "{question}");
    browser.submit("/jobs/bulk/retry?status=FAILED&type=http.request", &[]).await;
    assert!(browser.text("/jobs").await.contains("2 jobs changed"));
    let overview = browser.text("/").await;
    assert!(overview.contains("Finished per minute") && overview.contains("id=\"per-minute\""), "{overview}");
    eventually("the chart of the last hour has the failures", async || {
        let overview = browser.text("/").await;
        (overview.contains("Failed, last hour") && overview.contains("completed: 0, failed: ")).then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_needs_attention_is_on_the_first_page() {
    let folder = tempfile::tempdir().unwrap();
    let sink = "[[sink]]\nname = \"hook\"\nkind = \"webhook\"\nurl = \"http://127.0.0.1:9/\"\n";
    std::fs::write(folder.path().join("faena.toml"), sink).unwrap();
    let faena = Faena::start(folder.path(), &[("FAENA_WEBHOOK_ALLOW", "127.0.0.0/8")]).await;
    let mut browser = Browser::new(&faena);
    assert!(browser.text("/").await.contains("Nothing needs attention right now."));
    assert!(browser.text("/").await.contains("No job has finished in the last hour."));
    let payload = json!({"method": "GET", "url": "http://10.0.0.1/"});
    let failing = faena.submit(json!({"name": "http.request", "payload": payload, "maxRetries": 0})).await;
    // In a paused queue, the job would not run.
    faena.wait_for_state(&failing, "FAILED").await;
    faena.post("/api/v1/queues/default/pause", json!({})).await;
    faena.submit(json!({"name": "noop"})).await;
    assert!(browser.text("/").await.contains("1 of these in paused queues"), "no worker can take the ready job");
    for (link, text) in [
        ("/dead-letters", "1 dead letter"),
        ("/events", "Sink is down: “hook”"),
        ("/queues/default", "Queue is paused: “default”"),
    ] {
        eventually(text, async || {
            let overview = browser.text("/").await;
            let list = overview.split("class=\"panel attention\"").nth(1)?.split("</ul>").next()?.to_owned();
            let entry = list.split("<li>").find(|entry| entry.contains(text))?;
            entry.contains(&format!("href=\"{link}\"")).then_some(())
        })
        .await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_queue_is_paused_and_a_task_is_approved_in_the_browser() {
    let shell = Shell::start(&[]).await;
    shell.faena.submit(json!({"name": "invoice.send", "queue": "billing"})).await;
    let mut browser = Browser::new(&shell.faena);
    browser.submit("/queues", &[("name", "billing"), ("action", "pause")]).await;
    assert!(browser.text("/queues").await.contains("paused"));
    browser.submit("/queues", &[("name", "billing"), ("action", "resume")]).await;
    browser.submit("/queues", &[("name", "billing"), ("action", "save"), ("concurrency", "3")]).await;
    let (_, queue) = shell.faena.get("/api/v1/queues/billing").await;
    assert_eq!((&queue["paused"], &queue["concurrency"]), (&Value::Null, &json!(3)));

    let data = json!({"prompt": "x", "repositorioOrigen": "/tmp/r", "reglas": {"requiereAprobacionPlan": true}});
    let (_, task) =
        shell.faena.post("/api/v1/tasks", json!({"machine": "coding-task", "data": data, "title": "Add a test"})).await;
    let id = task["id"].as_str().unwrap();
    let plan = json!({"type": "resultado.plan_generado", "payload": {"planId": "p", "plan": "1. Write <b>it</b>"}});
    shell.faena.post(&format!("/api/v1/tasks/{id}/events"), plan).await;
    assert!(browser.text("/approvals").await.contains("Add a test"));
    let html = browser.text(&format!("/tasks/{id}")).await;
    let hash = html.split("name=\"hash\" value=\"").nth(1).unwrap().split('"').next().unwrap().to_owned();
    assert!(html.contains("Approve") && !html.contains("<b>it</b>"), "{html}");
    assert!(html.contains("class=\"drawing waiting\"") && html.contains("class=\"state active\""), "{html}");
    browser.submit(&format!("/tasks/{id}/approve"), &[("hash", "0000"), ("comment", "")]).await;
    assert!(
        browser.text(&format!("/tasks/{id}")).await.contains("class=\"notice error\""),
        "another plan is not approved"
    );
    browser.submit(&format!("/tasks/{id}/approve"), &[("hash", &hash), ("comment", "go")]).await;
    let (_, task) = shell.faena.get(&format!("/api/v1/tasks/{id}")).await;
    assert!(task["state"].as_str().unwrap().starts_with("EJECUTANDO_CODIGO"), "{task}");
}

#[tokio::test(flavor = "multi_thread")]
async fn with_keys_a_viewer_logs_in_and_other_sites_can_do_nothing() {
    let shell = Shell::start(&[]).await;
    let admin =
        shell.json(&["keys", "create", "ops", "--scopes", "admin", "--json"])["key"].as_str().unwrap().to_owned();
    let key = async |scope: &str| {
        let request = shell.faena.http.post(format!("{}/api/v1/api-keys", shell.faena.url)).bearer_auth(&admin);
        let created = request.json(&json!({"name": scope, "scopes": [scope]})).send().await.unwrap();
        created.json::<Value>().await.unwrap()["key"].as_str().unwrap().to_owned()
    };
    let (reader, worker) = (key("read").await, key("worker").await);
    let mut browser = Browser::new(&shell.faena);
    eventually("the server knows the keys", async || {
        (browser.get("/jobs").await.status() == StatusCode::SEE_OTHER).then_some(())
    })
    .await;
    let answer = browser.get("/jobs?status=FAILED").await;
    assert_eq!(answer.headers()[header::LOCATION], "/login?next=%2Fjobs%3Fstatus%3DFAILED");
    for wrong in ["fna_wrong", &worker] {
        let answer = browser.submit("/login", &[("key", wrong), ("next", "/jobs")]).await;
        assert!(answer.status().is_client_error(), "{}", answer.status());
        assert!(answer.headers().get(header::SET_COOKIE).is_none() && !answer.text().await.unwrap().contains(wrong));
    }
    let answer = browser.submit("/login", &[("key", &reader), ("next", "//evil.example")]).await;
    assert_eq!(answer.headers()[header::LOCATION], "/", "a login never leads to another site");
    let cookie = answer.headers()[header::SET_COOKIE].to_str().unwrap();
    assert!(cookie.contains("HttpOnly") && cookie.contains("SameSite=Strict"), "{cookie}");
    let html = browser.text("/jobs").await;
    assert!(html.contains("Log out") && !html.contains(&reader), "the key is never part of a page");
    // A key that only reads can change nothing, and administration is closed to it.
    browser.submit("/jobs/new", &[("name", "noop"), ("priority", "NORMAL"), ("payload", "{}")]).await;
    assert_eq!(browser.get("/keys").await.status(), StatusCode::FORBIDDEN);
    let about = browser.text("/about").await;
    assert!(
        about.contains("To see the configuration, log in with an API key") && !about.contains("database.url"),
        "{about}"
    );
    // A page of another site cannot act with the rights of the viewer, even if the browser sent the cookie.
    let forged =
        browser.submit_from("/queues", &[("name", "default"), ("action", "pause")], "https://evil.example").await;
    assert_eq!(forged.status(), StatusCode::SEE_OTHER);
    assert!(browser.text("/queues").await.contains("class=\"notice error\""));
    browser.submit("/logout", &[]).await;
    assert_eq!(browser.get("/jobs").await.status(), StatusCode::SEE_OTHER);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_open_page_receives_what_changed() {
    let shell = Shell::start(&[]).await;
    let url = format!("{}/live?path=/jobs", shell.faena.url);
    let mut stream = shell.faena.http.get(url).timeout(Duration::from_secs(110)).send().await.unwrap().bytes_stream();
    let mut received = String::new();
    let mut id = None;
    while let Some(chunk) = stream.next().await {
        received.push_str(&String::from_utf8_lossy(&chunk.unwrap()));
        if received.contains("event: page") && id.is_none() {
            id = Some(shell.faena.submit(json!({"name": "invoice.send"})).await);
        }
        if id.as_ref().is_some_and(|id| received.contains(id.as_str())) {
            return;
        }
    }
    panic!("the stream ended: {received}");
}

#[tokio::test(flavor = "multi_thread")]
async fn behind_a_proxy_every_link_has_the_base_path() {
    let shell = Shell::start(&[("FAENA_SERVER_BASE_PATH", "/faena/")]).await;
    let mut browser = Browser::new(&shell.faena);
    for path in ["/faena/jobs", "/jobs"] {
        let html = browser.text(path).await;
        assert!(html.contains("href=\"/faena/jobs/new\"") && !html.contains("href=\"/jobs"), "{path}: {html}");
        let style = html.split("rel=\"stylesheet\" href=\"").nth(1).unwrap().split('"').next().unwrap();
        assert!(style.starts_with("/faena/assets/"), "{style}");
        let answer = browser.get(style).await;
        assert!(answer.headers()[header::CACHE_CONTROL].to_str().unwrap().contains("immutable"));
    }
    let (status, _) = shell.faena.get("/faena/api/v1/jobs").await;
    assert_eq!(status, StatusCode::OK, "the API is below the base path too");
    let answer = browser.submit("/faena/preferences", &[("language", "es"), ("next", "/jobs")]).await;
    assert_eq!(answer.headers()[header::LOCATION], "/faena/jobs");
}

const NARROW: &str = "
machine: narrow
version: 1
events: {finish: {}}
initial: WORK
states: {WORK: {forever: true, on: {finish: DONE}}, DONE: {final: true}}
";

#[tokio::test(flavor = "multi_thread")]
async fn a_queued_task_is_shown_in_both_languages() {
    let shell = Shell::start(&[]).await;
    let mut browser = Browser::new(&shell.faena);
    shell.faena.post("/api/v1/machines", json!({"definition": NARROW})).await;
    browser.submit("/limits", &[("scope", "machine"), ("name", "narrow"), ("concurrency", "1")]).await;
    shell.faena.post("/api/v1/tasks", json!({"machine": "narrow"})).await;
    let (_, task) = shell.faena.post("/api/v1/tasks", json!({"machine": "narrow"})).await;
    assert_eq!(task["status"], "queued");
    let page = format!("/tasks/{}", task["id"].as_str().unwrap());
    let english = ("en", "Queued", "1 of at most 1 tasks of narrow run", "Cancel");
    let spanish = ("es", "En cola", "tareas de narrow en ejecución: 1 de 1 como máximo", "Cancelar");
    for (language, word, reason, cancel) in [english, spanish] {
        browser.language = language;
        let html = browser.text("/tasks?status=queued").await;
        assert!(html.contains(word) && !html.contains(">WORK<"), "{html}");
        let html = browser.text(&page).await;
        assert!(html.contains(word) && html.contains(reason), "{html}");
        assert!(html.contains(cancel) && !html.contains("/pause\""), "it can be cancelled and not paused: {html}");
        assert!(browser.text("/limits").await.contains("narrow"));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_first_page_is_small() {
    let shell = Shell::start(&[]).await;
    for number in 0..50 {
        shell.faena.submit(json!({"name": "invoice.send", "queue": format!("queue-{number}")})).await;
    }
    let get = async |path: &str| {
        let request = shell.faena.http.get(format!("{}{path}", shell.faena.url));
        let answer = request.header(header::ACCEPT_ENCODING, "gzip").send().await.unwrap();
        assert_eq!(answer.headers()[header::CONTENT_ENCODING], "gzip", "{path}");
        answer.bytes().await.unwrap()
    };
    let html = Browser::new(&shell.faena).text("/").await;
    let mut total = get("/").await.len();
    for part in html.split(['"', '\'']).filter(|part| part.starts_with("/assets/")) {
        total += get(part).await.len();
    }
    assert!((5_000..100_000).contains(&total), "the first page has {total} bytes");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_page_of_a_job_shows_its_dependencies_webhooks_and_events_and_about_shows_the_configuration() {
    let folder = tempfile::tempdir().unwrap();
    let sink = "[[sink]]\nname = \"log\"\nkind = \"file\"\npath = \"events.log\"\n";
    std::fs::write(folder.path().join("faena.toml"), sink).unwrap();
    let environment =
        [("FAENA_WEBHOOK_ALLOW", "127.0.0.0/8"), ("FAENA_WEBHOOK_SECRETS", "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw")];
    let faena = Faena::start(folder.path(), &environment).await;
    let parent = faena.submit(json!({"name": "noop", "scheduledAt": "2099-01-01T00:00:00Z"})).await;
    let child = faena.submit(json!({"name": "load", "dependsOn": [parent]})).await;
    let mut browser = Browser::new(&faena);
    let html = browser.text(&format!("/jobs/{child}")).await;
    let link = format!("href=\"/jobs/{parent}\">noop</a>");
    assert!(html.contains("Depends on") && html.contains(&link), "{html}");
    assert!(html.contains("id=\"graph\"") && html.contains("class=\"current\""), "it is drawn: {html}");
    assert!(browser.text(&format!("/jobs/{parent}")).await.contains("Needed by"), "its parent names it");
    eventually("the event is on the page", async || {
        browser.text(&format!("/jobs/{child}")).await.contains("job.created").then_some(())
    })
    .await;
    let sent = faena.submit(json!({"name": "noop", "webhookUrl": "http://127.0.0.1:9/hook"})).await;
    eventually("the webhook is on the page", async || {
        browser.text(&format!("/jobs/{sent}")).await.contains("href=\"/webhooks/").then_some(())
    })
    .await;
    let about = browser.text("/about").await;
    assert!(
        about.contains("database.url")
            && about.contains("environment FAENA_WEBHOOK_ALLOW")
            && !about.contains("MfKQ9r8G"),
        "{about}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_limit_is_set_changed_and_removed_in_the_browser() {
    let shell = Shell::start(&[]).await;
    let mut browser = Browser::new(&shell.faena);
    let fields = [("scope", "queue"), ("name", "mail"), ("concurrency", "4"), ("rate", "30/1m")];
    browser.submit("/limits", &fields).await;
    let (_, list) = shell.faena.get("/api/v1/limits").await;
    let limit = &list["limits"][0];
    assert_eq!((&limit["concurrency"], &limit["rate"]), (&json!(4), &json!({"count": 30, "periodMs": 60_000})));
    let html = browser.text("/limits?scope=queue&name=mail").await;
    assert!(
        html.contains("value=\"mail\"") && html.contains("value=\"4\"") && html.contains("value=\"30/1m\""),
        "{html}"
    );
    browser.submit("/limits", &[("scope", "queue"), ("name", "mail"), ("concurrency", "4"), ("rate", "often")]).await;
    assert!(browser.text("/limits").await.contains("class=\"notice error\""), "the API says what a rate is");
    browser.submit("/limits", &[("scope", "queue"), ("name", "mail"), ("concurrency", ""), ("rate", "5/1s")]).await;
    let (_, list) = shell.faena.get("/api/v1/limits").await;
    assert_eq!(list["limits"][0]["concurrency"], Value::Null, "an empty field means no limit");
    browser.submit("/limits/reset", &[("scope", "queue"), ("name", "mail")]).await;
    assert!(browser.text("/limits").await.contains("The limit was removed"));
    let (_, list) = shell.faena.get("/api/v1/limits").await;
    assert!(list["limits"].as_array().unwrap().iter().all(|limit| limit["scope"] != "queue"), "{list}");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unknown_address_is_a_page_for_browsers_and_json_for_programs() {
    let shell = Shell::start(&[]).await;
    let ask = async |path: &str, accept: &str| {
        let request = http().get(format!("{}{path}", shell.faena.url)).header(header::ACCEPT, accept);
        let answer = request.send().await.unwrap();
        assert_eq!(answer.status(), StatusCode::NOT_FOUND, "{path}");
        answer.text().await.unwrap()
    };
    for path in ["/nothing-here", "/jobs/01a1ec00-cc4b-7000-8000-00000000ec5e"] {
        let page = ask(path, "text/html,*/*;q=0.8").await;
        assert!(page.contains("<title>Not found") && page.contains("id=\"navigation\""), "{page}");
    }
    for (path, accept) in [("/nothing-here", "*/*"), ("/api/v1/nothing", "text/html")] {
        assert!(ask(path, accept).await.starts_with("{\"error\""), "{path}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_page_of_a_cancelled_job_says_who_cancelled_it() {
    let shell = Shell::start(&[]).await;
    let id = shell.faena.submit(json!({"name": "letter.print", "queue": "print"})).await;
    shell.faena.post(&format!("/api/v1/jobs/{id}/cancel"), json!({})).await;
    let page = Browser::new(&shell.faena).text(&format!("/jobs/{id}")).await;
    assert!(page.contains("Why was it cancelled?") && page.contains("(requested by loopback)"), "{page}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_visit_to_the_address_of_an_action_shows_a_page() {
    let shell = Shell::start(&[]).await;
    let mut browser = Browser::new(&shell.faena);
    let answer = browser.get("/schedules/x/trigger").await;
    assert_eq!(answer.status(), StatusCode::NOT_FOUND);
    let page = answer.text().await.unwrap();
    assert!(page.contains("There is no page at this address."), "{page}");
    assert_eq!(browser.submit("/about", &[]).await.status(), StatusCode::METHOD_NOT_ALLOWED);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_list_offers_only_actions_that_can_apply_to_its_jobs() {
    let shell = Shell::start(&[]).await;
    shell.faena.submit(json!({"name": "letter.print", "queue": "print"})).await;
    let mut browser = Browser::new(&shell.faena);
    let offers =
        |page: &str| ["retry", "cancel", "delete"].map(|action| page.contains(&format!("/jobs/bulk/{action}?")));
    assert_eq!(offers(&browser.text("/jobs?queue=print").await), [true, true, true]);
    assert_eq!(offers(&browser.text("/jobs?status=QUEUED").await), [false, true, false]);
    assert_eq!(offers(&browser.text("/jobs?status=QUEUED&status=FAILED").await), [true, true, true]);
}
