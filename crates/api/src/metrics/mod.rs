//! `GET /metrics`: metrics for Prometheus, read from the engine and the store on each scrape.
//!
//! Each scrape fills a new registry, so the samples of a worker disappear when this node no longer knows the worker.
//! Metrics of the whole database are exported by one node at a time, so a sum over all nodes counts them once. The
//! exporting node holds a lease, which a node takes or renews when it is scraped. The number of labels whose names
//! callers choose is bounded.

mod cluster;
mod node;
mod scrape;
mod table;

use std::time::Duration;

use axum::{
    extract::State,
    http::{HeaderMap, header},
    response::{IntoResponse, Response},
};
use faena_domain::Timestamp;

pub use cluster::jobs_by_state;
pub use table::{METRICS, Metric, MetricKind, MetricScope};

use crate::Api;
use scrape::Scrape;

/// How long the metrics of the whole database may take to read. Prometheus waits for 10 s unless configured otherwise.
const READ_TIMEOUT: Duration = Duration::from_secs(5);
/// How long a node that is no longer scraped keeps the lease of the metrics of the whole database.
const LEASE_MS: i64 = 300_000;

/// Returns the metrics. While the database does not respond, returns only those of this node.
pub async fn metrics(State(api): State<Api>, headers: HeaderMap) -> Response {
    let mut scrape = Scrape::default();
    node::add(&api, &mut scrape).await;
    let is_exporter = match tokio::time::timeout(READ_TIMEOUT, read_cluster(&api)).await {
        Ok(Ok(Some(figures))) => {
            figures.add(&mut scrape);
            true
        }
        Ok(Ok(None)) => false,
        Ok(Err(error)) => {
            tracing::debug!(%error, "cannot read the metrics of the database");
            false
        }
        Err(_) => false,
    };
    scrape.gauge(&table::CLUSTER_EXPORTER, [([], i64::from(is_exporter))]);
    if accepts_open_metrics(&headers) {
        let content_type = "application/openmetrics-text; version=1.0.0; charset=utf-8";
        return ([(header::CONTENT_TYPE, content_type)], scrape.open_metrics()).into_response();
    }
    let content_type = "text/plain; version=0.0.4; charset=utf-8";
    ([(header::CONTENT_TYPE, content_type)], scrape.plain_text()).into_response()
}

/// Reads the metrics of the whole database, if this node exports them.
async fn read_cluster(api: &Api) -> Result<Option<cluster::ClusterFigures>, faena_store::StoreError> {
    let now = Timestamp::now();
    if !api.engine.store.metrics_lease(api.engine.node_id(), LEASE_MS, now).await? {
        return Ok(None);
    }
    cluster::ClusterFigures::read(api, now).await.map(Some)
}

/// Returns whether the caller asks for OpenMetrics, as Prometheus does.
fn accepts_open_metrics(headers: &HeaderMap) -> bool {
    let accepted = headers.get_all(header::ACCEPT).iter().filter_map(|value| value.to_str().ok());
    accepted.flat_map(|value| value.split(',')).any(|kind| kind.trim().starts_with("application/openmetrics-text"))
}

/// Converts a count to the number type of gauges; a count that does not fit becomes `i64::MAX`.
fn signed(number: impl TryInto<i64>) -> i64 {
    number.try_into().unwrap_or(i64::MAX)
}

/// Maximum number of queues with labels of their own. All others share the label `other`.
const MAX_QUEUES: usize = 100;
/// Maximum number of workers of a node with labels of their own.
const MAX_WORKERS: usize = 1_000;
/// Maximum number of failing hosts with labels of their own.
const MAX_HOSTS: usize = 100;
/// Maximum number of states of machines with labels of their own.
const MAX_TASK_STATES: usize = 200;
