//! `faena.v1.BulkService`: shows, lists and cancels bulk actions on jobs and tasks.

use faena_wire::{
    BulkView,
    v1::{
        BulkAction, CancelBulkActionRequest, CancelBulkActionResponse, GetBulkActionRequest, GetBulkActionResponse,
        ListBulkActionsRequest, ListBulkActionsResponse, bulk_service_server::BulkService,
    },
};
use tonic::{Request, Response};

use super::{GrpcResult, convert::timestamp, query};
use crate::{Api, rest::bulk};

pub struct BulkActions(pub Api);

#[tonic::async_trait]
impl BulkService for BulkActions {
    async fn get_bulk_action(&self, request: Request<GetBulkActionRequest>) -> GrpcResult<GetBulkActionResponse> {
        let action = bulk::read_view(&self.0, &request.into_inner().id).await?;
        Ok(Response::new(GetBulkActionResponse { action: Some(message(action)) }))
    }

    async fn list_bulk_actions(&self, request: Request<ListBulkActionsRequest>) -> GrpcResult<ListBulkActionsResponse> {
        let ListBulkActionsRequest { page_size, page_token } = request.into_inner();
        let query = query([("limit", page_size.map(|size| size.to_string())), ("cursor", Some(page_token))]);
        let (actions, page_info) = bulk::read_page(&self.0, Some(&query)).await?;
        Ok(Response::new(ListBulkActionsResponse {
            actions: actions.into_iter().map(message).collect(),
            total_size: page_info.total,
            next_page_token: page_info.next_cursor.unwrap_or_default(),
        }))
    }

    async fn cancel_bulk_action(
        &self,
        request: Request<CancelBulkActionRequest>,
    ) -> GrpcResult<CancelBulkActionResponse> {
        let action = bulk::cancel_by_id(&self.0, &request.into_inner().id).await?;
        Ok(Response::new(CancelBulkActionResponse { action: Some(message(action)) }))
    }
}

fn message(view: BulkView) -> BulkAction {
    BulkAction {
        id: view.id.to_string(),
        action: view.action,
        filter_json: view.filter.to_string(),
        actor: view.actor,
        per_second: view.per_second,
        created_at: Some(timestamp(view.created_at)),
        matched: view.matched,
        done: view.done,
        skipped: view.skipped,
        due_at: view.due_at.map(timestamp),
        finished_at: view.finished_at.map(timestamp),
        error: view.error,
    }
}
