//! What a worker does with a job: the handler for its type, and whatever stands around it.

use std::{collections::HashMap, future::Future, sync::Arc};

use futures_util::future::BoxFuture;
use serde::{Serialize, de::DeserializeOwned};
use serde_json::value::{RawValue, to_raw_value};

use crate::{Context, JobError};

/// How a run ended: with its result as JSON, or not.
pub type Outcome = Result<Box<RawValue>, JobError>;

pub(crate) type Handler = Arc<dyn Fn(Context) -> BoxFuture<'static, Outcome> + Send + Sync>;
type Around = Arc<dyn Fn(Context, Next) -> BoxFuture<'static, Outcome> + Send + Sync>;

#[derive(Clone, Default)]
pub(crate) struct Handlers {
    by_type: HashMap<String, Handler>,
    /// Types that begin with this text, the longest first.
    by_prefix: Vec<(String, Handler)>,
    around: Vec<Around>,
}

impl Handlers {
    /// `kind` is a type, or the beginning of several with `*` behind it.
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

    pub fn add_around<F, Fut>(&mut self, around: F)
    where
        F: Fn(Context, Next) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Outcome> + Send + 'static,
    {
        self.around.push(Arc::new(move |context, next| Box::pin(around(context, next))));
    }

    /// What the worker says it can do.
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

/// The rest of the way of a job, as something that stands around its handler sees it.
pub struct Next {
    handlers: Arc<Handlers>,
    depth: usize,
}

impl Next {
    pub(crate) fn new(handlers: Arc<Handlers>) -> Next {
        Next { handlers, depth: 0 }
    }

    /// Goes on: to the next one around, and at last to the handler.
    pub fn run(mut self, context: Context) -> BoxFuture<'static, Outcome> {
        if let Some(around) = self.handlers.around.get(self.depth).cloned() {
            self.depth += 1;
            return around(context, self);
        }
        match self.handlers.find(context.kind()) {
            Some(handler) => handler(context),
            None => {
                let error = JobError::retry(format!("this worker has no handler for {}", context.kind()));
                Box::pin(async { Err(error) })
            }
        }
    }
}

/// A handler of types that serde knows: reads the payload, runs, writes the result.
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
                .map_err(|error| JobError::fail(format!("the result cannot be written as JSON: {error}")))
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_handler_that_fits_best_is_chosen() {
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
