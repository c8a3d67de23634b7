//! `GET /metrics` agrees with the table of metrics.

use faena_api::METRICS;

use crate::app::App;

#[tokio::test(flavor = "multi_thread")]
async fn every_metric_is_in_the_table_with_its_type_and_help() {
    let app = App::start().await;
    let id = app.create(r#"{"name": "noop"}"#).await;
    app.job_is(&id, "COMPLETED").await;
    let text = app.get("/metrics").await.text;
    let mut shown = 0;
    for line in text.lines().filter_map(|line| line.strip_prefix("# TYPE ")) {
        let (name, kind) = line.split_once(' ').unwrap();
        let metric =
            METRICS.iter().find(|metric| metric.name == name).unwrap_or_else(|| panic!("{name} is not listed"));
        assert_eq!(kind, metric.kind.as_str(), "{name}");
        assert!(text.contains(&format!("# HELP {name} {}", metric.help)), "{name}");
        shown += 1;
    }
    assert!(shown >= METRICS.iter().filter(|metric| metric.labels.is_empty()).count(), "{text}");
}

#[test]
fn names_and_labels_follow_the_conventions() {
    for metric in METRICS {
        let is_snake_case =
            |text: &str| text.chars().all(|character| character.is_ascii_lowercase() || character == '_');
        assert!(is_snake_case(metric.name) && metric.labels.iter().all(|label| is_snake_case(label)), "{metric:?}");
        assert!(!metric.name.ends_with("_total"), "{} gets its suffix on encoding", metric.name);
        assert!(!metric.help.is_empty() && !metric.help.ends_with('.'), "{metric:?}");
        assert_eq!(METRICS.iter().filter(|other| other.name == metric.name).count(), 1, "{}", metric.name);
    }
}
