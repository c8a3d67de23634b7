//! Checks the scope of every gRPC call. A call that is not in the table needs an admin key.

use axum::{
    extract::Request,
    middleware::Next,
    response::{IntoResponse, Response},
};
use tonic::Status;

use faena_domain::KeyScope::{self, Admin, Read, Worker, Write};

use crate::{ApiResult, context, payloads::hide_in_call};

/// The scopes of which each call needs one, by the last two segments of its path.
const CALLS: &[(&str, &[KeyScope])] = &[
    ("faena.v1.BulkService/GetBulkAction", &[Read]),
    ("faena.v1.BulkService/ListBulkActions", &[Read]),
    ("faena.v1.BulkService/CancelBulkAction", &[Write]),
    ("faena.v1.EventService/Subscribe", &[Read, Worker]),
    ("faena.v1.JobService/CreateJob", &[Write]),
    ("faena.v1.JobService/BatchCreateJobs", &[Write]),
    ("faena.v1.JobService/GetJob", &[Read]),
    ("faena.v1.JobService/ListJobs", &[Read]),
    ("faena.v1.JobService/GetJobLog", &[Read]),
    ("faena.v1.JobService/CancelJob", &[Write]),
    ("faena.v1.JobService/RetryJob", &[Write]),
    ("faena.v1.JobService/DeleteJob", &[Write]),
    ("faena.v1.JobService/WatchJob", &[Read]),
    ("faena.v1.ScheduleService/CreateSchedule", &[Write]),
    ("faena.v1.ScheduleService/GetSchedule", &[Read]),
    ("faena.v1.ScheduleService/ListSchedules", &[Read]),
    ("faena.v1.ScheduleService/UpdateSchedule", &[Write]),
    ("faena.v1.ScheduleService/DeleteSchedule", &[Write]),
    ("faena.v1.ScheduleService/TriggerSchedule", &[Write]),
    ("faena.v1.ScheduleService/SetScheduleActive", &[Write]),
    ("faena.v1.ScheduleService/PreviewSchedule", &[Read]),
    ("faena.v1.ScheduleService/ValidateSchedule", &[Read]),
    ("faena.v1.ScheduleService/ListScheduleTicks", &[Read]),
    ("faena.v1.TaskService/RegisterMachine", &[Write]),
    ("faena.v1.TaskService/GetMachine", &[Read]),
    ("faena.v1.TaskService/ListMachines", &[Read]),
    ("faena.v1.TaskService/CheckMachine", &[Read]),
    ("faena.v1.TaskService/GetMachineDiagram", &[Read]),
    ("faena.v1.TaskService/GetMachineSchema", &[Read]),
    ("faena.v1.TaskService/MigrateTasks", &[Write]),
    ("faena.v1.TaskService/CreateTask", &[Write]),
    ("faena.v1.TaskService/GetTask", &[Read, Worker]),
    ("faena.v1.TaskService/ListTasks", &[Read, Worker]),
    ("faena.v1.TaskService/ListTaskHistory", &[Read]),
    ("faena.v1.TaskService/ListTaskEvents", &[Read]),
    ("faena.v1.TaskService/ExplainTask", &[Read]),
    ("faena.v1.TaskService/SendTaskEvent", &[Write, Worker]),
    ("faena.v1.TaskService/ApproveTask", &[Write]),
    ("faena.v1.TaskService/RejectTask", &[Write]),
    ("faena.v1.TaskService/CancelTask", &[Write]),
    ("faena.v1.TaskService/PauseTask", &[Write]),
    ("faena.v1.TaskService/ResumeTask", &[Write]),
    ("faena.v1.TaskService/ForkTask", &[Write]),
    ("faena.v1.TaskService/BulkSendTaskEvent", &[Write]),
    ("faena.v1.TaskService/BulkCancelTasks", &[Write]),
    ("faena.v1.TaskService/BulkPauseTasks", &[Write]),
    ("faena.v1.TaskService/BulkResumeTasks", &[Write]),
];

/// Tasks and bulk actions belong to no queue, so a key that is restricted to queues may not call these.
const OF_ALL_QUEUES: [&str; 2] = ["/faena.v1.TaskService/", "/faena.v1.BulkService/"];

const CONNECT: &str = "faena.v1.WorkerService/Connect";

/// Runs a call if its caller has the scope it needs, and hides what the caller may not see in the answer.
pub async fn check(request: Request, next: Next) -> Response {
    let path = request.uri().path().to_owned();
    match check_access(&path) {
        // The key of a worker may be in its first message, which is not read yet. Workers always see payloads.
        Ok(()) if needs(&path).is_none() => next.run(request).await,
        Ok(()) => hide_in_call(&path, next.run(request).await),
        Err(error) => Status::from(error).into_http::<axum::body::Body>().into_response(),
    }
}

fn check_access(path: &str) -> ApiResult<()> {
    let Some(scopes) = needs(path) else { return Ok(()) };
    let caller = context::access()?;
    caller.require_any(scopes)?;
    if OF_ALL_QUEUES.iter().any(|service| path.starts_with(service)) {
        caller.require_all_queues()?;
    }
    Ok(())
}

/// Returns the scopes of which a call needs one, or `None` if it needs no key.
fn needs(path: &str) -> Option<&'static [KeyScope]> {
    let call = path.trim_start_matches('/');
    if call.starts_with("grpc.health.") {
        return None;
    }
    // The key may be in the `register` message, so the call checks it there.
    if call == CONNECT {
        return None;
    }
    if call.starts_with("grpc.reflection.") {
        return Some(&[Read]);
    }
    Some(CALLS.iter().find(|(name, _)| *name == call).map_or(&[Admin], |(_, scopes)| *scopes))
}

#[cfg(test)]
mod tests {
    use faena_wire::v1::DESCRIPTOR;
    use prost::Message;
    use prost_types::FileDescriptorSet;

    use super::*;

    #[test]
    fn every_call_of_the_protocol_declares_its_scope() {
        let files = FileDescriptorSet::decode(DESCRIPTOR).expect("the descriptors come from the build");
        let mut calls = Vec::new();
        for file in files.file.iter().filter(|file| file.package() == "faena.v1") {
            for service in &file.service {
                let name = service.name();
                calls.extend(service.method.iter().map(|method| format!("faena.v1.{name}/{}", method.name())));
            }
        }
        let mut declared: Vec<String> = CALLS.iter().map(|(name, _)| (*name).to_owned()).collect();
        declared.push(CONNECT.to_owned());
        calls.sort();
        declared.sort();
        assert_eq!(declared, calls);
    }

    #[test]
    fn an_unknown_call_needs_an_admin_key() {
        assert_eq!(needs("/faena.v1.JobService/Unknown"), Some(&[Admin] as &[KeyScope]));
        assert_eq!(needs("/grpc.health.v1.Health/Check"), None);
    }
}
