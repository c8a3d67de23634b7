//! Handlers and middleware: what a worker does with a job.

use std::{collections::HashMap, future::Future, sync::Arc};

use futures_util::future::BoxFuture;
use serde::{Serialize, de::DeserializeOwned};
use serde_json::value::{RawValue, to_raw_value};

use crate::{Context, JobError};

/// How a run ended: with its result as JSON, or with an error.
pub type HandlerResult = Result<Box<RawValue>, JobError>;

pub(crate) type Handler = Arc<dyn Fn(Context) -> BoxFuture<'static, HandlerResult> + Send + Sync>;
type Middleware = Arc<dyn Fn(Context, Next) -> BoxFuture<'static, HandlerResult> + Send + Sync>;

#[derive(Clone, Default)]
pub(crate) struct Handlers {
    by_type: HashMap<String, Handler>,
    /// Handlers for type prefixes, longest prefix first.
    by_prefix: Vec<(String, Handler)>,
    middleware: Vec<Middleware>,
}

impl Handlers {
    /// Adds a handler for a type, or for all types with a prefix if `kind` ends in `*`.
    pub fn add(&mut self, kind: String, handler: Handler) {
        match kind.strip_suffix('*') {
            Some(prefix) => {
                self.by_prefix.retain(|(known, _)| known != prefix);
                self.by_prefix.push((prefix.to_owned(), handler));
                self.by_prefix.sort_by_key(|(prefix, _)| std::cmp::Reverse(prefix.len()));
            }
            None => {
                self.by_type.insert(kind, handler);
            }
        }
    }

    pub fn add_middleware<F, Fut>(&mut self, middleware: F)
    where
        F: Fn(Context, Next) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = HandlerResult> + Send + 'static,
    {
        self.middleware.push(Arc::new(move |context, next| Box::pin(middleware(context, next))));
    }

    /// Returns the types that the worker registers for, with `*` after a prefix.
    pub fn names(&self) -> Vec<String> {
        let prefixes = self.by_prefix.iter().map(|(prefix, _)| format!("{prefix}*"));
        let mut names: Vec<String> = self.by_type.keys().cloned().chain(prefixes).collect();
        names.sort_unstable();
        names
    }

    fn find(&self, kind: &str) -> Option<&Handler> {
        let prefix = || self.by_prefix.iter().find(|(prefix, _)| kind.starts_with(prefix)).map(|(_, handler)| handler);
        self.by_type.get(kind).or_else(prefix)
    }
}

/// The rest of the chain, as a middleware sees it: the inner middleware and the handler.
///
/// See [`Worker::middleware`](crate::Worker::middleware).
pub struct Next {
    handlers: Arc<Handlers>,
    depth: usize,
}

impl Next {
    pub(crate) fn new(handlers: Arc<Handlers>) -> Next {
        Next { handlers, depth: 0 }
    }

    /// Runs the next middleware, or the handler if this was the last one.
    pub fn run(mut self, context: Context) -> BoxFuture<'static, HandlerResult> {
        if let Some(middleware) = self.handlers.middleware.get(self.depth).cloned() {
            self.depth += 1;
            return middleware(context, self);
        }
        match self.handlers.find(context.kind()) {
            Some(handler) => handler(context),
            None => {
                let error = JobError::retry(format!("this worker has no handler for \"{}\"", context.kind()));
                Box::pin(async { Err(error) })
            }
        }
    }
}

/// Wraps a typed handler: deserializes the payload, runs the handler, serializes the result.
pub(crate) fn typed<P, R, F, Fut>(handler: F) -> Handler
where
    P: DeserializeOwned + Send + 'static,
    R: Serialize,
    F: Fn(Context, P) -> Fut + Send + Sync + 'static,
    Fut: Future<Output = Result<R, JobError>> + Send + 'static,
{
    let handler = Arc::new(handler);
    Arc::new(move |context| {
        let handler = handler.clone();
        Box::pin(async move {
            let payload = context.payload_as::<P>()?;
            let result = handler(context, payload).await?;
            to_raw_value(&result)
                .map_err(|error| JobError::fail(format!("cannot serialize the result as JSON: {error}")))
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_most_specific_handler_is_chosen() {
        let mut handlers = Handlers::default();
        for kind in ["a.*", "a.b", "a.b.*"] {
            handlers.add(kind.into(), typed(async |_, ()| Ok(())));
        }
        assert_eq!(handlers.names(), ["a.*", "a.b", "a.b.*"]);
        let found = |kind: &str| handlers.find(kind).map(Arc::as_ptr);
        assert_ne!(found("a.b"), found("a.x"));
        assert_ne!(found("a.b.c"), found("a.x"));
        assert!(found("b").is_none());
    }
}
