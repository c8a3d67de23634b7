//! Tests of keys without payloads on the command line and in the dashboard, of the about page, and of the ids of
//! rejected events.

use std::fs;

use axum::{Router, http::StatusCode, routing::post};
use serde_json::{Value, json};

use crate::{
    dashboard::{Browser, PAGES},
    faena::{Faena, eventually, run},
    shell::{Shell, output_parts},
};

const MARKER: &str = "s3cr3t-m4rk3r";

const REVIEW: &str = "
machine: review
version: 1
events: {note: {}}
initial: REVIEW
states:
  REVIEW:
    approval: {subject: ctx, self: true, expires: {after: 7d, to: REJECTED}}
    on: {approval.granted: DONE, approval.denied: REJECTED}
  DONE: {final: true}
  REJECTED: {final: true, ends: failure}
";

/// Starts a receiver that answers every request with 400. Returns its URL.
async fn start_rejecting_receiver() -> String {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/", listener.local_addr().unwrap());
    let router = Router::new().route("/", post(|| async { (StatusCode::BAD_REQUEST, MARKER) }));
    tokio::spawn(async move { axum::serve(listener, router).await });
    url
}

/// Creates jobs, a schedule, a task and a webhook that contain the marker, and returns their pages.
async fn seed(faena: &Faena) -> Vec<String> {
    let register = json!({"workerId": "w", "version": "1.4.2", "capabilities": ["mail.send"], "concurrency": 10});
    faena.post("/api/v1/workers/register", register).await;
    let job = json!({
        "name": "mail.send", "payload": {"card": MARKER}, "maxRetries": 0, "webhookUrl": start_rejecting_receiver().await,
        "correlationId": "order-7",
    });
    let mut pages = vec!["/trace?id=order-7".to_owned(), "/dead-letters?type=mail.send".to_owned()];
    for (end, body) in [("complete", json!({"result": MARKER})), ("fail", json!({"error": MARKER}))] {
        let id = faena.submit(job.clone()).await;
        let (_, claimed) = faena.post("/api/v1/workers/w/claim", json!({"max": 1, "waitMs": 5_000})).await;
        let run = &claimed["jobs"][0]["run"];
        let path = format!("/api/v1/workers/w/jobs/{id}");
        let reports = [
            ("started", json!({})),
            ("progress", json!({"progress": {"percentage": 5.0, "message": MARKER}})),
            ("log", json!({"message": MARKER})),
            ("step", json!({"name": "charge", "result": MARKER})),
            (end, body),
        ];
        for (kind, mut report) in reports {
            report["run"] = run.clone();
            let (status, answer) = faena.post(&format!("{path}/{kind}"), report).await;
            assert!(status.is_success(), "{kind}: {answer}");
        }
        pages.extend([format!("/jobs/{id}"), format!("/jobs/{id}/edit"), format!("/jobs/new?from={id}")]);
    }
    let schedule = json!({"name": "nightly", "cronExpression": "0 3 * * *", "jobType": "mail.send", "jobPayload": {"card": MARKER}});
    let (_, schedule) = faena.post("/api/v1/schedules", schedule).await;
    pages.push(format!("/schedules/{}", schedule["id"].as_str().unwrap()));
    faena.post("/api/v1/machines", json!({"definition": REVIEW})).await;
    let (_, task) = faena.post("/api/v1/tasks", json!({"machine": "review", "data": {"card": MARKER}})).await;
    pages.push(format!("/tasks/{}", task["id"].as_str().unwrap()));
    let webhooks = eventually("two answered webhooks", async || {
        let (_, found) = faena.get("/api/v1/webhooks").await;
        let webhooks = found["webhooks"].as_array().unwrap().clone();
        let is_answered = |webhook: &Value| webhook["attempts"].as_u64() > Some(0);
        (webhooks.len() == 2 && webhooks.iter().all(is_answered)).then_some(webhooks)
    })
    .await;
    pages.extend(webhooks.iter().map(|webhook| format!("/webhooks/{}", webhook["id"].as_str().unwrap())));
    pages
}

/// Runs a command with an API key. Returns the exit code, stdout and stderr.
fn run_with(shell: &Shell, key: &str, arguments: &[&str]) -> (i32, String, String) {
    let environment = [("FAENA_URL", shell.faena.url.as_str()), ("FAENA_TOKEN", key)];
    output_parts(&run(shell.folder.path(), &environment, arguments))
}

/// Returns a browser that is logged in with a key.
async fn browser_of(faena: &Faena, key: &str) -> Browser {
    let mut browser = Browser::new(faena);
    eventually("the server knows the key", async || {
        let answer = browser.submit("/login", &[("key", key), ("next", "/")]).await;
        (answer.status() == StatusCode::SEE_OTHER).then_some(())
    })
    .await;
    browser
}

#[tokio::test(flavor = "multi_thread")]
async fn no_page_of_the_dashboard_shows_a_payload_to_a_key_without_payloads() {
    let shell = Shell::start(&[("FAENA_WEBHOOK_ALLOW", "127.0.0.0/8")]).await;
    let pages = seed(&shell.faena).await;
    let admin = shell.json(&["keys", "create", "ops", "--scopes", "admin", "--json"])["key"].clone();
    let mut ordinary = browser_of(&shell.faena, admin.as_str().unwrap()).await;
    let form = [("name", "support"), ("scope", "read"), ("withoutPayloads", "on")];
    let created = ordinary.submit("/keys", &form).await.text().await.unwrap();
    let viewer = created.split("<pre id=\"new-key\">").nth(1).unwrap().split('<').next().unwrap();
    assert!(ordinary.text("/keys").await.contains("read, payloads hidden"));
    let mut viewer = browser_of(&shell.faena, viewer).await;
    for (language, explained) in
        [("en", "does not show payloads, results or errors"), ("es", "no muestra los datos de los trabajos")]
    {
        (viewer.language, ordinary.language) = (language, language);
        for path in PAGES.iter().copied().chain(pages.iter().map(String::as_str)) {
            let html = viewer.get(path).await.text().await.unwrap();
            assert!(!html.contains(MARKER), "{path}: {html}");
            let shown = ordinary.get(path).await.text().await.unwrap();
            let is_about_content =
                ["/jobs/0", "/schedules/0", "/tasks/0", "/webhooks/0"].iter().any(|page| path.starts_with(page));
            if is_about_content && !path.ends_with("/edit") {
                assert!(shown.contains(MARKER), "{path} shows it to an ordinary key: {shown}");
                assert!(html.contains(explained), "{path} says why it is not shown: {html}");
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_open_page_and_the_command_line_show_no_payload() {
    let shell = Shell::start(&[("FAENA_WEBHOOK_ALLOW", "127.0.0.0/8")]).await;
    let pages = seed(&shell.faena).await;
    let admin = shell.json(&["keys", "create", "ops", "--scopes", "admin", "--json"])["key"].clone();
    let create = ["keys", "create", "support", "--scopes", "read", "--without-payloads", "--json"];
    let run_as = |key: &str, arguments: &[&str]| run_with(&shell, key, arguments);
    let (_, viewer, error) = run_as(admin.as_str().unwrap(), &create);
    let viewer: Value = serde_json::from_str(&viewer).unwrap_or_else(|_| panic!("{error}"));
    assert_eq!(viewer["withoutPayloads"], true);
    let viewer = viewer["key"].as_str().unwrap();
    let page = pages.iter().find(|page| page.starts_with("/jobs/0")).unwrap();
    let id = page.trim_start_matches("/jobs/");
    for arguments in
        [vec!["jobs", "show", id], vec!["jobs", "show", id, "--json"], vec!["jobs", "list"], vec!["dlq", "list"]]
    {
        let (_, shown, _) = run_as(admin.as_str().unwrap(), &arguments);
        let (code, hidden, error) = run_as(viewer, &arguments);
        assert_eq!(code, 0, "{arguments:?}: {error}");
        assert!(!hidden.contains(MARKER), "{arguments:?}: {hidden}");
        let says_so = hidden.contains("hidden from this API key") || hidden.contains("\"hidden\"");
        assert!(says_so || arguments[1] == "list", "{arguments:?}: {hidden}");
        assert!(shown.contains(MARKER) || arguments[1] == "list", "{arguments:?}: {shown}");
    }
    let (_, worker, error) = run_as(viewer, &["workers", "show", "w"]);
    assert!(worker.contains("version       1.4.2"), "a version is not a payload: {worker} {error}");
    let (code, _, error) =
        run_as(admin.as_str().unwrap(), &["keys", "create", "x", "--scopes", "write", "--without-payloads"]);
    assert!(code != 0 && error.contains("--without-payloads: only a key with the scope read alone"), "{error}");
    let url = format!("{}/live?path={page}", shell.faena.url);
    let mut stream = shell.faena.http.get(url).bearer_auth(viewer).send().await.unwrap();
    let mut received = String::new();
    while !received.contains("event: page") || !received.ends_with("\n\n") {
        received.push_str(&String::from_utf8_lossy(&stream.chunk().await.unwrap().expect("the stream stays open")));
    }
    assert!(received.contains("mail.send") && !received.contains(MARKER), "{received}");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_about_page_shows_the_nodes_and_what_the_checks_have_found() {
    let shell = Shell::start(&[]).await;
    let mut browser = Browser::new(&shell.faena);
    let html = browser.text("/about").await;
    let (_, nodes) = shell.faena.get("/api/v1/nodes").await;
    let node = &nodes["nodes"][0];
    assert_eq!((nodes["nodes"].as_array().unwrap().len(), &node["isThis"]), (1, &json!(true)), "{nodes}");
    assert_eq!(node["version"], env!("CARGO_PKG_VERSION"));
    assert!(html.contains(node["id"].as_str().unwrap()) && html.contains("(this one)"), "{html}");
    assert!(html.contains("This node has checked nothing since it started."), "{html}");
    let answer = browser.submit("/about/check", &[]).await;
    assert_eq!(answer.status(), StatusCode::SEE_OTHER);
    let report = eventually("the checks have ended", async || {
        let (_, report) = shell.faena.get("/api/v1/doctor").await;
        (report["isRunning"] == false && report["checkedAt"].is_string()).then_some(report)
    })
    .await;
    // The disk of the machine may be nearly full.
    let findings = report["findings"].as_array().unwrap();
    assert!(report["error"].is_null() && findings.iter().all(|finding| finding["code"] == "disk-space"), "{report}");
    for (language, title, checked) in [("en", "Nodes", "Last check"), ("es", "Nodos", "Última comprobación")] {
        browser.language = language;
        let html = browser.text("/about").await;
        assert!(html.contains(title) && html.contains(checked), "{html}");
    }
    let (_, again) = shell.faena.post("/api/v1/doctor", json!({})).await;
    assert_eq!(again, report, "it does not run again within a minute");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_about_page_shows_findings_to_administrators_only() {
    let shell = Shell::start(&[]).await;
    let job = shell.faena.submit(json!({"name": "noop"})).await;
    shell.faena.wait_for_state(&job, "COMPLETED").await;
    let database = rusqlite::Connection::open(shell.folder.path().join("faena-data/faena.db")).unwrap();
    database.busy_timeout(std::time::Duration::from_secs(5)).unwrap();
    database.execute("UPDATE counter SET n = n + 2 WHERE tally = 4", []).unwrap();
    let mut browser = Browser::new(&shell.faena);
    browser.submit("/about/check", &[]).await;
    eventually("the finding is on the page", async || {
        let html = browser.text("/about").await;
        (html.contains("counter-drift") && html.contains("faena doctor --fix")).then_some(())
    })
    .await;
    browser.language = "es";
    let html = browser.text("/about").await;
    assert!(
        html.contains("contadores distintos del número de filas") && html.contains("ejecuta «faena doctor"),
        "{html}"
    );
    browser.language = "en";
    let forged = browser.submit_from("/about/check", &[], "https://evil.example").await;
    assert_eq!(forged.status(), StatusCode::SEE_OTHER);
    assert!(browser.text("/about").await.contains("class=\"notice error\""), "other sites cannot start the checks");
    let admin = shell.json(&["keys", "create", "ops", "--scopes", "admin", "--json"])["key"].clone();
    let create = ["keys", "create", "support", "--scopes", "read", "--json"];
    let viewer: Value = serde_json::from_str(&run_with(&shell, admin.as_str().unwrap(), &create).1).unwrap();
    let mut viewer = browser_of(&shell.faena, viewer["key"].as_str().unwrap()).await;
    let html = viewer.text("/about").await;
    assert!(html.contains("To see the findings, log in with an API key") && !html.contains("counter-drift"), "{html}");
    assert!(html.contains("(this one)"), "every viewer sees the nodes: {html}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_rejected_event_is_named_by_the_beginning_of_its_id() {
    let folder = tempfile::tempdir().unwrap();
    let url = start_rejecting_receiver().await;
    let sink = format!("[[sink]]\nname = \"hook\"\nkind = \"webhook\"\nurl = \"{url}\"\ntypes = [\"job.created\"]\n");
    fs::write(folder.path().join("faena.toml"), format!("[webhook]\nallow = \"127.0.0.0/8\"\n{sink}")).unwrap();
    let faena = Faena::start(folder.path(), &[]).await;
    let shell = Shell { folder, faena };
    shell.faena.submit(json!({"name": "noop"})).await;
    shell.faena.submit(json!({"name": "noop"})).await;
    let ids = eventually("two rejected events", async || {
        let (_, found) = shell.faena.get("/api/v1/outbox/dead-letter").await;
        let ids = found["data"].as_array().unwrap().iter().map(|event| event["id"].as_str().unwrap().to_owned());
        let ids: Vec<String> = ids.collect();
        (ids.len() == 2).then_some(ids)
    })
    .await;
    let (first, second) = (&ids[0][..ids[0].len() - 2], &ids[1][..ids[1].len() - 2]);
    assert!(shell.stdout(&["outbox", "show", first]).contains(&ids[0]));
    assert_eq!(shell.stdout(&["outbox", "resolve", first]), format!("{} was resolved\n", ids[0]));
    assert_eq!(shell.stdout(&["outbox", "replay", second]), format!("{} was replayed\n", ids[1]));
    let (code, _, error) = shell.run(&["outbox", "show", "0000000"]);
    assert!(code != 0 && error.contains("no rejected event has an id that begins with \"0000000\""), "{error}");
    let (code, _, error) = shell.run(&["outbox", "show", &ids[0][..6]]);
    assert!(code != 0 && error.contains("several rejected events have an id"), "{error}");
}
