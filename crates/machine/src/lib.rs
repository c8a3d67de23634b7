//! State machines of tasks: their definition, its checks, and the pure function that applies an event to a task.

mod builtin;
mod check;
mod definition;
mod diagram;
mod expression;
mod finding;
mod job;
mod node;
mod parse;
mod step;
mod task;
mod types;

pub use builtin::BUILT_IN;
pub use definition::*;
pub use expression::{Expression, Template, Variables};
pub use finding::Finding;
pub use node::Place;
pub use step::{Input, Step, WaitReason, create, step, why};
pub use task::*;
