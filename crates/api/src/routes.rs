//! Routes that declare who may call them.
//!
//! [`Routes`] has no method that adds a route without a [`Needs`] and an [`Operation`], so neither the scope nor the
//! documentation of a route can be forgotten. Tests compare the declared routes with the authorization matrix, and the
//! OpenAPI document is generated from them.

use std::sync::Arc;

use axum::{
    Router,
    extract::{RawPathParams, Request, State, rejection::RawPathParamsRejection},
    handler::Handler,
    middleware::{self, Next},
    response::{IntoResponse, Response},
    routing::{MethodFilter, on},
};
use faena_domain::KeyScope;

use crate::{
    Api, ApiResult, access, context,
    openapi::operation::Operation,
    payloads::{self, DocumentedRoute},
};

/// What a caller needs for a route: a key with the scope, unless no keys exist, and access to the queues that
/// the route concerns.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Needs {
    /// Nothing: health checks, and transports that check the key themselves.
    Nothing,
    /// The handler narrows its answer to the queues of the caller.
    Scope(KeyScope),
    /// The answer is about all queues, so a key that is restricted to some of them is rejected.
    AllQueues(KeyScope),
    /// The job in the path must be in a queue of the caller.
    Job(KeyScope),
    /// The queue in the path must be one of the caller's.
    Queue(KeyScope),
    /// The schedule in the path must create jobs in a queue of the caller.
    Schedule(KeyScope),
    /// The webhook in the path must be about a job in a queue of the caller.
    Webhook(KeyScope),
    /// A service that takes part in tasks may call as well, with the scope `worker`. Tasks belong to no queue, so a key that is
    /// restricted to queues is rejected.
    Task(KeyScope),
    /// The stream of events: `read`, narrowed to the queues of the caller, or `worker`, narrowed to the events of tasks.
    Events,
}

impl Needs {
    /// Returns the scopes of which the caller needs one. Empty: it needs no key.
    pub fn scopes(self) -> Vec<KeyScope> {
        match self {
            Needs::Nothing => Vec::new(),
            Needs::Scope(scope)
            | Needs::AllQueues(scope)
            | Needs::Job(scope)
            | Needs::Queue(scope)
            | Needs::Schedule(scope)
            | Needs::Webhook(scope) => vec![scope],
            Needs::Task(scope) => vec![scope, KeyScope::Worker],
            Needs::Events => vec![KeyScope::Read, KeyScope::Worker],
        }
    }
}

/// A route as it was declared.
#[derive(Clone, Debug)]
pub struct DeclaredRoute {
    pub method: &'static str,
    pub path: String,
    pub needs: Needs,
    pub operation: Operation,
}

/// Adds a route to a router.
type AddRoute = Box<dyn FnOnce(Router<Api>, &Api) -> Router<Api>>;

/// Routes below one path.
pub struct Routes {
    added: Vec<AddRoute>,
    declared: Vec<DeclaredRoute>,
    below: &'static str,
}

/// Defines functions that add a route for one HTTP method.
macro_rules! methods {
    ($($name:ident: $method:ident),+) => {
        $(pub fn $name<H: Handler<T, Api>, T: 'static>(
            self,
            path: &str,
            needs: Needs,
            handler: H,
            documentation: fn() -> Operation,
        ) -> Routes {
            self.add((MethodFilter::$method, stringify!($method)), path, needs, handler, documentation())
        })+
    };
}

impl Routes {
    /// Returns an empty list of routes below `path`.
    pub fn below(path: &'static str) -> Routes {
        Routes { added: Vec::new(), declared: Vec::new(), below: path }
    }

    methods!(get: GET, post: POST, patch: PATCH, delete: DELETE);

    fn add<H: Handler<T, Api>, T: 'static>(
        mut self,
        (filter, method): (MethodFilter, &'static str),
        path: &str,
        needs: Needs,
        handler: H,
        operation: Operation,
    ) -> Routes {
        let path = format!("{}{path}", self.below);
        self.declared.push(DeclaredRoute { method, path: path.clone(), needs, operation });
        self.added.push(Box::new(move |router, api| {
            let route = Arc::new(DocumentedRoute { method, path: path.clone() });
            let guard = middleware::from_fn_with_state((api.clone(), needs, route), check);
            router.route(&path, on(filter, handler).route_layer(guard))
        }));
        self
    }

    /// Adds the routes of another list.
    pub fn merge(mut self, other: Routes) -> Routes {
        self.added.extend(other.added);
        self.declared.extend(other.declared);
        self
    }

    /// Returns the router of these routes.
    pub fn router(self, api: &Api) -> Router<Api> {
        self.added.into_iter().fold(Router::new(), |router, add| add(router, api))
    }

    /// Returns the routes as they were declared.
    pub fn declared(self) -> Vec<DeclaredRoute> {
        self.declared
    }
}

/// Runs a request if its caller has what the route needs, and hides what the caller may not see in the answer.
async fn check(
    State((api, needs, route)): State<(Api, Needs, Arc<DocumentedRoute>)>,
    parameters: Result<RawPathParams, RawPathParamsRejection>,
    request: Request,
    next: Next,
) -> Response {
    // A path that is not UTF-8 has no parameters; the handler rejects it.
    let parameter = |name: &str| {
        let found = parameters.iter().flatten().find(|(key, _)| *key == name);
        found.map(|(_, value)| value.to_owned()).unwrap_or_default()
    };
    match check_access(&api, needs, &parameter).await {
        // The answers of routes that need no key contain no payloads.
        Ok(()) if needs == Needs::Nothing => next.run(request).await,
        Ok(()) => payloads::hide(&api, &route, next.run(request).await).await,
        Err(error) => error.into_response(),
    }
}

/// Fails if the caller of the current request does not have what a route needs.
async fn check_access(api: &Api, needs: Needs, parameter: &impl Fn(&str) -> String) -> ApiResult<()> {
    let scopes = needs.scopes();
    if scopes.is_empty() {
        return Ok(());
    }
    let caller = context::access()?;
    caller.require_any(&scopes)?;
    if caller.queues().is_none() {
        return Ok(());
    }
    match needs {
        Needs::Nothing | Needs::Scope(_) => Ok(()),
        Needs::AllQueues(_) | Needs::Task(_) => Ok(caller.require_all_queues()?),
        Needs::Events => access::require_events(&caller),
        Needs::Job(_) => access::require_job_text(api, &parameter("id")).await,
        Needs::Queue(_) => Ok(caller.require_queue(&parameter("name"))?),
        Needs::Schedule(_) => access::require_schedule(api, &parameter("id")).await,
        Needs::Webhook(_) => access::require_webhook(api, &parameter("id")).await,
    }
}
