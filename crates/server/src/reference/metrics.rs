//! The reference of metrics, from the table that registers them.

use std::fmt::Write;

use faena_api::METRICS;

use super::{cell, generated};

pub fn render() -> String {
    let mut text = String::from("# Metrics\n\n");
    text.push_str(&generated("metrics"));
    text.push_str(
        "\n`GET /metrics` returns these figures in the OpenMetrics format that Prometheus scrapes:\n\
         ```sh\ncurl -s http://127.0.0.1:3000/metrics\n```\n\n\
         | Metric | Type | Labels | Description |\n|---|---|---|---|\n",
    );
    for metric in METRICS {
        let labels: Vec<String> = metric.labels.iter().map(|label| format!("`{label}`")).collect();
        let _ = writeln!(
            text,
            "| `{}` | {} | {} | {} |",
            metric.exposed_name(),
            metric.kind.as_str(),
            labels.join(", "),
            cell(metric.help)
        );
    }
    text
}
