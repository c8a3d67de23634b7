//! `faena.v1.TaskService`.
//!
//! A request becomes a body or query of the HTTP API, so that the same rules apply to both.

use faena_wire::v1::{
    self, ApproveTaskRequest, ApproveTaskResponse, BulkCancelTasksRequest, BulkCancelTasksResponse,
    BulkPauseTasksRequest, BulkPauseTasksResponse, BulkResumeTasksRequest, BulkResumeTasksResponse,
    BulkSendTaskEventRequest, BulkSendTaskEventResponse, CancelTaskRequest, CancelTaskResponse, CheckMachineRequest,
    CheckMachineResponse, CreateTaskRequest, CreateTaskResponse, DiagramFormat, ExplainTaskRequest,
    ExplainTaskResponse, ForkTaskRequest, ForkTaskResponse, GetMachineDiagramRequest, GetMachineDiagramResponse,
    GetMachineRequest, GetMachineResponse, GetMachineSchemaRequest, GetMachineSchemaResponse, GetTaskRequest,
    GetTaskResponse, ListMachinesRequest, ListMachinesResponse, ListTaskEventsRequest, ListTaskEventsResponse,
    ListTaskHistoryRequest, ListTaskHistoryResponse, ListTasksRequest, ListTasksResponse, MigrateTasksRequest,
    MigrateTasksResponse, PauseTaskRequest, PauseTaskResponse, RegisterMachineRequest, RegisterMachineResponse,
    RejectTaskRequest, RejectTaskResponse, ResumeTaskRequest, ResumeTaskResponse, SendTaskEventRequest,
    SendTaskEventResponse, TaskBulkOptions, TaskBulkResult, TaskWaitReason, task_service_server::TaskService,
};
use serde_json::json;
use tonic::{Request, Response, Status};

use super::{
    GrpcResult,
    convert::{self, JsonBody, query_text, timestamp},
    events, query,
    task_messages::{bulk_result, finding, machine_status, message, migration, record, task_answer, task_status},
};
use crate::{
    Api, ApiError,
    rest::{machines, task_bulk, task_forks, tasks},
};

pub struct Tasks(pub Api);

#[tonic::async_trait]
impl TaskService for Tasks {
    async fn register_machine(&self, request: Request<RegisterMachineRequest>) -> GrpcResult<RegisterMachineResponse> {
        let body = json!({"definition": request.into_inner().definition}).to_string();
        let (machine, existed) = machines::register_from(&self.0, body.as_bytes()).await?;
        let machines::RegisteredMachine { name, version, hash } = machine;
        Ok(Response::new(RegisterMachineResponse { name, version, hash, existed }))
    }

    async fn get_machine(&self, request: Request<GetMachineRequest>) -> GrpcResult<GetMachineResponse> {
        let GetMachineRequest { name, version } = request.into_inner();
        let query = query([("version", version.map(|version| version.to_string()))]);
        let shown = machines::read_view(&self.0, &name, Some(&query)).await?;
        Ok(Response::new(GetMachineResponse {
            definition_json: shown.definition.to_string(),
            versions: shown.versions,
            machine: Some(v1::Machine {
                name: shown.name,
                version: shown.version,
                hash: shown.hash,
                created_at: Some(timestamp(shown.created_at)),
                created_by: shown.created_by,
            }),
        }))
    }

    async fn list_machines(&self, _: Request<ListMachinesRequest>) -> GrpcResult<ListMachinesResponse> {
        let machines = machines::find(&self.0).await?;
        Ok(Response::new(ListMachinesResponse { machines: machines.into_iter().map(machine_status).collect() }))
    }

    async fn check_machine(&self, request: Request<CheckMachineRequest>) -> GrpcResult<CheckMachineResponse> {
        let response = match machines::parse(request.into_inner().definition).await? {
            Ok(definition) => CheckMachineResponse {
                findings: Vec::new(),
                name: definition.machine,
                version: definition.version,
                hash: definition.hash,
            },
            Err(findings) => CheckMachineResponse {
                findings: findings.into_iter().map(finding).collect(),
                ..CheckMachineResponse::default()
            },
        };
        Ok(Response::new(response))
    }

    async fn get_machine_diagram(
        &self,
        request: Request<GetMachineDiagramRequest>,
    ) -> GrpcResult<GetMachineDiagramResponse> {
        let GetMachineDiagramRequest { name, version, format } = request.into_inner();
        let format =
            DiagramFormat::try_from(format).map_err(|_| ApiError::invalid_field("format", "must be SVG or MERMAID"))?;
        let query = query([("version", version.map(|version| version.to_string()))]);
        let definition = machines::load_requested(&self.0, &name, Some(&query)).await?.definition;
        let diagram = match format {
            DiagramFormat::Mermaid => definition.to_mermaid(),
            DiagramFormat::Unspecified | DiagramFormat::Svg => definition.to_svg(&[]),
        };
        Ok(Response::new(GetMachineDiagramResponse { diagram }))
    }

    async fn get_machine_schema(&self, _: Request<GetMachineSchemaRequest>) -> GrpcResult<GetMachineSchemaResponse> {
        Ok(Response::new(GetMachineSchemaResponse { schema_json: faena_machine::schema().to_string() }))
    }

    async fn migrate_tasks(&self, request: Request<MigrateTasksRequest>) -> GrpcResult<MigrateTasksResponse> {
        let request = request.into_inner();
        let mut states = serde_json::Map::new();
        for v1::StateMapping { from, to } in request.states {
            if states.insert(from.clone(), to.into()).is_some() {
                let error = ApiError::invalid_field(&format!("map.{from}"), "must be given once");
                return Err(error.into());
            }
        }
        let mut body = JsonBody::default();
        body.put("from", Some(request.from_version));
        body.put("to", Some(request.to_version));
        body.put("map", Some(states));
        body.put("entry", convert::migration_entry_name(request.entry));
        body.put("dryRun", Some(request.dry_run));
        body.put("perSecond", request.per_second);
        let body = body.into_bytes();
        Ok(Response::new(migration(task_bulk::migrate_from(&self.0, &request.machine, &body).await?)))
    }

    async fn create_task(&self, request: Request<CreateTaskRequest>) -> GrpcResult<CreateTaskResponse> {
        let (metadata, _, request) = request.into_parts();
        let mut body = JsonBody::default();
        body.put("machine", Some(request.machine));
        body.put("version", request.version);
        body.put("title", request.title);
        body.put("correlationId", request.correlation_id);
        body.put_list("tags", request.tags);
        body.put("idempotencyKey", request.idempotency_key);
        let body = body.into_text("data", &request.data_json);
        let (task, existed) = tasks::create_from(&self.0, &metadata.into_headers(), body.as_bytes()).await?;
        Ok(Response::new(CreateTaskResponse { task: Some(message(task)), existed }))
    }

    async fn get_task(&self, request: Request<GetTaskRequest>) -> GrpcResult<GetTaskResponse> {
        let task = tasks::read_view(&self.0, &request.into_inner().id).await?;
        Ok(Response::new(GetTaskResponse { task: Some(message(task)) }))
    }

    async fn list_tasks(&self, request: Request<ListTasksRequest>) -> GrpcResult<ListTasksResponse> {
        let request = request.into_inner();
        let query = query([
            ("machine", request.machine),
            ("version", request.version.map(|version| version.to_string())),
            ("state", request.state),
            ("status", convert::task_status_name(request.status).map(query_text)),
            ("tag", request.tag),
            ("correlationId", request.correlation_id),
            ("approval", request.approval.then(|| "true".to_owned())),
            ("limit", request.page_size.map(|size| size.to_string())),
            ("cursor", Some(request.page_token)),
        ]);
        let (tasks, page_info) = tasks::find(&self.0, Some(&query)).await?;
        Ok(Response::new(ListTasksResponse {
            tasks: tasks.into_iter().map(message).collect(),
            total_size: page_info.total,
            next_page_token: page_info.next_cursor.unwrap_or_default(),
            total_is_exact: page_info.total_is_exact,
        }))
    }

    async fn list_task_history(&self, request: Request<ListTaskHistoryRequest>) -> GrpcResult<ListTaskHistoryResponse> {
        let ListTaskHistoryRequest { id, after, page_size } = request.into_inner();
        let query = query([("after", Some(after.to_string())), ("limit", page_size.map(|size| size.to_string()))]);
        let history = tasks::history_of(&self.0, &id, Some(&query)).await?;
        Ok(Response::new(ListTaskHistoryResponse { records: history.into_iter().map(record).collect() }))
    }

    async fn list_task_events(&self, request: Request<ListTaskEventsRequest>) -> GrpcResult<ListTaskEventsResponse> {
        let ListTaskEventsRequest { id, after, page_size } = request.into_inner();
        let query = query([("after", Some(after.to_string())), ("limit", page_size.map(|size| size.to_string()))]);
        let found = tasks::events_of(&self.0, &id, Some(&query)).await?;
        let source = &self.0.engine.config.outbox.source;
        let events = found.iter().map(|stored| events::event(stored, source)).collect();
        Ok(Response::new(ListTaskEventsResponse { events }))
    }

    async fn explain_task(&self, request: Request<ExplainTaskRequest>) -> GrpcResult<ExplainTaskResponse> {
        let why = tasks::explain(&self.0, &request.into_inner().id).await?;
        let reason = |reason: faena_machine::WaitReason| TaskWaitReason {
            code: reason.code.to_owned(),
            message: reason.message,
        };
        Ok(Response::new(ExplainTaskResponse {
            state: why.state,
            status: task_status(why.status),
            summary: why.summary,
            reasons: why.reasons.into_iter().map(reason).collect(),
        }))
    }

    async fn send_task_event(&self, request: Request<SendTaskEventRequest>) -> GrpcResult<SendTaskEventResponse> {
        let request = request.into_inner();
        let mut body = JsonBody::default();
        body.put("type", Some(request.r#type).filter(|kind| !kind.is_empty()));
        body.put("metadata", request.trace_id.map(|id| json!({ "traceId": id })));
        let body = body.into_text("payload", &request.payload_json);
        let answer = tasks::send_from(&self.0, &request.id, body.as_bytes()).await?;
        Ok(Response::new(SendTaskEventResponse { answer: Some(task_answer(answer)) }))
    }

    async fn approve_task(&self, request: Request<ApproveTaskRequest>) -> GrpcResult<ApproveTaskResponse> {
        let ApproveTaskRequest { id, hash, comment } = request.into_inner();
        let answer = tasks::decide_from(&self.0, &id, &texts([("hash", hash), ("comment", comment)]), true).await?;
        Ok(Response::new(ApproveTaskResponse { answer: Some(task_answer(answer)) }))
    }

    async fn reject_task(&self, request: Request<RejectTaskRequest>) -> GrpcResult<RejectTaskResponse> {
        let RejectTaskRequest { id, hash, comment } = request.into_inner();
        let answer = tasks::decide_from(&self.0, &id, &texts([("hash", hash), ("comment", comment)]), false).await?;
        Ok(Response::new(RejectTaskResponse { answer: Some(task_answer(answer)) }))
    }

    async fn cancel_task(&self, request: Request<CancelTaskRequest>) -> GrpcResult<CancelTaskResponse> {
        let CancelTaskRequest { id, reason } = request.into_inner();
        let answer = tasks::cancel_from(&self.0, &id, &texts([("reason", reason)])).await?;
        Ok(Response::new(CancelTaskResponse { answer: Some(task_answer(answer)) }))
    }

    async fn pause_task(&self, request: Request<PauseTaskRequest>) -> GrpcResult<PauseTaskResponse> {
        let answer = tasks::pause_by_id(&self.0, &request.into_inner().id).await?;
        Ok(Response::new(PauseTaskResponse { answer: Some(task_answer(answer)) }))
    }

    async fn resume_task(&self, request: Request<ResumeTaskRequest>) -> GrpcResult<ResumeTaskResponse> {
        let answer = tasks::resume_by_id(&self.0, &request.into_inner().id).await?;
        Ok(Response::new(ResumeTaskResponse { answer: Some(task_answer(answer)) }))
    }

    async fn fork_task(&self, request: Request<ForkTaskRequest>) -> GrpcResult<ForkTaskResponse> {
        let ForkTaskRequest { id, at, data_json } = request.into_inner();
        let mut body = JsonBody::default();
        body.put("at", at);
        let body = body.into_text("data", &data_json);
        let fork = task_forks::fork_from(&self.0, &id, body.as_bytes()).await?;
        let task = tasks::read_view(&self.0, &fork.to_string()).await?;
        Ok(Response::new(ForkTaskResponse { task: Some(message(task)) }))
    }

    async fn bulk_send_task_event(
        &self,
        request: Request<BulkSendTaskEventRequest>,
    ) -> GrpcResult<BulkSendTaskEventResponse> {
        let request = request.into_inner();
        let mut body = bulk_body(request.options);
        body.put("type", Some(request.r#type).filter(|kind| !kind.is_empty()));
        let body = body.into_text("payload", &request.payload_json);
        let result = Some(self.bulk("send", body.as_bytes()).await?);
        Ok(Response::new(BulkSendTaskEventResponse { result }))
    }

    async fn bulk_cancel_tasks(&self, request: Request<BulkCancelTasksRequest>) -> GrpcResult<BulkCancelTasksResponse> {
        let request = request.into_inner();
        let mut body = bulk_body(request.options);
        body.put("reason", request.reason);
        let result = Some(self.bulk("cancel", &body.into_bytes()).await?);
        Ok(Response::new(BulkCancelTasksResponse { result }))
    }

    async fn bulk_pause_tasks(&self, request: Request<BulkPauseTasksRequest>) -> GrpcResult<BulkPauseTasksResponse> {
        let body = bulk_body(request.into_inner().options).into_bytes();
        let result = Some(self.bulk("pause", &body).await?);
        Ok(Response::new(BulkPauseTasksResponse { result }))
    }

    async fn bulk_resume_tasks(&self, request: Request<BulkResumeTasksRequest>) -> GrpcResult<BulkResumeTasksResponse> {
        let body = bulk_body(request.into_inner().options).into_bytes();
        let result = Some(self.bulk("resume", &body).await?);
        Ok(Response::new(BulkResumeTasksResponse { result }))
    }
}

impl Tasks {
    async fn bulk(&self, action: &str, body: &[u8]) -> Result<TaskBulkResult, Status> {
        Ok(bulk_result(task_bulk::act_from(&self.0, action, body).await?))
    }
}

/// Returns a body with the fields that all bulk actions on tasks share.
fn bulk_body(options: Option<TaskBulkOptions>) -> JsonBody {
    let TaskBulkOptions { filter, all, dry_run, per_second } = options.unwrap_or_default();
    let filter = filter.unwrap_or_default();
    let mut fields = JsonBody::default();
    fields.put("machine", filter.machine);
    fields.put("version", filter.version);
    fields.put("state", filter.state);
    fields.put("status", convert::task_status_name(filter.status));
    fields.put("correlationId", filter.correlation_id);
    fields.put("approval", filter.approval.then_some(true));
    fields.put("tag", filter.tag);
    let mut body = JsonBody::default();
    body.put("filter", Some(fields.0));
    body.put("all", Some(all));
    body.put("dryRun", Some(dry_run));
    body.put("perSecond", per_second);
    body
}

/// Returns the body of a request whose fields are texts.
fn texts<const N: usize>(fields: [(&str, Option<String>); N]) -> Vec<u8> {
    let mut body = JsonBody::default();
    for (name, text) in fields {
        body.put(name, text);
    }
    body.into_bytes()
}
