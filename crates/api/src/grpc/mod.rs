//! gRPC on the same port as HTTP, with the same rules as the HTTP API and the WebSocket.

mod bulk;
mod convert;
mod events;
mod jobs;
#[cfg(test)]
mod parity;
mod schedules;
mod scopes;
mod task_messages;
mod tasks;
mod workers;

use axum::Router;
use faena_domain::{ErrorCode, FieldError};
use faena_wire::v1::{
    DESCRIPTOR, bulk_service_server::BulkServiceServer, event_service_server::EventServiceServer,
    job_service_server::JobServiceServer, schedule_service_server::ScheduleServiceServer,
    task_service_server::TaskServiceServer, worker_service_server::WorkerServiceServer,
};
use tonic::{Code, Response, Status, metadata::MetadataValue};

use crate::{Api, ApiError};

type GrpcResult<T> = Result<Response<T>, Status>;

/// Largest message that is decoded. A worker's message above the limit for bodies is rejected, but its call continues;
/// a message above this limit ends the call.
const MAX_MESSAGE_BYTES: usize = 16 << 20;

pub fn routes(api: &Api) -> Router<Api> {
    let batch_bytes = api.parser().limits.max_batch_bytes.max(MAX_MESSAGE_BYTES);
    let jobs = JobServiceServer::new(jobs::Jobs(api.clone())).max_decoding_message_size(batch_bytes);
    let workers = WorkerServiceServer::new(workers::Workers(api.clone())).max_decoding_message_size(MAX_MESSAGE_BYTES);
    let schedules =
        ScheduleServiceServer::new(schedules::Schedules(api.clone())).max_decoding_message_size(MAX_MESSAGE_BYTES);
    let tasks = TaskServiceServer::new(tasks::Tasks(api.clone())).max_decoding_message_size(MAX_MESSAGE_BYTES);
    let bulk = BulkServiceServer::new(bulk::BulkActions(api.clone()));
    let events = EventServiceServer::new(events::Events(api.clone()));
    let (health, health_service) = tonic_health::server::health_reporter();
    // These calls are asynchronous and this function is not, so they run in a task. They return immediately.
    tokio::spawn(async move {
        health.set_serving::<JobServiceServer<jobs::Jobs>>().await;
        health.set_serving::<WorkerServiceServer<workers::Workers>>().await;
        health.set_serving::<ScheduleServiceServer<schedules::Schedules>>().await;
        health.set_serving::<TaskServiceServer<tasks::Tasks>>().await;
        health.set_serving::<BulkServiceServer<bulk::BulkActions>>().await;
        health.set_serving::<EventServiceServer<events::Events>>().await;
    });
    let reflection = || {
        tonic_reflection::server::Builder::configure()
            .register_encoded_file_descriptor_set(DESCRIPTOR)
            .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
    };
    // Some tools ask only for v1alpha.
    let v1 = reflection().build_v1().expect("the descriptors come from the build");
    let v1alpha = reflection().build_v1alpha().expect("the descriptors come from the build");
    Router::new()
        .route_service("/faena.v1.JobService/{call}", jobs)
        .route_service("/faena.v1.WorkerService/{call}", workers)
        .route_service("/faena.v1.ScheduleService/{call}", schedules)
        .route_service("/faena.v1.TaskService/{call}", tasks)
        .route_service("/faena.v1.BulkService/{call}", bulk)
        .route_service("/faena.v1.EventService/{call}", events)
        .route_service("/grpc.health.v1.Health/{call}", health_service)
        .route_service("/grpc.reflection.v1.ServerReflection/{call}", v1)
        .route_service("/grpc.reflection.v1alpha.ServerReflection/{call}", v1alpha)
        .route_layer(axum::middleware::from_fn(scopes::check))
}

/// Builds a query string from the parameters that are set.
fn query<const N: usize>(pairs: [(&str, Option<String>); N]) -> String {
    let mut query = url::form_urlencoded::Serializer::new(String::new());
    for (name, value) in pairs {
        if let Some(value) = value {
            query.append_pair(name, &value);
        }
    }
    query.finish()
}

fn grpc_code(code: ErrorCode) -> Code {
    match code {
        ErrorCode::ValidationError
        | ErrorCode::PayloadTooLarge
        | ErrorCode::UnsupportedMediaType
        | ErrorCode::HeadersTooLarge => Code::InvalidArgument,
        ErrorCode::Unauthorized => Code::Unauthenticated,
        ErrorCode::Forbidden => Code::PermissionDenied,
        ErrorCode::NotFound => Code::NotFound,
        ErrorCode::MethodNotAllowed => Code::Unimplemented,
        ErrorCode::RequestTimeout => Code::DeadlineExceeded,
        ErrorCode::Conflict => Code::AlreadyExists,
        ErrorCode::StaleRun => Code::Aborted,
        ErrorCode::InvalidTransition => Code::FailedPrecondition,
        ErrorCode::RateLimited => Code::ResourceExhausted,
        ErrorCode::InternalError => Code::Internal,
        ErrorCode::Unavailable => Code::Unavailable,
    }
}

/// The metadata `x-error-code` has the error code of the HTTP API, `retry-after` the seconds to wait.
impl From<ApiError> for Status {
    fn from(error: ApiError) -> Status {
        let message = match error.details.len() {
            0 | 1 => error.message,
            _ => format!("{}; {}", error.message, FieldError::join(&error.details)),
        };
        let mut status = Status::new(grpc_code(error.code), message);
        if let Ok(value) = MetadataValue::try_from(error.code.as_str()) {
            status.metadata_mut().insert("x-error-code", value);
        }
        if let Some(seconds) = error.retry_after_seconds {
            status.metadata_mut().insert("retry-after", MetadataValue::from(seconds));
            // The retry policies of gRPC libraries read this one.
            status.metadata_mut().insert("grpc-retry-pushback-ms", MetadataValue::from(seconds * 1_000));
        }
        status
    }
}
