//! The machines that are built into Faena.

/// Names and definitions of the built-in machines.
pub const BUILT_IN: [(&str, &str); 1] = [("coding-task", include_str!("../machines/coding-task.yaml"))];
