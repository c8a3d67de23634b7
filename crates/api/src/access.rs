//! Keeps callers that are restricted to some queues within them, in REST and gRPC.
//!
//! For such a caller, the jobs and schedules of other queues do not exist: the answer is the same as for an unknown id.
//! These checks cost nothing for a caller without a restriction.

use faena_auth::{Access, Credentials};
use faena_domain::{ErrorCode, JobId, JobView, KeyScope, NewJob, SecretText, Timestamp, Trace};
use faena_engine::{EngineError, workers::Registration};
use faena_machine::Caller as TaskCaller;
use faena_store::{Filter, StoreError};

use crate::{
    Api, ApiError, ApiResult,
    context::{self, Caller},
    payloads,
    request::parse_job_id,
};

/// Returns the queues that the caller is restricted to. `None`: all queues.
pub fn queues() -> ApiResult<Option<Vec<String>>> {
    Ok(context::access()?.queues().map(<[String]>::to_vec))
}

/// Returns whether the caller may see every queue.
pub fn is_unrestricted() -> bool {
    context::access().is_ok_and(|access| access.queues().is_none())
}

/// Returns the error of a submission. The job that it conflicts with is named if the caller may see that job.
pub async fn submission_error(api: &Api, error: EngineError) -> ApiError {
    let existing_job = match &error {
        EngineError::Store(StoreError::Conflict { existing_job, .. }) => *existing_job,
        _ => None,
    };
    let answer = ApiError::from(error);
    match existing_job {
        Some(id) if answer.details.is_empty() && job(api, id).await.is_ok() => answer.with_existing_job(Some(id)),
        _ => answer,
    }
}

/// Returns whether the caller may see this queue.
pub fn includes_queue(queue: &str) -> bool {
    context::access().is_ok_and(|access| access.includes_queue(queue))
}

pub fn require_queue(queue: &str) -> ApiResult<()> {
    Ok(context::access()?.require_queue(queue)?)
}

/// Narrows a filter to the queues of the caller. Fails if it searches payloads or errors that the caller may not see.
pub fn restrict(filter: &mut Filter) -> ApiResult<()> {
    filter.queues = queues()?;
    payloads::require_searchable("payload", filter.payload.as_ref())?;
    payloads::require_searchable("error", filter.error.as_ref())
}

/// Returns a job that the caller may see.
pub async fn job(api: &Api, id: JobId) -> ApiResult<JobView> {
    let job = api.engine.store.job_get(id).await?.filter(|job| includes_queue(&job.queue));
    Ok(job.ok_or(StoreError::NotFound(id))?)
}

/// Fails if the caller may not see this job. Reads it only for a restricted caller.
pub async fn require_job(api: &Api, id: JobId) -> ApiResult<()> {
    if queues()?.is_some() {
        job(api, id).await?;
    }
    Ok(())
}

pub async fn require_job_text(api: &Api, id: &str) -> ApiResult<()> {
    require_job(api, parse_job_id(id)?).await
}

/// Fails if the caller may not see this schedule. Reads it only for a restricted caller.
pub async fn require_schedule(api: &Api, text: &str) -> ApiResult<()> {
    if queues()?.is_none() {
        return Ok(());
    }
    let schedule = match text.parse() {
        Ok(id) => api.engine.store.schedule_get(id).await?,
        Err(_) => None,
    };
    match schedule {
        Some(schedule) if includes_queue(&schedule.spec.job.queue) => Ok(()),
        _ => Err(ApiError::not_found(format!("no schedule \"{text}\""))),
    }
}

/// Fails if the caller may not see this webhook, as if it did not exist.
pub async fn require_webhook(api: &Api, text: &str) -> ApiResult<()> {
    let missing = || ApiError::not_found(format!("no webhook {text}"));
    let webhook = match text.parse() {
        Ok(id) => api.engine.store.webhook_get(id).await?,
        Err(_) => None,
    };
    let webhook = webhook.ok_or_else(missing)?;
    let is_visible = match (queues()?, webhook.job_id) {
        (None, _) => true,
        // Tasks belong to no queue.
        (Some(_), None) => false,
        (Some(_), Some(job)) => api.engine.store.job_get(job).await?.is_some_and(|job| includes_queue(&job.queue)),
    };
    if is_visible { Ok(()) } else { Err(missing()) }
}

/// Fails if a restricted caller submits to another queue, or makes a job depend on a job of another queue.
pub async fn require_submittable(api: &Api, jobs: &[NewJob]) -> ApiResult<()> {
    if queues()?.is_none() {
        return Ok(());
    }
    for job in jobs {
        require_queue(&job.queue)?;
        for parent in &job.options.depends_on {
            // A parent in the same request is checked separately.
            if jobs.iter().any(|other| other.id == *parent) {
                continue;
            }
            require_job(api, *parent).await.map_err(|error| match error.code {
                ErrorCode::NotFound => ApiError::invalid_field("dependsOn", format!("there is no job {parent}")),
                _ => error,
            })?;
        }
    }
    Ok(())
}

/// Returns whether the caller sees the events of tasks only, because it lacks the scope `read`.
pub fn sees_tasks_only() -> bool {
    context::access().is_ok_and(|access| access.require(KeyScope::Read).is_err())
}

/// Fails if the caller may not see any event. Tasks belong to no queue, so a worker that is restricted to queues sees none of them.
pub fn require_events(caller: &Access) -> ApiResult<()> {
    caller.require_any(&[KeyScope::Read, KeyScope::Worker])?;
    if caller.require(KeyScope::Read).is_err() {
        caller.require_all_queues()?;
    }
    Ok(())
}

/// Returns the caller as tasks identify it.
pub fn task_caller() -> ApiResult<TaskCaller> {
    let access = context::access()?;
    let (actor, groups) = (access.actor().to_owned(), access.groups().to_vec());
    Ok(TaskCaller { actor, identity: access.identity(), groups })
}

/// Returns the caller if it may decide on approvals, which needs the scope `write`.
pub fn task_decider() -> ApiResult<Option<TaskCaller>> {
    let may_decide = context::access()?.require(KeyScope::Write).is_ok();
    may_decide.then(task_caller).transpose()
}

/// Prepares the registration of a worker: it needs the scope `worker`, belongs to the key of its caller, and gets only
/// jobs of the queues of that key.
fn authorize_worker(caller: &Access, registration: &mut Registration) -> ApiResult<()> {
    caller.require(KeyScope::Worker)?;
    registration.api_key = caller.key();
    if let Some(allowed) = caller.queues() {
        for queue in &registration.queues {
            caller.require_queue(queue)?;
        }
        if registration.queues.is_empty() {
            registration.queues = allowed.to_vec();
        }
    }
    Ok(())
}

/// Returns the registration of a worker if its caller may register it. A key in the message takes precedence over that of the request.
pub fn authorize_registration(
    api: &Api,
    caller: &Caller,
    mut registration: Registration,
    token: Option<&SecretText>,
) -> ApiResult<Registration> {
    let access = match token {
        Some(key) => {
            let key = Some(key.reveal());
            api.authenticate(Credentials { peer: None, key, person: None, groups: None }, Timestamp::now())
        }
        None => caller.access.clone(),
    };
    if access.is_err() {
        api.traffic.record_wrong_key(caller.address)?;
    }
    let authorized = access.map_err(ApiError::from).and_then(|access| authorize_worker(&access, &mut registration));
    match authorized {
        Ok(()) => Ok(registration),
        Err(error) => {
            tracing::info!(worker = registration.worker_id, reason = error.message, "worker rejected");
            Err(error)
        }
    }
}

/// Removes jobs that the caller may not see, with their entries in the timeline. Returns `None` if no job is left.
pub fn restrict_trace(trace: Trace) -> Option<Trace> {
    if is_unrestricted() {
        return Some(trace);
    }
    // Tasks belong to no queue.
    let (mut trace, all) = (Trace { tasks: Vec::new(), jobs: Vec::new(), ..trace.clone() }, trace.jobs);
    trace.jobs = all.into_iter().filter(|job| includes_queue(&job.queue)).collect();
    let shown: Vec<JobId> = trace.jobs.iter().map(|job| job.id).collect();
    for job in &mut trace.jobs {
        job.dependents.retain(|id| shown.contains(id));
    }
    trace.timeline.retain(|entry| entry.job_id.is_some_and(|id| shown.contains(&id)));
    (!trace.jobs.is_empty()).then_some(trace)
}
