//! The same schedules by `faena.v1.ScheduleService`.

use faena_domain::Timestamp;
use faena_wire::v1::{
    CreateScheduleRequest, ListSchedulesRequest, ListTicksRequest, PreviewScheduleRequest, ScheduleRequest,
    ScheduleSpec, SetScheduleActiveRequest, UpdateScheduleRequest, schedule_service_client::ScheduleServiceClient,
};
use serde_json::{Value, json};
use tonic::Code;

use crate::{app::App, schedules::PATH};

fn client(app: &App) -> ScheduleServiceClient<axum::Router> {
    ScheduleServiceClient::with_origin(app.router.clone(), axum::http::Uri::from_static("http://127.0.0.1:3000"))
}

fn quiet() -> ScheduleSpec {
    ScheduleSpec {
        name: Some("nightly".into()),
        cron_expression: Some("30 2 * * *".into()),
        timezone: Some("Europe/Madrid".into()),
        start_at_ms: Timestamp::parse("2035-03-23T12:00:00Z").map(Timestamp::as_ms),
        job_name: Some("noop".into()),
        job_payload_json: r#"{"big": 12345678901234567890123, "due": "{{due}}"}"#.into(),
        except: vec!["2035-12-25".into()],
        retry_on: vec!["transient".into()],
        ..ScheduleSpec::default()
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_schedule_has_its_whole_life_over_grpc() {
    let app = App::start().await;
    let mut client = client(&app);
    let made = client.create(CreateScheduleRequest { schedule: Some(quiet()) }).await.unwrap().into_inner();
    assert_eq!(made.explanation, "At 02:30, except 2035-12-25 (Europe/Madrid)");
    let id = made.id.clone();
    let shown: Value = app.get(&format!("{PATH}/{id}")).await.json();
    assert_eq!((&shown["except"], &shown["retryOn"]), (&json!(["2035-12-25"]), &json!("transient")));
    assert!(app.get(&format!("{PATH}/{id}")).await.text.contains("12345678901234567890123"), "to the letter");

    let list = ListSchedulesRequest { is_active: Some(true), q: Some("NIGHT".into()), ..Default::default() };
    let list = client.list(list).await.unwrap().into_inner();
    assert_eq!((list.total, list.schedules[0].id.as_str()), (1, id.as_str()));

    let change = ScheduleSpec { cron_expression: Some("0 4 * * *".into()), max_runs: Some(3), ..Default::default() };
    let change = UpdateScheduleRequest {
        id: id.clone(),
        schedule: Some(change),
        clear: vec!["except".into(), "jobPayload".into()],
    };
    let changed = client.update(change).await.unwrap().into_inner();
    let spec = changed.spec.unwrap();
    assert_eq!((spec.cron_expression.as_deref(), spec.max_runs, spec.except.len()), (Some("0 4 * * *"), Some(3), 0));
    assert_eq!((spec.job_payload_json.as_str(), spec.name.as_deref()), ("{}", Some("nightly")));

    let preview = client.preview(PreviewScheduleRequest { id: id.clone(), count: Some(5) }).await.unwrap().into_inner();
    assert_eq!(preview.runs.len(), 3, "it may run three times: {preview:?}");
    assert_eq!(preview.runs[0].local, "2035-03-24T04:00:00+01:00");

    let off =
        client.set_active(SetScheduleActiveRequest { id: id.clone(), is_active: false }).await.unwrap().into_inner();
    assert_eq!((off.next_run_at_ms, off.spec.unwrap().is_active), (None, Some(false)));

    let one = ScheduleRequest { id: id.clone() };
    let job = client.trigger(one.clone()).await.unwrap().into_inner().job_id;
    app.job_is(&job, "COMPLETED").await;
    let whole = client.get(one.clone()).await.unwrap().into_inner();
    assert_eq!((whole.jobs[0].id.as_str(), whole.jobs[0].schedule_id.as_deref()), (job.as_str(), Some(id.as_str())));
    let ticks =
        client.list_ticks(ListTicksRequest { id: id.clone(), ..Default::default() }).await.unwrap().into_inner().ticks;
    assert_eq!((ticks[0].outcome.as_str(), ticks[0].job_id.as_deref()), ("triggered", Some(job.as_str())));
    assert_eq!(whole.jobs[0].schedule_due_ms, Some(ticks[0].due_at_ms));

    client.delete(one.clone()).await.unwrap();
    assert_eq!(client.get(one).await.unwrap_err().code(), Code::NotFound);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_rules_are_those_of_rest() {
    let app = App::start().await;
    let mut client = client(&app);
    let valid = client.validate(CreateScheduleRequest { schedule: Some(quiet()) }).await.unwrap().into_inner();
    assert_eq!((valid.next_runs.len(), valid.timezone.as_str()), (10, "Europe/Madrid"));
    assert_eq!(app.get(PATH).await.json()["total"], 0);
    let wrong = ScheduleSpec { interval_ms: Some(5_000), job_payload_json: "no json".into(), ..quiet() };
    let refused = client.create(CreateScheduleRequest { schedule: Some(wrong) }).await.unwrap_err();
    assert_eq!(refused.code(), Code::InvalidArgument);
    assert_eq!(refused.metadata().get("x-error-code").unwrap(), "VALIDATION_ERROR");
    assert_eq!(
        refused.message(),
        "2 fields are not valid; jobPayload: must be a JSON object; cronExpression: cannot be combined with intervalMs; set one of them (to switch, set the other to null)"
    );
    let unknown = UpdateScheduleRequest { id: "nightly".into(), schedule: Some(quiet()), clear: Vec::new() };
    assert_eq!(client.update(unknown).await.unwrap_err().code(), Code::NotFound);
}
