//! gRPC, on the same port: the same meaning as REST and the WebSocket, in other words.

mod events;
mod jobs;
mod schedules;
mod workers;

use axum::Router;
use faena_domain::ErrorCode;
use faena_wire::v1::{
    DESCRIPTOR, event_service_server::EventServiceServer, job_service_server::JobServiceServer,
    schedule_service_server::ScheduleServiceServer, worker_service_server::WorkerServiceServer,
};
use tonic::{Code, Status, metadata::MetadataValue};

use crate::{Api, ApiError};

/// The largest message that is read at all; what is larger than a body may be is refused message by message.
const HARD_LIMIT: usize = 16 << 20;

pub fn routes(api: &Api) -> Router<Api> {
    let batch = api.parser().limits.max_batch_bytes.max(HARD_LIMIT);
    let jobs = JobServiceServer::new(jobs::Jobs(api.clone())).max_decoding_message_size(batch);
    let workers = WorkerServiceServer::new(workers::Workers(api.clone())).max_decoding_message_size(HARD_LIMIT);
    let schedules = ScheduleServiceServer::new(schedules::Schedules(api.clone())).max_decoding_message_size(HARD_LIMIT);
    let events = EventServiceServer::new(events::Events(api.clone()));
    let (health, serving) = tonic_health::server::health_reporter();
    let reporter = health.clone();
    // Nothing in it waits: the map behind it is free.
    tokio::spawn(async move {
        reporter.set_serving::<JobServiceServer<jobs::Jobs>>().await;
        reporter.set_serving::<WorkerServiceServer<workers::Workers>>().await;
        reporter.set_serving::<ScheduleServiceServer<schedules::Schedules>>().await;
        reporter.set_serving::<EventServiceServer<events::Events>>().await;
    });
    let reflection = || {
        tonic_reflection::server::Builder::configure()
            .register_encoded_file_descriptor_set(DESCRIPTOR)
            .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
    };
    let v1 = reflection().build_v1().expect("the descriptors come from the build");
    let v1alpha = reflection().build_v1alpha().expect("the descriptors come from the build");
    Router::new()
        .route_service("/faena.v1.JobService/{call}", jobs)
        .route_service("/faena.v1.WorkerService/{call}", workers)
        .route_service("/faena.v1.ScheduleService/{call}", schedules)
        .route_service("/faena.v1.EventService/{call}", events)
        .route_service("/grpc.health.v1.Health/{call}", serving)
        .route_service("/grpc.reflection.v1.ServerReflection/{call}", v1)
        .route_service("/grpc.reflection.v1alpha.ServerReflection/{call}", v1alpha)
}

/// The same errors as everywhere; the code stands in the metadata `x-error-code` too.
impl From<ApiError> for Status {
    fn from(error: ApiError) -> Status {
        let code = match error.code {
            ErrorCode::ValidationError | ErrorCode::PayloadTooLarge => Code::InvalidArgument,
            ErrorCode::NotFound => Code::NotFound,
            ErrorCode::Unauthorized => Code::Unauthenticated,
            ErrorCode::Forbidden => Code::PermissionDenied,
            ErrorCode::Conflict => Code::AlreadyExists,
            ErrorCode::StaleRun => Code::Aborted,
            ErrorCode::InvalidTransition => Code::FailedPrecondition,
            ErrorCode::RateLimited => Code::ResourceExhausted,
            ErrorCode::Unavailable => Code::Unavailable,
            ErrorCode::RequestTimeout => Code::DeadlineExceeded,
            ErrorCode::MethodNotAllowed => Code::Unimplemented,
            ErrorCode::InternalError => Code::Internal,
        };
        let errors: String = error.details.iter().map(|fault| format!("; {}: {}", fault.path, fault.message)).collect();
        let text = if error.details.len() > 1 { format!("{}{errors}", error.message) } else { error.message };
        let mut status = Status::new(code, text);
        if let Ok(value) = MetadataValue::try_from(error.code.as_str()) {
            status.metadata_mut().insert("x-error-code", value);
        }
        status
    }
}
