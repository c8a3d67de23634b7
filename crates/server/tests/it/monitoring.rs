//! Alert rules and dashboards: their syntax, their unit tests, and the metrics and commands that they name.

mod outage;

use std::{collections::BTreeSet, fs, path::PathBuf, process::Command};

use serde_json::Value;

use crate::{
    deployment::{root, yaml},
    faena::run,
    markdown::files_below,
    shell::output_parts,
};

const RULES: &str = "monitoring/alerts/faena.yml";

fn array(value: &Value) -> &[Value] {
    value.as_array().map_or(&[], Vec::as_slice)
}

/// Returns every alert rule.
fn rules() -> Vec<Value> {
    array(&yaml(RULES)["groups"]).iter().flat_map(|group| array(&group["rules"])).cloned().collect()
}

fn name(rule: &Value) -> &str {
    rule["alert"].as_str().unwrap()
}

fn promtool(arguments: &[&str], files: &[PathBuf]) {
    let output = Command::new("promtool").args(arguments).args(files).output();
    let output = output.expect("this test needs promtool (Debian: apt-get install prometheus)");
    let printed = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{arguments:?}: {printed}");
}

#[test]
fn promtool_accepts_the_alerts_and_their_unit_tests_pass_with_services() {
    promtool(&["check", "rules", "--lint=all", "--lint-fatal"], &[root().join(RULES)]);
    promtool(&["test", "rules"], &files_below(&root().join("monitoring/alerts/tests"), "yml"));
}

#[test]
fn every_alert_has_a_unit_test_in_which_it_fires_and_one_in_which_it_does_not() {
    let (mut firing, mut silent) = (BTreeSet::new(), BTreeSet::new());
    for file in files_below(&root().join("monitoring/alerts/tests"), "yml") {
        let tests = yaml(file.strip_prefix(root()).unwrap().to_str().unwrap());
        for case in array(&tests["tests"]).iter().flat_map(|test| array(&test["alert_rule_test"])) {
            let set = if array(&case["exp_alerts"]).is_empty() { &mut silent } else { &mut firing };
            set.insert(case["alertname"].as_str().unwrap().to_owned());
        }
    }
    let names: BTreeSet<String> = rules().iter().map(|rule| name(rule).to_owned()).collect();
    for fixed in ["JobsStuckInAssigned", "HighJobFailureRate", "OutboxQueueBacklog", "DLQNotEmpty"] {
        assert!(names.contains(fixed), "{fixed} is missing");
    }
    assert_eq!((&firing, &silent), (&names, &names));
}

#[test]
fn every_alert_is_documented_and_names_commands_that_exist() {
    let page = fs::read_to_string(root().join("docs/operating/alerts.md")).unwrap();
    let folder = tempfile::tempdir().unwrap();
    for rule in rules() {
        assert!(page.contains(&format!("`{}`", name(&rule))), "{} is not in alerts.md", name(&rule));
        assert!(["warning", "critical"].contains(&rule["labels"]["severity"].as_str().unwrap()));
        let description = rule["annotations"]["description"].as_str().unwrap();
        for command in description.split('"').filter(|part| part.starts_with("faena ")) {
            let arguments: Vec<&str> = command.split(' ').skip(1).chain(["--help"]).collect();
            let (code, _, stderr) = output_parts(&run(folder.path(), &[], &arguments));
            assert_eq!(code, 0, "{}: {command}: {stderr}", name(&rule));
        }
    }
}

/// Returns every query of the dashboards, as Prometheus receives it.
fn dashboard_queries() -> Vec<String> {
    let mut found = Vec::new();
    for file in files_below(&root().join("monitoring/grafana/dashboards"), "json") {
        let dashboard: Value = serde_json::from_str(&fs::read_to_string(&file).unwrap()).unwrap();
        assert!(dashboard["uid"].is_string() && dashboard["title"].is_string(), "{}", file.display());
        for target in array(&dashboard["panels"]).iter().flat_map(|panel| array(&panel["targets"])) {
            let query = target["expr"].as_str().unwrap();
            let query = query.replace("$__rate_interval", "1m").replace("$job", "faena").replace("$queue", ".+");
            assert!(!query.contains('$'), "an unknown variable in {query}");
            found.push(query);
        }
    }
    assert!(found.len() > 60, "{}", found.len());
    found
}

/// Returns the names of Faena's metrics in a query.
fn metric_names(query: &str) -> BTreeSet<String> {
    let is_word = |character: char| character.is_ascii_alphanumeric() || character == '_';
    let text = without_labels(query);
    let words = text.split(|character| !is_word(character));
    let is_metric = |word: &&str| {
        [
            "faena_",
            "jobs_",
            "job_state",
            "worker_state",
            "workers_",
            "events_",
            "event_",
            "outbox_",
            "dlq_",
            "circuit_",
            "dispatch_",
        ]
        .iter()
        .any(|start| word.starts_with(start))
    };
    words.filter(is_metric).map(str::to_owned).collect()
}

/// Removes everything in braces.
fn without_labels(query: &str) -> String {
    let mut depth = 0;
    let kept = query.chars().filter(|character| {
        match character {
            '{' => depth += 1,
            '}' => depth -= 1,
            _ => {}
        }
        depth == 0
    });
    kept.collect()
}

/// Returns the names of all series that the reference lists. A histogram has three.
fn documented_series() -> BTreeSet<String> {
    let folder = tempfile::tempdir().unwrap();
    let (_, page, _) = output_parts(&run(folder.path(), &[], &["reference", "metrics"]));
    let mut series = BTreeSet::new();
    for line in page.lines().filter(|line| line.starts_with("| `")) {
        let name = line.split('`').nth(1).unwrap().split('{').next().unwrap();
        series.extend(["", "_bucket", "_sum", "_count"].map(|suffix| format!("{name}{suffix}")));
    }
    series
}

#[test]
fn every_metric_of_the_alerts_and_dashboards_exists() {
    let known = documented_series();
    let alerts = rules().into_iter().map(|rule| rule["expr"].as_str().unwrap().to_owned());
    let mut unknown = BTreeSet::new();
    for query in dashboard_queries().into_iter().chain(alerts) {
        unknown.extend(metric_names(&query).into_iter().filter(|name| !known.contains(name)));
    }
    assert!(unknown.is_empty(), "not exported: {unknown:?}");
}

#[test]
fn promtool_accepts_every_query_of_the_dashboards_with_services() {
    let queries = dashboard_queries();
    let rules: Vec<Value> = queries
        .iter()
        .enumerate()
        .map(|(number, query)| serde_json::json!({"record": format!("query:{number}"), "expr": query}))
        .collect();
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("queries.yml");
    let text = serde_json::json!({"groups": [{"name": "dashboards", "rules": rules}]}).to_string();
    fs::write(&file, text).unwrap();
    promtool(&["check", "rules"], &[file]);
}
