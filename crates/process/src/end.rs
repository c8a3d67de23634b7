//! How a process ended.

use std::{fmt, os::unix::process::ExitStatusExt, process::ExitStatus};

use serde::{Deserialize, Serialize};

#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum ProcessEnd {
    Exited(i32),
    KilledBySignal(i32),
    NotStarted(String),
    /// Its guard was killed. Nothing is known about the program, except that it has ended too.
    GuardLost,
}

impl ProcessEnd {
    pub fn exit_code(&self) -> Option<i32> {
        match self {
            ProcessEnd::Exited(code) => Some(*code),
            ProcessEnd::KilledBySignal(_) | ProcessEnd::NotStarted(_) | ProcessEnd::GuardLost => None,
        }
    }

    pub fn is_success(&self) -> bool {
        self.exit_code() == Some(0)
    }
}

impl From<ExitStatus> for ProcessEnd {
    fn from(status: ExitStatus) -> ProcessEnd {
        match status.code() {
            Some(code) => ProcessEnd::Exited(code),
            None => ProcessEnd::KilledBySignal(status.signal().unwrap_or(0)),
        }
    }
}

/// Completes a sentence that begins with the name of the process.
impl fmt::Display for ProcessEnd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ProcessEnd::Exited(code) => write!(f, "ended with exit code {code}"),
            ProcessEnd::KilledBySignal(signal) => write!(f, "was killed by signal {signal}"),
            ProcessEnd::NotStarted(error) => write!(f, "could not be started: {error}"),
            ProcessEnd::GuardLost => f.write_str("was killed because its guard process was killed"),
        }
    }
}
