//! Tests of `faena.v1.ScheduleService`.

use faena_wire::v1::{
    CreateScheduleRequest, DeleteScheduleRequest, GetScheduleRequest, ListScheduleTicksRequest, ListSchedulesRequest,
    PreviewScheduleRequest, RetryOn, RetryPolicy, Schedule, ScheduleSpec, SetScheduleActiveRequest, TickOutcome,
    TriggerScheduleRequest, UpdateScheduleRequest, ValidateScheduleRequest,
    schedule_service_client::ScheduleServiceClient,
};
use serde_json::{Value, json};
use tonic::Code;

use crate::{app::App, schedules::PATH};

fn client(app: &App) -> ScheduleServiceClient<axum::Router> {
    ScheduleServiceClient::with_origin(app.router.clone(), axum::http::Uri::from_static("http://127.0.0.1:3000"))
}

/// Returns a schedule that is not due during a test.
fn quiet() -> ScheduleSpec {
    ScheduleSpec {
        name: Some("nightly".into()),
        cron_expression: Some("30 2 * * *".into()),
        timezone: Some("Europe/Madrid".into()),
        // 2035-03-23T12:00:00Z
        start_at: Some(prost_types::Timestamp { seconds: 2_058_264_000, nanos: 0 }),
        job_name: Some("noop".into()),
        job_payload_json: r#"{"big": 12345678901234567890123, "due": "{{due}}"}"#.into(),
        except: vec!["2035-12-25".into()],
        retry_policy: Some(RetryPolicy { retry_on: RetryOn::Transient.into(), ..RetryPolicy::default() }),
        ..ScheduleSpec::default()
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_schedule_is_managed_over_grpc() {
    let app = App::start().await;
    let mut client = client(&app);
    let created = client.create_schedule(CreateScheduleRequest { schedule: Some(quiet()) }).await.unwrap();
    let created: Schedule = created.into_inner().schedule.unwrap();
    assert_eq!(created.explanation, "At 02:30, except 2035-12-25 (Europe/Madrid)");
    let id = created.id.clone();
    let shown: Value = app.get(&format!("{PATH}/{id}")).await.json();
    assert_eq!((&shown["except"], &shown["retryOn"]), (&json!(["2035-12-25"]), &json!("transient")));
    assert!(app.get(&format!("{PATH}/{id}")).await.text.contains("12345678901234567890123"), "unchanged");

    let list = ListSchedulesRequest { is_active: Some(true), query: Some("NIGHT".into()), ..Default::default() };
    let list = client.list_schedules(list).await.unwrap().into_inner();
    assert_eq!((list.total_size, list.schedules[0].id.as_str()), (1, id.as_str()));

    let change = ScheduleSpec { cron_expression: Some("0 4 * * *".into()), max_runs: Some(3), ..Default::default() };
    let paths = ["cron_expression", "max_runs", "except", "job_payload_json"].map(str::to_owned);
    let change = UpdateScheduleRequest {
        id: id.clone(),
        schedule: Some(change),
        update_mask: Some(prost_types::FieldMask { paths: paths.to_vec() }),
    };
    let changed = client.update_schedule(change).await.unwrap().into_inner();
    let spec = changed.schedule.unwrap().spec.unwrap();
    assert_eq!((spec.cron_expression.as_deref(), spec.max_runs, spec.except.len()), (Some("0 4 * * *"), Some(3), 0));
    assert_eq!((spec.job_payload_json.as_str(), spec.name.as_deref()), ("{}", Some("nightly")));

    let preview = PreviewScheduleRequest { id: id.clone(), count: Some(5) };
    let preview = client.preview_schedule(preview).await.unwrap().into_inner();
    assert_eq!(preview.runs.len(), 3, "it may run three times: {preview:?}");
    assert_eq!(preview.runs[0].local, "2035-03-24T04:00:00+01:00");

    let disable = SetScheduleActiveRequest { id: id.clone(), is_active: false };
    let disabled = client.set_schedule_active(disable).await.unwrap().into_inner().schedule.unwrap();
    assert_eq!((disabled.next_run_at, disabled.spec.unwrap().is_active), (None, Some(false)));

    let triggered = client.trigger_schedule(TriggerScheduleRequest { id: id.clone() }).await.unwrap();
    let job = triggered.into_inner().job_id;
    app.wait_for_state(&job, "COMPLETED").await;
    let get = GetScheduleRequest { id: id.clone() };
    let schedule = client.get_schedule(get.clone()).await.unwrap().into_inner().schedule.unwrap();
    let latest = &schedule.jobs[0];
    assert_eq!((latest.id.as_str(), latest.schedule_id.as_deref()), (job.as_str(), Some(id.as_str())));
    let ticks = ListScheduleTicksRequest { id: id.clone(), ..Default::default() };
    let ticks = client.list_schedule_ticks(ticks).await.unwrap().into_inner().ticks;
    assert_eq!((ticks[0].outcome(), ticks[0].job_id.as_deref()), (TickOutcome::Triggered, Some(job.as_str())));
    assert_eq!(latest.schedule_due, ticks[0].due_at);

    client.delete_schedule(DeleteScheduleRequest { id: id.clone() }).await.unwrap();
    assert_eq!(client.get_schedule(get).await.unwrap_err().code(), Code::NotFound);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_rules_of_the_http_api_apply() {
    let app = App::start().await;
    let mut client = client(&app);
    let valid =
        client.validate_schedule(ValidateScheduleRequest { schedule: Some(quiet()) }).await.unwrap().into_inner();
    assert_eq!((valid.next_runs.len(), valid.timezone.as_str()), (10, "Europe/Madrid"));
    assert_eq!(app.get(PATH).await.json()["total"], 0);
    let wrong = ScheduleSpec {
        interval: Some(prost_types::Duration { seconds: 5, nanos: 0 }),
        job_payload_json: "no json".into(),
        ..quiet()
    };
    let rejected = client.create_schedule(CreateScheduleRequest { schedule: Some(wrong) }).await.unwrap_err();
    assert_eq!(rejected.code(), Code::InvalidArgument);
    assert_eq!(rejected.metadata().get("x-error-code").unwrap(), "VALIDATION_ERROR");
    assert_eq!(
        rejected.message(),
        "2 fields are not valid; jobPayload: must be a JSON object; cronExpression: cannot be combined with intervalMs; set one of them (to switch, set the other to null)"
    );
    let unknown = UpdateScheduleRequest { id: "nightly".into(), schedule: Some(quiet()), update_mask: None };
    assert_eq!(client.update_schedule(unknown).await.unwrap_err().code(), Code::NotFound);
    let mask = prost_types::FieldMask { paths: vec!["cron".into()] };
    let masked = UpdateScheduleRequest { id: "nightly".into(), schedule: Some(quiet()), update_mask: Some(mask) };
    let rejected = client.update_schedule(masked).await.unwrap_err();
    assert_eq!(rejected.message(), "update_mask: \"cron\" is not a field of a schedule");
}
