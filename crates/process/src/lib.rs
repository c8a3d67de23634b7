//! Runs programs so that none of their processes outlives them, and so that they cannot read the environment or memory
//! of this process.
//!
//! A guard (`faena guard`) runs between this process and a program. Every process that the program starts, including
//! one that leaves its group and session, becomes a child of the guard when its parent ends, because the guard is a
//! subreaper. The guard kills them all when the program ends, or when this process ends for any reason. If the guard is
//! killed, its processes become children of this process, which kills them (`children`).
//!
//! The guard starts without any environment variable that influences it: the variables of the program have a prefix
//! until the program starts.

mod children;
mod end;
mod folder;
mod guard;
mod program;
mod protection;

pub use children::{KnownChild, spawn};
pub use end::ProcessEnd;
pub use folder::{create as create_folder, remove as remove_folder};
pub use guard::{GuardOptions, run_guard};
pub use program::{Folder, Program, RunningControl, RunningEnd, RunningProgram, start};
pub use protection::{adopt_orphans, forbid_inspection};
