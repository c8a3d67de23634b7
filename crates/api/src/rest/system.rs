//! `/nodes` and `/doctor`: the server processes, and the checks of the database and the configuration.

use axum::{Json, extract::State};
use faena_domain::Timestamp;
use faena_store::NodeReport;
use faena_wire::{DoctorReport, NodeList, NodeView};

use crate::{Api, ApiResult};

/// Lists the nodes that are alive.
pub async fn nodes(State(api): State<Api>) -> ApiResult<Json<NodeList>> {
    let own = api.engine.node_id();
    let view = |report: NodeReport| NodeView {
        id: report.node,
        name: report.name,
        version: report.version,
        started_at: report.started_at,
        last_seen_at: report.seen_at,
        is_this: report.node == own,
    };
    let reports = api.engine.store.node_reports(Timestamp::now()).await?;
    Ok(Json(NodeList { nodes: reports.into_iter().map(view).collect() }))
}

/// Shows the last check of this node.
pub async fn doctor(State(api): State<Api>) -> Json<DoctorReport> {
    Json(api.doctor.report())
}

/// Starts a check in the background, unless one is running or has just ended.
pub async fn start_doctor(State(api): State<Api>) -> Json<DoctorReport> {
    Json(api.doctor.start())
}
