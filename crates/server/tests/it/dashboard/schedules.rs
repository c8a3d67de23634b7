//! Tests of creating and editing schedules in the dashboard.

use reqwest::StatusCode;
use serde_json::{Value, json};

use super::Browser;
use crate::{
    faena::{Faena, eventually},
    shell::Shell,
};

/// Returns the value of the hidden field with the entries that the form was filled with.
pub fn original(html: &str) -> String {
    let value = html.split("name=\"original\" value=\"").nth(1).unwrap().split('"').next().unwrap();
    value.replace("&#34;", "\"").replace("&#39;", "'").replace("&#60;", "<").replace("&#62;", ">").replace("&#38;", "&")
}

async fn create(faena: &Faena) -> String {
    let body = json!({
        "name": "nightly <b>", "description": "first\nsecond", "cronExpression": "30 2 * * *", "timezone": "Europe/Madrid",
        "startAt": "2026-01-01T00:00:00Z", "endAt": "2099-01-01T00:00:00Z", "except": ["2027-12-25", "0 0 1,15 * *"],
        "jobName": "Sync all", "jobType": "sync.customer", "queue": "sync", "jobPriority": "HIGH", "maxRetries": 7,
        "retryDelay": 5000, "timeoutMs": 90000, "webhookUrl": "https://example.com/hook", "concurrencyKey": "crm",
        "tags": ["eu", "crm"], "jobPayload": {"since": "{{due}}"}, "misfire": "catch_up", "misfireGraceMs": 120000,
        "catchUpLimit": 5, "overlap": "queue_one", "jitterMs": 30000, "maxRuns": 1000,
    });
    let (status, created) = faena.post("/api/v1/schedules", body).await;
    assert_eq!(status, StatusCode::CREATED, "{created}");
    created["id"].as_str().unwrap().to_owned()
}

/// Returns a schedule without the fields that every change affects.
async fn read(faena: &Faena, id: &str) -> Value {
    let (_, mut schedule) = faena.get(&format!("/api/v1/schedules/{id}")).await;
    for name in ["updatedAt", "explanation", "nextRunAt", "jobs"] {
        schedule.as_object_mut().unwrap().remove(name);
    }
    schedule
}

/// Returns the fields as a browser sends them.
fn sent<'a>(schedule: &[(&'a str, &'a str)], changes: &[(&'a str, &'a str)]) -> Vec<(&'a str, &'a str)> {
    let unchanged = schedule.iter().filter(|(name, _)| changes.iter().all(|(changed, _)| changed != name));
    unchanged.chain(changes).copied().collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_schedule_is_edited_and_only_what_changed_is_sent() {
    let shell = Shell::start(&[]).await;
    let id = create(&shell.faena).await;
    let mut browser = Browser::new(&shell.faena);
    let path = format!("/schedules/{id}/edit");
    let page = browser.text(&format!("/schedules/{id}")).await;
    for shown in [
        format!("href=\"{path}\""),
        "first\nsecond".into(),
        "2099-01-01".into(),
        "2027-12-25; 0 0 1,15 * *".into(),
        "<dt>When the clocks skip its time</dt><dd>right after</dd>".into(),
        "<dt>Runs</dt><dd>0 / 1,000</dd>".into(),
        "<dt>Maximum number of runs to catch up</dt><dd>5</dd>".into(),
        "<dt>Random delay per job, up to</dt><dd>30 s</dd>".into(),
    ] {
        assert!(page.contains(&shown), "{shown}: {page}");
    }
    let html = browser.text(&path).await;
    for shown in [
        "value=\"nightly &#60;b&#62;\"",
        "first\nsecond",
        "value=\"Europe/Madrid\"",
        "value=\"2026-01-01T00:00:00.000Z\"",
        "2027-12-25\n0 0 1,15 * *",
        "value=\"Sync all\"",
        "value=\"sync.customer\"",
        "value=\"5s\"",
        "value=\"90s\"",
        "value=\"HIGH\" selected",
        "value=\"catch_up\" selected",
        "value=\"queue_one\" selected",
        "value=\"eu, crm\"",
        "value=\"2m\"",
        "{{due}}",
        "At 02:30",
    ] {
        assert!(html.contains(shown), "{shown}: {html}");
    }
    let before = read(&shell.faena, &id).await;
    let original = original(&html);
    let entries: std::collections::BTreeMap<String, String> = serde_json::from_str(&original).unwrap();
    let mut fields: Vec<(&str, &str)> = entries.iter().map(|(name, text)| (name.as_str(), text.as_str())).collect();
    fields.push(("original", &original));

    let answer = browser.submit(&path, &fields).await;
    assert_eq!(answer.headers()["location"].to_str().unwrap(), format!("/schedules/{id}"));
    assert_eq!(read(&shell.faena, &id).await, before, "nothing was changed");

    // Another person changes the queue while the form is open.
    let url = format!("{}/api/v1/schedules/{id}", shell.faena.url);
    shell.faena.http.patch(&url).json(&json!({"queue": "other"})).send().await.unwrap();
    let changes =
        [("overlap", "skip"), ("jitterMs", ""), ("timezone", "America/Bogota"), ("dstGap", "skip"), ("webhookUrl", "")];
    browser.submit(&path, &sent(&fields, &changes)).await;
    let mut expected = before.clone();
    for (name, value) in [
        ("overlap", json!("skip")),
        ("jitterMs", json!(0)),
        ("timezone", json!("America/Bogota")),
        ("dstGap", json!("skip")),
        ("webhookUrl", Value::Null),
        ("queue", json!("other")),
    ] {
        expected[name] = value;
    }
    assert_eq!(read(&shell.faena, &id).await, expected);
    assert!(browser.text(&format!("/schedules/{id}")).await.contains("saved"));
}

#[tokio::test(flavor = "multi_thread")]
async fn errors_are_shown_at_the_form_which_keeps_what_was_typed() {
    let shell = Shell::start(&[]).await;
    let id = create(&shell.faena).await;
    let mut browser = Browser::new(&shell.faena);
    let path = format!("/schedules/{id}/edit");
    let original = original(&browser.text(&path).await);
    let rejected =
        [("name", "renamed"), ("cronExpression", "61 * * * *"), ("timezone", "Mars/Base"), ("original", &original)];
    let answer = browser.submit(&path, &rejected).await;
    assert_eq!(answer.status(), StatusCode::BAD_REQUEST);
    let html = answer.text().await.unwrap();
    for shown in [
        "value=\"renamed\"",
        "value=\"61 * * * *\"",
        "value=\"Mars/Base\"",
        "Cron expression: ",
        "Time zone: ",
        "aria-invalid",
    ] {
        assert!(html.contains(shown), "{shown}: {html}");
    }
    assert_eq!(self::original(&html), original, "what the person changed is still known");
    // What the form itself cannot read is rejected in the same way.
    let answer = browser.submit(&path, &[("jitterMs", "soon"), ("jobPayload", "{"), ("original", &original)]).await;
    let html = answer.text().await.unwrap();
    assert!(html.contains("Random delay per job, up to: must be a duration like 90s, 15m or 6h"), "{html}");
    assert!(html.contains("Payload (JSON): is not valid JSON"), "{html}");
    assert_eq!(read(&shell.faena, &id).await["name"], "nightly <b>", "nothing was changed");
    assert_eq!(browser.get("/schedules/none/edit").await.status(), StatusCode::NOT_FOUND);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_schedule_with_every_policy_is_created_in_the_browser() {
    let shell = Shell::start(&[]).await;
    let mut browser = Browser::new(&shell.faena);
    let fields = [
        ("name", "hourly"),
        ("cronExpression", ""),
        ("intervalMs", "90m"),
        ("timezone", "UTC"),
        ("jobName", "noop"),
        ("misfire", "skip"),
        ("overlap", "cancel_previous"),
        ("tags", "a, b"),
        ("maxRetries", "0"),
        ("jobPayload", "{\"a\": 1}"),
    ];
    let answer = browser.submit("/schedules/new", &fields).await;
    assert!(answer.status().is_redirection(), "{}", answer.text().await.unwrap());
    let (_, list) = shell.faena.get("/api/v1/schedules").await;
    let schedule = &list["schedules"][0];
    let shown =
        ["intervalMs", "misfire", "overlap", "tags", "maxRetries", "jobPayload", "queue"].map(|name| &schedule[name]);
    let expected = [
        json!(5_400_000),
        json!("skip"),
        json!("cancel_previous"),
        json!(["a", "b"]),
        json!(0),
        json!({"a": 1}),
        json!("default"),
    ];
    assert_eq!(shown, expected.each_ref());
}

#[tokio::test(flavor = "multi_thread")]
async fn spanish_pages_explain_schedules_in_spanish() {
    let shell = Shell::start(&[]).await;
    let body = json!({
        "name": "nightly", "cronExpression": "30 2 * * *", "timezone": "Europe/Madrid", "startAt": "2035-03-24T00:00:00Z",
        "except": ["2035-12-25"], "jobName": "noop",
    });
    let (_, created) = shell.faena.post("/api/v1/schedules", body).await;
    let id = created["id"].as_str().unwrap();
    let mut browser = Browser::new(&shell.faena);
    let explanations = [
        ("en", "At 02:30, except 2035-12-25 (Europe/Madrid)", "02:30 does not exist on this day; runs at 03:00"),
        (
            "es",
            "A las 02:30, excepto 2035-12-25 (Europe/Madrid)",
            "las 02:30 no existen ese día; se ejecuta a las 03:00",
        ),
    ];
    for (language, explanation, note) in explanations {
        browser.language = language;
        for path in ["/schedules".to_owned(), format!("/schedules/{id}"), format!("/schedules/{id}/edit")] {
            let html = browser.text(&path).await;
            assert!(html.contains(explanation) && !html.contains("lang=\"en\">"), "{path}: {html}");
            assert_eq!(html.contains(note), path != "/schedules", "{path}: {html}");
        }
    }
    let typed = "/schedules/explain?cronExpression=*/20+9-17+*+*+1-5&timezone=Europe/Madrid";
    assert!(
        browser.text(typed).await.contains("Cada 20 minutos de las horas 9-17, de lunes a viernes (Europe/Madrid)")
    );
    let typed = browser.text("/schedules/explain?intervalMs=90m").await;
    assert!(typed.contains("Cada 90 minutos desde"), "{typed}");
}

#[tokio::test(flavor = "multi_thread")]
async fn spanish_pages_say_in_spanish_why_a_schedule_has_ended() {
    let shell = Shell::start(&[]).await;
    let body = json!({"name": "once", "intervalMs": 1000, "maxRuns": 1, "jobName": "noop"});
    let (status, created) = shell.faena.post("/api/v1/schedules", body).await;
    assert_eq!(status, StatusCode::CREATED, "{created}");
    let id = created["id"].as_str().unwrap();
    let finished = eventually("the schedule ends", async || {
        let (_, schedule) = shell.faena.get(&format!("/api/v1/schedules/{id}")).await;
        schedule["finished"].as_str().map(str::to_owned)
    });
    assert_eq!(finished.await, "maxRuns reached: 1 of 1 runs");
    let mut browser = Browser::new(&shell.faena);
    browser.language = "es";
    let html = browser.text(&format!("/schedules/{id}")).await;
    assert!(html.contains("<dt>Terminada</dt><dd>se alcanzó el número máximo de ejecuciones: 1</dd>"), "{html}");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_form_lists_the_due_times_of_an_interval_as_it_was_created() {
    let shell = Shell::start(&[]).await;
    let body = json!({"name": "sweep", "intervalMs": 3_600_000, "jobName": "noop"});
    let (_, created) = shell.faena.post("/api/v1/schedules", body).await;
    let id = created["id"].as_str().unwrap();
    let (_, preview) = shell.faena.get(&format!("/api/v1/schedules/{id}/preview?count=5")).await;
    let local = preview["nextRuns"][4]["local"].as_str().unwrap();
    // The seconds show that the time is counted from the creation and not from the request.
    let fifth = format!("{} {}", &local[..10], &local[11..16]);
    let mut browser = Browser::new(&shell.faena);
    assert!(browser.text(&format!("/schedules/{id}/edit")).await.contains(&fifth), "{fifth}");
    let explained = browser.text(&format!("/schedules/explain?schedule={id}&intervalMs=1h&timezone=UTC")).await;
    assert!(explained.contains(&fifth), "{explained}");
    let changed = browser.text(&format!("/schedules/explain?schedule={id}&intervalMs=10h&timezone=UTC")).await;
    assert!(!changed.contains(&fifth) && changed.contains("Every 10 hours"), "{changed}");
}
