//! State machines of tasks: their definition, its checks, and the pure function that applies an event to a task.

mod builtin;
mod check;
mod cycles;
mod definition;
mod diagram;
mod envelope;
mod expression;
mod finding;
mod format;
mod job;
mod node;
mod parse;
mod step;
mod task;
mod types;
mod verify;

pub use builtin::BUILT_IN;
pub use definition::*;
pub use envelope::{Envelope, ORIGINATOR};
pub use expression::{Expression, Template, Variables};
pub use finding::Finding;
pub use format::schema;
pub use node::Position;
pub use step::{HistoryPoint, Input, Migration, Step, WaitReason, create, fork, queue, step, why};
pub use task::*;
pub use verify::{contradictions, with_timers};
