//! `/schedules`: manages schedules.

use axum::http::StatusCode;
use serde_json::{Value, json};

use crate::app::{App, TestResponse};

pub const PATH: &str = "/api/v1/schedules";

/// A future time, close to a change of the clocks in Madrid: on the 25th, 02:00 is followed by 03:00.
const BEFORE_THE_GAP: &str = "2035-03-23T12:00:00Z";

pub async fn create(app: &App, body: &Value) -> String {
    let response = app.post(PATH, body.to_string()).await;
    assert_eq!(response.status, StatusCode::CREATED, "{}", response.text);
    response.json()["id"].as_str().unwrap().to_owned()
}

/// A schedule that is not due while the test runs.
pub fn quiet() -> Value {
    json!({"name": "nightly", "cronExpression": "30 2 * * *", "timezone": "Europe/Madrid", "startAt": BEFORE_THE_GAP,
        "jobName": "report", "jobPayload": {"day": "{{due.date}}"}})
}

pub async fn patch(app: &App, id: &str, body: Value) -> TestResponse {
    app.call("PATCH", &format!("{PATH}/{id}"), body.to_string()).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_schedule_is_created_shown_and_listed() {
    let app = App::start().await;
    let response = app.post(PATH, quiet().to_string()).await;
    let id = response.json()["id"].as_str().unwrap().to_owned();
    assert_eq!(response.header("location"), format!("{PATH}/{id}"));
    insta::assert_snapshot!(response.snapshot(), @r#"
    201 Created
    {
      "id": "<id 1>",
      "name": "nightly",
      "nextRunAt": "<time>"
    }
    "#);
    assert_eq!(response.json()["nextRunAt"], "2035-03-24T01:30:00.000Z");
    let shown = app.get(&format!("{PATH}/{id}")).await;
    insta::assert_snapshot!(shown.snapshot(), @r#"
    200 OK
    {
      "backoffMultiplier": 2.0,
      "catchUpLimit": 100,
      "concurrencyKey": null,
      "createdAt": "<time>",
      "cronExpression": "30 2 * * *",
      "description": null,
      "dstGap": "next",
      "dstOverlap": "first",
      "endAt": null,
      "except": [],
      "explanation": "At 02:30 (Europe/Madrid)",
      "finished": null,
      "id": "<id 1>",
      "intervalMs": null,
      "isActive": true,
      "jitterMs": 0,
      "jobName": "report",
      "jobPayload": {
        "day": "{{due.date}}"
      },
      "jobPriority": "NORMAL",
      "jobType": "report",
      "jobs": [],
      "lastDueAt": null,
      "lastJobId": null,
      "lastRunAt": null,
      "maxDelay": 60000,
      "maxRetries": 3,
      "maxRuns": null,
      "misfire": "run_once",
      "misfireGraceMs": 60000,
      "name": "nightly",
      "nextRunAt": "<time>",
      "overlap": "allow",
      "queue": "default",
      "retryDelay": 1000,
      "retryOn": "all",
      "runCount": 0,
      "startAt": "<time>",
      "tags": [],
      "timeoutMs": null,
      "timezone": "Europe/Madrid",
      "updatedAt": "<time>",
      "webhookUrl": null
    }
    "#);
    let list = app.get(PATH).await;
    let mut listed = shown.json();
    listed.as_object_mut().unwrap().remove("jobs");
    let expected = json!({"schedules": [listed], "total": 1, "page": 1, "limit": 20, "totalPages": 1});
    assert_eq!(list.json(), expected);
    assert_eq!((list.header("x-total-count"), list.header("x-total-pages"), list.header("x-page")), ("1", "1", "1"));
}

#[tokio::test(flavor = "multi_thread")]
async fn every_setting_is_stored() {
    let app = App::start().await;
    let body = json!({
        "name": "all", "description": "two\nlines", "intervalMs": 90_000, "timezone": "America/New_York",
        "dstGap": "skip", "dstOverlap": "both", "startAt": "2035-01-01T00:00:00.000Z", "endAt": "2035-02-01T00:00:00.000Z",
        "except": ["2035-01-02", "2035-01-05/2035-01-07"], "jobName": "The report", "jobType": "report",
        "jobPayload": {"n": 12_345_678_901_234_567_u64, "due": "{{due}}"}, "jobPriority": "HIGH", "queue": "reports", "maxRetries": 5,
        "retryDelay": 500, "backoffMultiplier": 1.5, "maxDelay": 7_000, "retryDelays": [100, 200], "retryOn": ["time*out"],
        "timeoutMs": 60_000, "webhookUrl": "https://example.org/hook", "concurrencyKey": "acme", "tags": ["a", "b"],
        "misfire": "catch_up", "misfireGraceMs": 5_000, "catchUpLimit": 7, "overlap": "queue_one", "jitterMs": 250,
        "maxRuns": 9, "isActive": false,
    });
    let id = create(&app, &body).await;
    let shown = app.get(&format!("{PATH}/{id}")).await.json();
    for (name, value) in body.as_object().unwrap() {
        assert_eq!(&shown[name], value, "{name}");
    }
    assert_eq!(shown["nextRunAt"], Value::Null, "it is not active");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_list_can_be_filtered_and_paged() {
    let app = App::start().await;
    for (name, active) in [("backup", true), ("report daily", false), ("Report weekly", true)] {
        create(&app, &json!({"name": name, "intervalMs": 3_600_000, "jobName": "noop", "isActive": active})).await;
    }
    for (query, expected) in [
        ("", vec!["Report weekly", "backup", "report daily"]),
        ("isActive=true", vec!["Report weekly", "backup"]),
        ("enabled=false", vec!["report daily"]),
        ("q=REPORT&limit=1&page=2", vec!["report daily"]),
        ("name=backup", vec!["backup"]),
        ("name=back", vec![]),
    ] {
        let list = app.get(&format!("{PATH}?{query}")).await.json();
        let mut names: Vec<&str> =
            list["schedules"].as_array().unwrap().iter().map(|schedule| schedule["name"].as_str().unwrap()).collect();
        names.sort_unstable();
        assert_eq!(names, expected, "{query}: {list:#}");
    }
    let errors =
        app.get(&format!("{PATH}?isActive=maybe&limit=101&page=0&q=+&sort=name&limit=1")).await.error_snapshot();
    insta::assert_snapshot!(errors, @r"
    400 VALIDATION_ERROR: 6 fields are not valid
    isActive: must be true or false
    limit: must be a number from 1 to 100
    page: must be a number from 1 to 1000000
    q: must not be empty
    sort: unknown parameter
    limit: must be given only once
    ");
}

#[tokio::test(flavor = "multi_thread")]
async fn only_the_given_fields_change_and_null_removes_a_value() {
    let app = App::start().await;
    let mut body = quiet();
    body["description"] = json!("for Ada");
    body["endAt"] = json!("2036-01-01T00:00:00.000Z");
    body["maxRetries"] = json!(7);
    body["webhookUrl"] = json!("https://example.org/hook");
    let id = create(&app, &body).await;
    let before = app.get(&format!("{PATH}/{id}")).await.json();

    let changed = patch(&app, &id, json!({"cronExpr": "0 4 * * *", "jobPriority": "LOW", "tags": ["x"]})).await;
    assert_eq!(changed.status, StatusCode::OK, "{}", changed.text);
    let mut expected = before.clone();
    for (name, value) in [
        ("cronExpression", json!("0 4 * * *")),
        ("explanation", json!("At 04:00 (Europe/Madrid)")),
        ("jobPriority", json!("LOW")),
        ("tags", json!(["x"])),
        ("nextRunAt", json!("2035-03-24T03:00:00.000Z")),
        ("updatedAt", changed.json()["updatedAt"].clone()),
    ] {
        expected[name] = value;
    }
    expected.as_object_mut().unwrap().remove("jobs");
    assert_eq!(changed.json(), expected);

    let cleared = json!({"description": null, "endAt": null, "maxRetries": null, "webhookUrl": null, "timezone": null, "jobPayload": null, "tags": null});
    let cleared = patch(&app, &id, cleared).await.json();
    let field = |name: &str| cleared[name].clone();
    assert_eq!(
        [
            field("description"),
            field("endAt"),
            field("maxRetries"),
            field("webhookUrl"),
            field("timezone"),
            field("jobPayload"),
            field("tags")
        ],
        [Value::Null, Value::Null, json!(3), Value::Null, json!("UTC"), json!({}), json!([])]
    );
    assert_eq!(cleared["nextRunAt"], "2035-03-24T04:00:00.000Z", "in another time zone: {cleared:#}");

    let every = patch(&app, &id, json!({"cronExpression": null, "intervalMs": 60_000})).await.json();
    assert_eq!((&every["cronExpression"], &every["intervalMs"]), (&Value::Null, &json!(60_000)));
    let off = patch(&app, &id, json!({"isActive": false})).await.json();
    assert_eq!((&off["isActive"], &off["nextRunAt"]), (&json!(false), &Value::Null));
}

#[tokio::test(flavor = "multi_thread")]
async fn an_invalid_change_changes_nothing() {
    let app = App::start().await;
    let id = create(&app, &quiet()).await;
    let before = app.get(&format!("{PATH}/{id}")).await.json();
    let both = patch(&app, &id, json!({"intervalMs": 5_000, "queue": 7, "maxRetries": 11})).await;
    insta::assert_snapshot!(both.error_snapshot(), @r"
    400 VALIDATION_ERROR: 3 fields are not valid
    queue: must be a string
    cronExpression: cannot be combined with intervalMs; set one of them (to switch, set the other to null)
    maxRetries: must be between 0 and 10, got 11
    ");
    insta::assert_snapshot!(patch(&app, &id, json!({})).await.error_snapshot(), @r"
    400 VALIDATION_ERROR: body: nothing to change; set at least one field
    body: nothing to change; set at least one field
    ");
    insta::assert_snapshot!(patch(&app, &id, json!({"name": null, "cron": "@daily"})).await.error_snapshot(), @r"
    400 VALIDATION_ERROR: 2 fields are not valid
    name: is required
    cron: unknown field
    ");
    assert_eq!(app.get(&format!("{PATH}/{id}")).await.json(), before);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_new_job_name_does_not_change_the_type() {
    let app = App::start().await;
    let id = create(&app, &quiet()).await;
    for (body, name, kind) in [
        (json!({"jobName": "The report"}), "The report", "report"),
        (json!({"jobType": "report.v2"}), "The report", "report.v2"),
        (json!({"jobName": null}), "report.v2", "report.v2"),
        (json!({"jobName": "noop", "jobType": null}), "noop", "noop"),
    ] {
        let shown = patch(&app, &id, body).await.json();
        assert_eq!((&shown["jobName"], &shown["jobType"]), (&json!(name), &json!(kind)));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn aliases_of_fields_are_accepted_and_must_not_differ() {
    let app = App::start().await;
    let id = create(&app, &json!({"name": "x", "cronExpr": "@daily", "enabled": false, "jobName": "noop"})).await;
    let shown = app.get(&format!("{PATH}/{id}")).await.json();
    assert_eq!((&shown["cronExpression"], &shown["isActive"]), (&json!("@daily"), &json!(false)));
    let same = json!({"name": "x", "cronExpr": "@daily", "cronExpression": "@daily", "enabled": true, "isActive": true, "jobName": "noop"});
    create(&app, &same).await;
    let other = json!({"name": "x", "cronExpr": "@hourly", "cronExpression": "@daily", "enabled": true, "isActive": false, "jobName": "noop"});
    insta::assert_snapshot!(app.post(PATH, other.to_string()).await.error_snapshot(), @r"
    400 VALIDATION_ERROR: 2 fields are not valid
    cronExpr: differs from cronExpression; set only one of them
    enabled: differs from isActive; set only one of them
    ");
}

/// Returns a schedule with a name, a job and these fields.
fn schedule(fields: Value) -> Value {
    let mut body = json!({"name": "x", "jobName": "noop"});
    body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    body
}

fn invalid_schedules() -> Vec<Value> {
    vec![
        json!({}),
        schedule(json!({})),
        schedule(json!({"cronExpression": "@daily", "intervalMs": 5_000})),
        schedule(json!({"cronExpression": "61 2 * * *"})),
        schedule(json!({"cronExpression": "0 0 * *"})),
        schedule(json!({"cronExpression": "0 0 30 2 *"})),
        schedule(json!({"cronExpression": 5})),
        schedule(json!({"cronExpression": "@daily", "timezone": "Europe/Madird"})),
        schedule(json!({"intervalMs": 999})),
        schedule(json!({"intervalMs": "5s"})),
        schedule(json!({"intervalMs": 5_000, "startAt": "2035-01-02T00:00:00Z", "endAt": "2035-01-01T00:00:00Z"})),
        schedule(json!({"intervalMs": 5_000, "jobPayload": {"a": "{{due.day}}"}})),
        schedule(json!({"intervalMs": 5_000, "jobPayload": [1]})),
        schedule(json!({"intervalMs": 5_000, "except": ["2035-13-01", "* * *"]})),
        schedule(json!({"intervalMs": 5_000, "webhookUrl": "http://127.0.0.1/"})),
        schedule(
            json!({"intervalMs": 5_000, "misfire": "never", "overlap": true, "dstGap": "both", "dstOverlap": "next",
            "misfireGraceMs": 0, "catchUpLimit": 0, "jitterMs": 99_999_999_999_u64, "maxRuns": 0, "jobPriority": "URGENT",
            "timeoutMs": 0, "maxRetries": 99, "isActive": "yes", "cron": "@daily"}),
        ),
        json!({"name": "x", "jobName": "", "intervalMs": 5_000}),
        json!({"name": "x", "jobType": 7, "intervalMs": 5_000}),
    ]
}

#[tokio::test(flavor = "multi_thread")]
async fn every_invalid_field_is_reported_and_nothing_is_stored() {
    let app = App::start().await;
    let mut text = String::new();
    for body in invalid_schedules() {
        let response = app.post(PATH, body.to_string()).await;
        let validated = app.post(&format!("{PATH}/validate"), body.to_string()).await;
        assert_eq!(response.error_snapshot(), validated.error_snapshot(), "validate reports the same errors");
        let errors = response.error_snapshot();
        let (head, details) = errors.split_once('\n').unwrap();
        assert!(head.starts_with("400 VALIDATION_ERROR: "), "{head}");
        text.push_str(&format!("{body}\n{details}\n\n"));
    }
    insta::assert_snapshot!(text, @r##"
    {}
    name: is required
    jobName: is required unless jobType is set
    cronExpression: is missing; set cronExpression or intervalMs

    {"jobName":"noop","name":"x"}
    cronExpression: is missing; set cronExpression or intervalMs

    {"cronExpression":"@daily","intervalMs":5000,"jobName":"noop","name":"x"}
    cronExpression: cannot be combined with intervalMs; set one of them (to switch, set the other to null)

    {"cronExpression":"61 2 * * *","jobName":"noop","name":"x"}
    cronExpression: invalid minute field (1 of 5, position 1): "61" is not between 0 and 59; allowed: 0-59, *, lists (1,3), ranges (1-5) and steps (*/2); read as: minute 61, hour 2, every day of month, every month, every day of week

    {"cronExpression":"0 0 * *","jobName":"noop","name":"x"}
    cronExpression: has 4 fields but needs 5: minute, hour, day of month, month, day of week, or 6 with the second first; read as: minute 0, hour 0, every day of month, every month

    {"cronExpression":"0 0 30 2 *","jobName":"noop","name":"x"}
    cronExpression: never fires: no date matches; read as: At 00:00, on day 30, in February

    {"cronExpression":5,"jobName":"noop","name":"x"}
    cronExpression: must be a string

    {"cronExpression":"@daily","jobName":"noop","name":"x","timezone":"Europe/Madird"}
    timezone: unknown time zone "Europe/Madird"; did you mean "Europe/Madrid"?

    {"intervalMs":999,"jobName":"noop","name":"x"}
    intervalMs: must be between 1000 (1 s) and 315360000000 (10 years), got 999

    {"intervalMs":"5s","jobName":"noop","name":"x"}
    intervalMs: must be a non-negative integer

    {"endAt":"2035-01-01T00:00:00Z","intervalMs":5000,"jobName":"noop","name":"x","startAt":"2035-01-02T00:00:00Z"}
    endAt: must be later than startAt (<time>), is <time>

    {"intervalMs":5000,"jobName":"noop","jobPayload":{"a":"{{due.day}}"},"name":"x"}
    jobPayload: unknown placeholder "{{due.day}}"; use {{due}} or {{previous}}, each also with .local, .date, .time, .ms or .unix, or {{schedule.id}}, {{schedule.name}}, {{timezone}} or {{run}}

    {"intervalMs":5000,"jobName":"noop","jobPayload":[1],"name":"x"}
    jobPayload: must be a JSON object

    {"except":["2035-13-01","* * *"],"intervalMs":5000,"jobName":"noop","name":"x"}
    except[0]: "2035-13-01" is not a blackout; use a day (2026-12-25), days (2026-12-24/2026-12-26), times (2026-12-24T18:00/2026-12-26T08:00) or a cron expression with 5 fields (* 22-23 * * *)
    except[1]: has 3 fields but needs 5: minute, hour, day of month, month, day of week; read as: every minute, every hour, every day of month

    {"intervalMs":5000,"jobName":"noop","name":"x","webhookUrl":"http://127.0.0.1/"}
    webhookUrl: "127.0.0.1" is a private or reserved address; allow its network with FAENA_WEBHOOK_ALLOW

    {"catchUpLimit":0,"cron":"@daily","dstGap":"both","dstOverlap":"next","intervalMs":5000,"isActive":"yes","jitterMs":99999999999,"jobName":"noop","jobPriority":"URGENT","maxRetries":99,"maxRuns":0,"misfire":"never","misfireGraceMs":0,"name":"x","overlap":true,"timeoutMs":0}
    dstGap: must be next or skip
    dstOverlap: must be first or both
    jobPriority: must be LOW, NORMAL, HIGH or CRITICAL
    misfire: must be run_once, skip or catch_up
    overlap: must be allow, skip, queue_one or cancel_previous
    isActive: must be true or false
    cron: unknown field
    misfireGraceMs: must be between 1000 and 86400000, got 0
    catchUpLimit: must be between 1 and 10000, got 0
    jitterMs: must be between 0 and 86400000, got 99999999999
    maxRuns: must be between 1 and 9223372036854775807, got 0
    maxRetries: must be between 0 and 10, got 99
    timeoutMs: must be between 1 and 2592000000, got 0

    {"intervalMs":5000,"jobName":"","name":"x"}
    jobName: is required unless jobType is set

    {"intervalMs":5000,"jobType":7,"name":"x"}
    jobType: must be a string
    "##);
    let ended =
        app.post(PATH, schedule(json!({"intervalMs": 5_000, "endAt": "2020-01-01T00:00:00Z"})).to_string()).await;
    assert!(ended.error_snapshot().contains("\nendAt: never fires: the first due time, "), "{}", ended.text);
    assert_eq!(app.get(PATH).await.json()["total"], 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unknown_schedule_is_not_found() {
    let app = App::start().await;
    for id in ["0197a1b2-0000-7000-8000-000000000000", "nightly"] {
        for (method, rest) in [
            ("GET", ""),
            ("PATCH", ""),
            ("DELETE", ""),
            ("POST", "/trigger"),
            ("POST", "/enable"),
            ("POST", "/disable"),
            ("GET", "/preview"),
            ("GET", "/next-runs"),
            ("GET", "/ticks"),
        ] {
            let body = if method == "PATCH" { r#"{"isActive": true}"# } else { "" };
            let response = app.call(method, &format!("{PATH}/{id}{rest}"), body).await;
            assert_eq!(response.status, StatusCode::NOT_FOUND, "{method} {id}{rest}: {}", response.text);
            assert_eq!(response.json()["error"]["message"], format!("no schedule \"{id}\""));
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_schedule_is_deleted_and_its_jobs_stay() {
    let app = App::start().await;
    let id = create(&app, &quiet()).await;
    let job = app.post(&format!("{PATH}/{id}/trigger"), "").await.json()["jobId"].as_str().unwrap().to_owned();
    let deleted = app.call("DELETE", &format!("{PATH}/{id}"), "").await;
    assert_eq!((deleted.status, deleted.json()), (StatusCode::OK, json!({"success": true})));
    assert_eq!(app.call("DELETE", &format!("{PATH}/{id}"), "").await.status, StatusCode::NOT_FOUND);
    assert_eq!(app.job(&job).await["scheduleId"], id);
    let audit = app.get(&format!("/api/v1/audit?target={id}")).await.json();
    let actions: Vec<&str> =
        audit["entries"].as_array().unwrap().iter().map(|entry| entry["action"].as_str().unwrap()).collect();
    assert_eq!(actions, ["schedule.delete", "schedule.trigger", "schedule.create"]);
}
