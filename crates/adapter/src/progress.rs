//! Progress of work, as heartbeats report it.

use std::sync::Arc;

use parking_lot::Mutex;
use serde_json::{Value, json};

/// Progress of the work on a task. Changes only if the work has advanced, because the machine ends work without
/// progress.
#[derive(Clone, Debug, Default)]
pub struct Progress(Arc<Mutex<ProgressState>>);

#[derive(Debug, Default)]
struct ProgressState {
    phase: &'static str,
    attempt: u32,
    output_bytes: u64,
    last_line: String,
    /// Changed files in the worktree, and the time of the last change in milliseconds.
    files: Option<(usize, u64)>,
}

impl Progress {
    /// Begins a phase. Clears what was known about the previous one.
    pub fn begin(&self, phase: &'static str) {
        let mut progress = self.0.lock();
        *progress = ProgressState { phase, attempt: progress.attempt, ..ProgressState::default() };
    }

    pub fn set_attempt(&self, attempt: u32) {
        self.0.lock().attempt = attempt;
    }

    pub fn set_output(&self, bytes: u64, last_line: String) {
        let mut progress = self.0.lock();
        (progress.output_bytes, progress.last_line) = (bytes, last_line);
    }

    pub fn set_files(&self, changed: usize, modified_ms: u64) {
        self.0.lock().files = Some((changed, modified_ms));
    }

    /// Returns the `estado` of a heartbeat.
    pub fn state(&self) -> Value {
        let progress = self.0.lock();
        let mut state = json!({"fase": progress.phase});
        if progress.attempt > 1 {
            state["intento"] = json!(progress.attempt);
        }
        if progress.output_bytes > 0 {
            state["bytes"] = json!(progress.output_bytes);
            state["ultimaLinea"] = json!(progress.last_line);
        }
        if let Some((changed, modified_ms)) = progress.files {
            state["archivos"] = json!(changed);
            state["modificado"] = json!(modified_ms);
        }
        state
    }
}
