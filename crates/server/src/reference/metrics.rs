//! Renders the reference of metrics from the table that registers them.

use std::fmt::Write;

use faena_api::METRICS;

use super::{escape_cell, generated_notice};

pub fn render() -> String {
    let mut text = String::from("# Metrics\n\n");
    text.push_str(&generated_notice("metrics"));
    text.push_str(
        "\n`GET /metrics` returns these metrics for Prometheus, as OpenMetrics to a caller that asks for it and otherwise in the text format:\n\
         ```sh\ncurl -s http://127.0.0.1:3000/metrics\n```\n\n\
         A metric of scope `node` is about the node that you scrape.\n\
         A metric of scope `cluster` is about the whole database and is exported by one node at a time, so that a sum over all nodes is right.\n\
         [Monitoring](../operating/monitoring.md) says how to scrape them and what to look at.\n\n\
         | Metric | Type | Scope | Labels | Description |\n|---|---|---|---|---|\n",
    );
    for metric in METRICS {
        let labels: Vec<String> = metric.labels.iter().map(|label| format!("`{label}`")).collect();
        let _ = writeln!(
            text,
            "| `{}` | {} | {} | {} | {} |",
            metric.exposed_name(),
            metric.kind.as_str(),
            metric.scope.as_str(),
            labels.join(", "),
            escape_cell(metric.help)
        );
    }
    text
}
