//! `/schedules`: triggers, past and future due times, and the metrics of schedules.

use axum::http::StatusCode;
use faena_domain::{
    JobLimits, Timestamp,
    schedule::{Schedule, ScheduleSpec},
};
use serde_json::{Value, json};

use crate::{
    app::{App, redacted},
    schedules::{PATH, create, patch, quiet},
};

#[tokio::test(flavor = "multi_thread")]
async fn a_schedule_can_be_triggered() {
    let app = App::start().await;
    let mut body = quiet();
    body["jobName"] = json!("noop");
    body["jobPriority"] = json!("HIGH");
    body["tags"] = json!(["night"]);
    body["isActive"] = json!(false);
    body["jobPayload"] = json!({"at": "{{due}}", "n": "{{run}}"});
    let id = create(&app, &body).await;
    let response = app.post(&format!("{PATH}/{id}/trigger"), "").await;
    let job = response.json()["jobId"].as_str().unwrap().to_owned();
    assert_eq!(
        (response.status, response.header("location")),
        (StatusCode::CREATED, format!("/api/v1/jobs/{job}").as_str())
    );
    let done = app.wait_for_state(&job, "COMPLETED").await;
    assert_eq!(
        (&done["priority"], &done["tags"], &done["scheduleId"]),
        (&json!("HIGH"), &json!(["night"]), &json!(id))
    );
    assert_eq!(done["payload"], json!({"at": done["scheduleDue"], "n": 1}));
    let shown = app.get(&format!("{PATH}/{id}")).await.json();
    assert_eq!(
        (&shown["jobs"][0]["id"], &shown["lastJobId"], &shown["runCount"]),
        (&json!(job), &json!(job), &json!(0))
    );
    assert_eq!(shown["isActive"], false, "it stays disabled");
    let ticks = app.get(&format!("{PATH}/{id}/ticks")).await;
    insta::assert_snapshot!(redacted(&ticks.json()), @r#"
    {
      "limit": 20,
      "page": 1,
      "ticks": [
        {
          "at": "<time>",
          "count": 1,
          "dueAt": "<time>",
          "jobId": "<id 1>",
          "outcome": "triggered",
          "scheduleId": "<id 2>"
        }
      ],
      "total": 1,
      "totalPages": 1
    }
    "#);
    let before = ticks.json()["ticks"][0]["dueAt"].as_str().unwrap().to_owned();
    assert_eq!(app.get(&format!("{PATH}/{id}/ticks?limit=5&before={before}")).await.json()["ticks"], json!([]));
    insta::assert_snapshot!(app.get(&format!("{PATH}/{id}/ticks?limit=0&before=now&after=1")).await.error_snapshot(), @r"
    400 VALIDATION_ERROR: 3 fields are not valid
    limit: must be a number from 1 to 100
    before: must be a time like 2026-11-15T20:00:00Z, a date, or milliseconds since 1970
    after: unknown parameter
    ");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_due_time_creates_one_job_and_a_record() {
    let app = App::start().await;
    let body = json!({"name": "tick", "intervalMs": 1_000, "maxRuns": 2, "jobName": "noop", "jobPayload": {"due": "{{due}}", "ms": "{{due.ms}}"}});
    let id = create(&app, &body).await;
    let began = std::time::Instant::now();
    let shown = loop {
        let shown = app.get(&format!("{PATH}/{id}")).await.json();
        if shown["isActive"] == false {
            break shown;
        }
        assert!(began.elapsed().as_secs() < 60, "{shown:#}");
        tokio::time::sleep(std::time::Duration::from_millis(20)).await;
    };
    assert_eq!((&shown["runCount"], &shown["finished"]), (&json!(2), &json!("maxRuns reached: 2 of 2 runs")));
    let ticks = app.get(&format!("{PATH}/{id}/ticks")).await.json();
    let jobs = shown["jobs"].as_array().unwrap();
    assert_eq!(jobs.len(), 2, "{shown:#}");
    for (job, tick) in jobs.iter().zip(ticks["ticks"].as_array().unwrap()) {
        assert_eq!((&tick["jobId"], &tick["outcome"]), (&job["id"], &json!("fired")));
        assert_eq!((&job["scheduleDue"], &job["payload"]["due"]), (&tick["dueAt"], &tick["dueAt"]));
        assert!(job["payload"]["ms"].is_u64(), "{job:#}");
    }
    let again = app.post(&format!("{PATH}/{id}/enable"), "").await;
    let errors = again.json()["error"]["details"].clone();
    assert_eq!(errors[0]["path"], "maxRuns", "{}", again.text);
    assert!(errors[0]["message"].as_str().unwrap().starts_with("must be greater than 2, "), "{}", again.text);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_schedule_is_disabled_and_enabled() {
    let app = App::start().await;
    let id = create(&app, &quiet()).await;
    let off = app.post(&format!("{PATH}/{id}/disable"), "").await.json();
    assert_eq!((&off["isActive"], &off["nextRunAt"]), (&json!(false), &Value::Null));
    let on = app.post(&format!("{PATH}/{id}/enable"), "").await.json();
    assert_eq!((&on["isActive"], &on["nextRunAt"]), (&json!(true), &json!("2035-03-24T01:30:00.000Z")));
    let audit = app.get(&format!("/api/v1/audit?target={id}")).await.json();
    let actions: Vec<&str> =
        audit["entries"].as_array().unwrap().iter().map(|entry| entry["action"].as_str().unwrap()).collect();
    assert_eq!(actions, ["schedule.enable", "schedule.disable", "schedule.create"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_next_runs_are_shown_with_a_note_where_daylight_saving_applies() {
    let app = App::start().await;
    let id = create(&app, &quiet()).await;
    let preview = app.get(&format!("{PATH}/{id}/preview?count=3")).await;
    insta::assert_snapshot!(serde_json::to_string_pretty(&preview.json()).unwrap(), @r##"
    {
      "explanation": "At 02:30 (Europe/Madrid)",
      "nextRuns": [
        {
          "at": "2035-03-24T01:30:00.000Z",
          "local": "2035-03-24T02:30:00+01:00"
        },
        {
          "at": "2035-03-25T01:00:00.000Z",
          "local": "2035-03-25T03:00:00+02:00",
          "note": "02:30 does not exist on this day; runs at 03:00",
          "notes": [
            {
              "code": "moved",
              "from": "02:30",
              "to": "03:00"
            }
          ]
        },
        {
          "at": "2035-03-26T00:30:00.000Z",
          "local": "2035-03-26T02:30:00+02:00"
        }
      ],
      "timezone": "Europe/Madrid"
    }
    "##);
    assert_eq!(app.get(&format!("{PATH}/{id}/next-runs?count=3")).await.json(), preview.json());
    assert_eq!(app.get(&format!("{PATH}/{id}/preview")).await.json()["nextRuns"].as_array().unwrap().len(), 10);
    patch(&app, &id, json!({"dstGap": "skip"})).await;
    let skipped = app.get(&format!("{PATH}/{id}/preview?count=2")).await.json();
    assert_eq!(skipped["nextRuns"][1]["at"], "2035-03-26T00:30:00.000Z", "{skipped:#}");
    insta::assert_snapshot!(app.get(&format!("{PATH}/{id}/preview?count=1001&x=1")).await.error_snapshot(), @r"
    400 VALIDATION_ERROR: 2 fields are not valid
    count: must be a number from 1 to 1000
    x: unknown parameter
    ");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_schedule_is_validated_without_storing_it() {
    let app = App::start().await;
    let response = app.post(&format!("{PATH}/validate"), quiet().to_string()).await;
    let valid = response.json();
    assert_eq!(response.status, StatusCode::OK, "{}", response.text);
    assert_eq!(
        (&valid["valid"], &valid["explanation"], &valid["timezone"]),
        (&json!(true), &json!("At 02:30 (Europe/Madrid)"), &json!("Europe/Madrid"))
    );
    assert_eq!(valid["nextRuns"].as_array().unwrap().len(), 10);
    assert_eq!(valid["nextRuns"][0], json!({"at": "2035-03-24T01:30:00.000Z", "local": "2035-03-24T02:30:00+01:00"}));
    assert_eq!(app.get(PATH).await.json()["total"], 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_schedule_with_an_unknown_time_zone_is_shown_with_the_reason_and_can_be_repaired() {
    let app = App::start().await;
    let now = Timestamp::now();
    let mut spec = ScheduleSpec { name: "old".into(), ..ScheduleSpec::default() };
    spec.job.kind = "noop".into();
    spec.timing.interval_ms = Some(3_600_000);
    let mut schedule = Schedule::new(spec, &JobLimits::default(), now).ok().unwrap().schedule;
    schedule.spec.timing.timezone = "Mars/Olympus".into();
    let id = schedule.id.to_string();
    app.engine.store.schedule_create(schedule, "test", now).await.unwrap();

    let why = "its timing is no longer valid: timezone: unknown time zone \"Mars/Olympus\"";
    let shown = app.get(&format!("{PATH}/{id}")).await.json();
    assert!(shown["explanation"].as_str().unwrap().starts_with(why), "{shown:#}");
    assert_eq!(app.get(PATH).await.json()["total"], 1);
    let preview = app.get(&format!("{PATH}/{id}/preview")).await.json();
    assert!(preview["explanation"].as_str().unwrap().starts_with(why), "{preview:#}");
    assert_eq!(preview["nextRuns"], json!([]));
    assert_eq!(app.post(&format!("{PATH}/{id}/trigger"), "").await.status, StatusCode::BAD_REQUEST);

    let repaired = patch(&app, &id, json!({"timezone": "UTC", "isActive": true})).await.json();
    assert!(repaired["nextRunAt"].is_string(), "{repaired:#}");
}

#[tokio::test(flavor = "multi_thread")]
async fn schedules_are_counted() {
    let app = App::start().await;
    let id = create(&app, &quiet()).await;
    create(&app, &json!({"name": "off", "intervalMs": 5_000, "jobName": "noop", "isActive": false})).await;
    app.post(&format!("{PATH}/{id}/trigger"), "").await;
    let text = app.get("/metrics").await.text;
    let mut lines: Vec<&str> =
        text.lines().filter(|line| line.starts_with("faena_schedule") && !line.starts_with('#')).collect();
    lines.sort_unstable();
    insta::assert_snapshot!(lines.join("\n"), @r##"
    faena_schedule_late_seconds 0.0
    faena_schedule_overdue_seconds 0.0
    faena_schedule_ticks_total{outcome="fired"} 0
    faena_schedule_ticks_total{outcome="missed"} 0
    faena_schedule_ticks_total{outcome="skipped"} 0
    faena_schedule_ticks_total{outcome="triggered"} 1
    faena_schedules{state="active"} 1
    faena_schedules{state="inactive"} 1
    "##);
}
