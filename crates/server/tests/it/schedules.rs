//! Schedules, by the command line and the clock of a real server.

use std::{collections::BTreeMap, path::Path};

use serde_json::{Value, json};

use crate::{
    faena::{Faena, eventually, run},
    postgres::Database,
};

/// Exit code, stdout, stderr.
fn faena(folder: &Path, server: &Faena, arguments: &[&str]) -> (i32, String, String) {
    let output = run(folder, &[("FAENA_URL", &server.url)], arguments);
    let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap();
    (output.status.code().unwrap(), text(&output.stdout), text(&output.stderr))
}

/// What it prints when all is well.
fn says(folder: &Path, server: &Faena, arguments: &[&str]) -> String {
    let (code, stdout, stderr) = faena(folder, server, arguments);
    assert_eq!((code, stderr.as_str()), (0, ""), "{arguments:?}");
    stdout
}

async fn ran(server: &Faena, id: &str) -> u64 {
    server.get(&format!("/api/v1/schedules/{id}")).await.1["runCount"].as_u64().unwrap()
}

async fn has_run(server: &Faena, id: &str, times: u64) {
    eventually(&format!("schedule {id} has run {times} times"), async || {
        (ran(server, id).await >= times).then_some(())
    })
    .await;
}

/// The jobs of a schedule by their due times.
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

async fn every_due_time_becomes_one_job_although_the_server_is_killed(environment: &[(&str, &str)]) {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let mut server = Faena::start(folder, environment).await;
    let create = [
        "schedules",
        "create",
        "--name",
        "pulse",
        "--every",
        "1s",
        "--job",
        "noop",
        "--payload",
        r#"{"at": "{{due}}"}"#,
        "--json",
    ];
    let made: Value = serde_json::from_str(&says(folder, &server, &create)).unwrap();
    let id = made["id"].as_str().unwrap();
    for round in 1..=3 {
        has_run(&server, id, round * 2).await;
        server.kill();
        server = Faena::start(folder, environment).await;
    }
    has_run(&server, id, 8).await;
    let off = says(folder, &server, &["schedules", "disable", "pulse"]);
    assert!(off.ends_with("pulse  disabled\n"), "{off}");
    let runs = ran(&server, id).await;
    // Another one, made later, has its two times: this one would have had them too.
    let other =
        ["schedules", "create", "--name", "other", "--every", "1s", "--max-runs", "2", "--job", "noop", "--json"];
    let other: Value = serde_json::from_str(&says(folder, &server, &other)).unwrap();
    has_run(&server, other["id"].as_str().unwrap(), 2).await;
    assert_eq!(ran(&server, id).await, runs, "it goes on although it is off");

    server.everything_ended().await;
    let jobs = jobs_by_due(&server, id).await;
    assert_eq!(jobs.len() as u64, runs);
    let first = faena_domain::Timestamp::parse(jobs.keys().next().unwrap()).unwrap();
    for (n, (due, jobs)) in jobs.iter().enumerate() {
        let [job] = jobs.as_slice() else { panic!("{due} has {} jobs", jobs.len()) };
        assert_eq!((&job["status"], &job["payload"]), (&json!("COMPLETED"), &json!({"at": due})));
        let expected = first.plus_ms(1_000 * i64::try_from(n).unwrap());
        assert_eq!(due, &expected.to_string(), "no due time is left out");
    }
    let (_, ticks) = server.get(&format!("/api/v1/schedules/{id}/ticks?limit=100")).await;
    let fired = ticks["ticks"].as_array().unwrap();
    assert_eq!(fired.len(), jobs.len());
    for tick in fired {
        assert_eq!(tick["jobId"], jobs[tick["dueAt"].as_str().unwrap()][0]["id"], "{tick}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn every_due_time_becomes_one_job_although_the_server_is_killed_on_sqlite() {
    every_due_time_becomes_one_job_although_the_server_is_killed(&[]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn every_due_time_becomes_one_job_although_the_server_is_killed_on_postgres() {
    let database = Database::create().await;
    let environment =
        [("DATABASE_URL", database.url.as_str()), ("FAENA_NODE_LEASE", "300ms"), ("FAENA_ORPHAN_DELAY", "50ms")];
    every_due_time_becomes_one_job_although_the_server_is_killed(&environment).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn schedules_are_made_looked_at_changed_and_removed_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let server = Faena::start(folder, &[]).await;
    let says = |arguments: &[&str]| says(folder, &server, arguments);
    std::fs::write(folder.join("payload.json"), r#"{"day": "{{due.date}}", "n": 12345678901234567890123}"#).unwrap();
    let made = says(&[
        "schedules",
        "create",
        "--name",
        "nightly",
        "--cron",
        "30 2 * * *",
        "--timezone",
        "Europe/Madrid",
        "--job",
        "noop",
        "--job-name",
        "The report",
        "--payload",
        "@payload.json",
        "--priority",
        "high",
        "--queue",
        "reports",
        "--max-retries",
        "5",
        "--webhook",
        "https://example.org/hook",
        "--misfire",
        "catch_up",
        "--overlap",
        "skip",
        "--catch-up-limit",
        "7",
        "--jitter",
        "30s",
        "--start",
        "2035-03-23T12:00:00Z",
        "--end",
        "2036-01-01T00:00:00Z",
        "--except",
        "2035-12-25",
        "--except",
        "* * * * SUN",
        "--max-runs",
        "100",
        "--dst-gap",
        "skip",
        "--dst-overlap",
        "both",
        "--tag",
        "a",
        "--tag",
        "b",
    ]);
    assert!(made.contains("nightly  next run at 2035-03-24T01:30:00.000Z"), "{made}");
    let shown: Value = serde_json::from_str(&says(&["schedules", "show", "nightly", "--json"])).unwrap();
    for (name, value) in [
        ("cronExpression", json!("30 2 * * *")),
        ("timezone", json!("Europe/Madrid")),
        ("jobType", json!("noop")),
        ("jobName", json!("The report")),
        ("jobPriority", json!("HIGH")),
        ("queue", json!("reports")),
        ("maxRetries", json!(5)),
        ("webhookUrl", json!("https://example.org/hook")),
        ("misfire", json!("catch_up")),
        ("overlap", json!("skip")),
        ("catchUpLimit", json!(7)),
        ("jitterMs", json!(30_000)),
        ("startAt", json!("2035-03-23T12:00:00.000Z")),
        ("endAt", json!("2036-01-01T00:00:00.000Z")),
        ("except", json!(["2035-12-25", "* * * * SUN"])),
        ("maxRuns", json!(100)),
        ("dstGap", json!("skip")),
        ("dstOverlap", json!("both")),
        ("tags", json!(["a", "b"])),
    ] {
        assert_eq!(shown[name], value, "{name}");
    }
    assert!(says(&["schedules", "show", "nightly", "--json"]).contains("12345678901234567890123"), "to the letter");

    let edited = says(&[
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
    let preview = says(&["schedules", "preview", "nightly", "--count", "2"]);
    assert!(
        preview.contains("2035-03-23T14:30:00+01:00") && !preview.contains("2035-03-23T16:00:00+01:00"),
        "{preview}"
    );

    says(&["schedules", "edit", "nightly", "--webhook", "none", "--queue", "default"]);
    assert!(says(&["schedules", "disable", "nightly"]).ends_with("nightly  disabled\n"));
    let job = says(&["schedules", "trigger", "nightly"]);
    server.job_is(job.trim(), "COMPLETED").await;
    let ticks = says(&["schedules", "ticks", "nightly"]);
    assert!(ticks.contains("triggered") && ticks.contains(job.trim()), "{ticks}");
    let table = says(&["schedules", "list", "--inactive", "-q", "NIGHT"]);
    assert!(table.contains("nightly") && table.contains("disabled") && table.ends_with("1 of 1 schedule\n"), "{table}");
    let whole = says(&["schedules", "show", "nightly"]);
    for part in [
        "due              Every 90 minutes",
        "next due times, if it were enabled",
        "latest due times",
        "triggered",
        "noop (The report), queue default, HIGH",
    ] {
        assert!(whole.contains(part), "{part}: {whole}");
    }
    assert!(says(&["schedules", "enable", "nightly"]).contains("next run at"));
    assert_eq!(says(&["schedules", "delete", "nightly"]), "nightly was deleted; its jobs are kept\n");
    assert!(says(&["schedules", "list"]).ends_with("0 of 0 schedules\n"));
}

#[tokio::test(flavor = "multi_thread")]
async fn wrong_commands_about_schedules_say_what_to_do() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let server = Faena::start(folder, &[]).await;
    let good = ["schedules", "create", "--name", "twin", "--every", "1h", "--job", "noop", "--disabled"];
    says(folder, &server, &good);
    says(folder, &server, &good);
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
            "the payload is not valid JSON",
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
            "\n  intervalMs: must be from 1000",
        ),
        (&["schedules", "edit", "twin"], 2, "nothing to change"),
    ] {
        let (got, stdout, stderr) = faena(folder, &server, arguments);
        assert_eq!((got, stdout.as_str()), (code, ""), "{arguments:?}: {stderr}");
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
    let valid = says(folder, &server, &valid);
    assert!(valid.contains("2035-01-01T09:00:00.000Z") && valid.contains("(UTC)"), "{valid}");
    assert_eq!(server.get("/api/v1/schedules").await.1["total"], 2);
}
