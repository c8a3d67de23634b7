//! Tests schedules on a real server, through the command line.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use crate::{
    faena::{Faena, eventually},
    postgres::Database,
    shell::Shell,
};

async fn run_count(server: &Faena, id: &str) -> u64 {
    server.get(&format!("/api/v1/schedules/{id}")).await.1["runCount"].as_u64().unwrap()
}

async fn wait_for_runs(server: &Faena, id: &str, times: u64) {
    eventually(&format!("schedule {id} has run {times} times"), async || {
        (run_count(server, id).await >= times).then_some(())
    })
    .await;
}

/// Returns the jobs of a schedule by due time.
async fn jobs_by_due(server: &Faena, id: &str) -> BTreeMap<String, Vec<Value>> {
    let mut found = BTreeMap::new();
    let mut cursor = String::new();
    loop {
        let (_, list) = server.get(&format!("/api/v1/jobs?scheduleId={id}&limit=100&cursor={cursor}")).await;
        for job in list["jobs"].as_array().unwrap() {
            let due = job["scheduleDue"].as_str().unwrap().to_owned();
            found.entry(due).or_insert_with(Vec::new).push(job.clone());
        }
        match list["nextCursor"].as_str() {
            Some(next) => cursor = next.to_owned(),
            None => return found,
        }
    }
}

async fn assert_every_due_time_becomes_one_job_despite_kills(environment: &[(&str, &str)]) {
    let mut shell = Shell::start(environment).await;
    let create = "schedules create --name pulse --every 1s --job noop --json --payload";
    let mut create: Vec<&str> = create.split(' ').collect();
    create.push(r#"{"at": "{{due}}"}"#);
    let created = shell.json(&create);
    let id = created["id"].as_str().unwrap();
    for round in 1..=3 {
        wait_for_runs(&shell.faena, id, round * 2).await;
        shell.restart_after_kill(environment).await;
    }
    wait_for_runs(&shell.faena, id, 8).await;
    let disabled = shell.stdout(&["schedules", "disable", "pulse"]);
    assert!(disabled.ends_with("pulse  disabled\n"), "{disabled}");
    let runs = run_count(&shell.faena, id).await;
    // Another schedule fires twice. The disabled one would have fired meanwhile too.
    let other =
        ["schedules", "create", "--name", "other", "--every", "1s", "--max-runs", "2", "--job", "noop", "--json"];
    let other = shell.json(&other);
    wait_for_runs(&shell.faena, other["id"].as_str().unwrap(), 2).await;
    assert_eq!(run_count(&shell.faena, id).await, runs, "it fires although it is disabled");

    shell.faena.wait_until_all_jobs_end().await;
    let jobs = jobs_by_due(&shell.faena, id).await;
    assert_eq!(jobs.len() as u64, runs);
    let first = faena_domain::Timestamp::parse(jobs.keys().next().unwrap()).unwrap();
    for (n, (due, jobs)) in jobs.iter().enumerate() {
        let [job] = jobs.as_slice() else { panic!("{due} has {} jobs", jobs.len()) };
        assert_eq!((&job["status"], &job["payload"]), (&json!("COMPLETED"), &json!({"at": due})));
        let expected = first.plus_ms(1_000 * i64::try_from(n).unwrap());
        assert_eq!(due, &expected.to_string(), "a due time is missing");
    }
    let (_, ticks) = shell.faena.get(&format!("/api/v1/schedules/{id}/ticks?limit=100")).await;
    let fired = ticks["ticks"].as_array().unwrap();
    assert_eq!(fired.len(), jobs.len());
    for tick in fired {
        assert_eq!(tick["jobId"], jobs[tick["dueAt"].as_str().unwrap()][0]["id"], "{tick}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn every_due_time_becomes_one_job_although_the_server_is_killed_on_sqlite() {
    assert_every_due_time_becomes_one_job_despite_kills(&[]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn every_due_time_becomes_one_job_although_the_server_is_killed_on_postgres() {
    let database = Database::create().await;
    let environment =
        [("DATABASE_URL", database.url.as_str()), ("FAENA_NODE_LEASE", "300ms"), ("FAENA_ORPHAN_DELAY", "50ms")];
    assert_every_due_time_becomes_one_job_despite_kills(&environment).await;
}

/// The options of a schedule, and the JSON field that shows each of them.
fn nightly_options() -> [(&'static str, &'static str, &'static str, Value); 22] {
    [
        ("--name", "nightly", "name", json!("nightly")),
        ("--cron", "30 2 * * *", "cronExpression", json!("30 2 * * *")),
        ("--timezone", "Europe/Madrid", "timezone", json!("Europe/Madrid")),
        ("--job", "noop", "jobType", json!("noop")),
        ("--job-name", "The report", "jobName", json!("The report")),
        ("--priority", "high", "jobPriority", json!("HIGH")),
        ("--queue", "reports", "queue", json!("reports")),
        ("--max-retries", "5", "maxRetries", json!(5)),
        ("--webhook", "https://example.org/hook", "webhookUrl", json!("https://example.org/hook")),
        ("--misfire", "catch_up", "misfire", json!("catch_up")),
        ("--overlap", "skip", "overlap", json!("skip")),
        ("--catch-up-limit", "7", "catchUpLimit", json!(7)),
        ("--jitter", "30s", "jitterMs", json!(30_000)),
        ("--start", "2035-03-23T12:00:00Z", "startAt", json!("2035-03-23T12:00:00.000Z")),
        ("--end", "2036-01-01T00:00:00Z", "endAt", json!("2036-01-01T00:00:00.000Z")),
        ("--except", "2035-12-25", "except", json!(["2035-12-25", "* * * * SUN"])),
        ("--except", "* * * * SUN", "except", json!(["2035-12-25", "* * * * SUN"])),
        ("--max-runs", "100", "maxRuns", json!(100)),
        ("--dst-gap", "skip", "dstGap", json!("skip")),
        ("--dst-overlap", "both", "dstOverlap", json!("both")),
        ("--tag", "a", "tags", json!(["a", "b"])),
        ("--tag", "b", "tags", json!(["a", "b"])),
    ]
}

/// Creates the schedule with a payload from a file, and returns what the command prints.
fn create_nightly(shell: &Shell) -> String {
    let payload = r#"{"day": "{{due.date}}", "n": 12345678901234567890123}"#;
    std::fs::write(shell.folder.path().join("payload.json"), payload).unwrap();
    let options = nightly_options();
    let mut arguments = vec!["schedules", "create", "--payload", "@payload.json"];
    arguments.extend(options.iter().flat_map(|(option, value, ..)| [*option, *value]));
    shell.stdout(&arguments)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_schedule_keeps_every_option_it_was_created_with() {
    let shell = Shell::start(&[]).await;
    let created = create_nightly(&shell);
    assert!(created.contains("nightly  next run at 2035-03-24T01:30:00.000Z"), "{created}");
    let shown = shell.json(&["schedules", "show", "nightly", "--json"]);
    for (option, _, field, value) in nightly_options() {
        assert_eq!(shown[field], value, "{option}");
    }
    let payload_is_kept = shell.stdout(&["schedules", "show", "nightly", "--json"]).contains("12345678901234567890123");
    assert!(payload_is_kept, "the payload was reformatted");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_schedule_is_edited_triggered_and_deleted_by_name() {
    let shell = Shell::start(&[]).await;
    create_nightly(&shell);
    let edited = shell.stdout(&[
        "schedules",
        "edit",
        "nightly",
        "--every",
        "90m",
        "--end",
        "none",
        "--except",
        "none",
        "--max-runs",
        "none",
    ]);
    assert!(edited.contains("next run at 2035-03-23T12:00:00.000Z: Every 90 minutes"), "{edited}");
    let preview = shell.stdout(&["schedules", "preview", "nightly", "--count", "2"]);
    assert!(
        preview.contains("2035-03-23T14:30:00+01:00") && !preview.contains("2035-03-23T16:00:00+01:00"),
        "{preview}"
    );

    shell.stdout(&["schedules", "edit", "nightly", "--webhook", "none", "--queue", "default"]);
    assert!(shell.stdout(&["schedules", "disable", "nightly"]).ends_with("nightly  disabled\n"));
    let job = shell.stdout(&["schedules", "trigger", "nightly"]);
    shell.faena.wait_for_state(job.trim(), "COMPLETED").await;
    let ticks = shell.stdout(&["schedules", "ticks", "nightly"]);
    assert!(ticks.contains("triggered") && ticks.contains(job.trim()), "{ticks}");
    let table = shell.stdout(&["schedules", "list", "--inactive", "-q", "NIGHT"]);
    assert!(table.contains("nightly") && table.contains("disabled") && table.ends_with("1 of 1 schedule\n"), "{table}");
    let shown = shell.stdout(&["schedules", "show", "nightly"]);
    for part in [
        "due              Every 90 minutes",
        "next due times, if it were enabled",
        "latest due times",
        "triggered",
        "noop (The report), queue default, HIGH",
    ] {
        assert!(shown.contains(part), "{part}: {shown}");
    }
    assert!(shell.stdout(&["schedules", "enable", "nightly"]).contains("next run at"));
    assert_eq!(shell.stdout(&["schedules", "delete", "nightly"]), "nightly was deleted; its jobs are kept\n");
    assert!(shell.stdout(&["schedules", "list"]).starts_with("no schedules; "));
}

#[tokio::test(flavor = "multi_thread")]
async fn invalid_schedule_commands_explain_what_to_do() {
    let shell = Shell::start(&[]).await;
    let create_twin = ["schedules", "create", "--name", "twin", "--every", "1h", "--job", "noop", "--disabled"];
    shell.stdout(&create_twin);
    shell.stdout(&create_twin);
    for (arguments, code, part) in [
        (&["schedules", "show", "twin"][..], 1, "2 schedules have the name \"twin\"; pass an id:\n  "),
        (&["schedules", "show", "none"], 1, "no schedule \"none\"; list them with \"faena schedules list\""),
        (
            &["schedules", "enable", "0197a1b2-0000-7000-8000-000000000000"],
            1,
            "no schedule \"0197a1b2-0000-7000-8000-000000000000\" (NOT_FOUND)",
        ),
        (&["schedules", "create", "--cron", "@daily"], 2, "missing --name NAME, --job TYPE"),
        (&["schedules", "create", "--name", "x", "--job", "noop"], 2, "missing --cron EXPRESSION or --every DURATION"),
        (
            &["schedules", "create", "--name", "x", "--job", "noop", "--every", "soon"],
            2,
            "--every: not a valid duration: \"soon\"",
        ),
        (
            &["schedules", "create", "--name", "x", "--job", "noop", "--every", "1m", "--cron", "@daily"],
            2,
            "cannot be used with",
        ),
        (
            &["schedules", "create", "--name", "x", "--job", "noop", "--every", "1m", "--payload", "@nowhere.json"],
            2,
            "--payload: cannot read \"nowhere.json\": ",
        ),
        (
            &["schedules", "create", "--name", "x", "--job", "noop", "--every", "1m", "--payload", "{"],
            2,
            "--payload: not valid JSON",
        ),
        (
            &["schedules", "create", "--name", "x", "--job", "noop", "--cron", "61 * * * *"],
            1,
            "invalid minute field (1 of 5, position 1)",
        ),
        (
            &[
                "schedules",
                "validate",
                "--name",
                "x",
                "--job",
                "noop",
                "--every",
                "500ms",
                "--timezone",
                "Mars/Olympus",
            ],
            1,
            "\n  --every: must be between 1000",
        ),
        (&["schedules", "edit", "twin"], 2, "nothing to change"),
    ] {
        let (exit_code, stdout, stderr) = shell.run(arguments);
        assert_eq!((exit_code, stdout.as_str()), (code, ""), "{arguments:?}: {stderr}");
        assert!(stderr.contains(part), "{arguments:?}: {stderr}");
    }
    let valid = [
        "schedules",
        "validate",
        "--name",
        "x",
        "--job",
        "noop",
        "--cron",
        "0 9 * * 1#1",
        "--start",
        "2035-01-01T00:00:00Z",
    ];
    let valid = shell.stdout(&valid);
    assert!(valid.contains("2035-01-01T09:00:00.000Z") && valid.contains("(UTC)"), "{valid}");
    assert_eq!(shell.faena.get("/api/v1/schedules").await.1["total"], 2);
}
