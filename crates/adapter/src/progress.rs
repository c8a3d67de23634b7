//! Progress of work, as heartbeats report it.

use std::sync::Arc;

use parking_lot::Mutex;
use serde_json::{Value, json};

/// What a task's work is doing. Changes only when something has really changed: the machine ends work without progress.
#[derive(Clone, Debug, Default)]
pub struct Progress(Arc<Mutex<Figures>>);

#[derive(Debug, Default)]
struct Figures {
    phase: &'static str,
    attempt: u32,
    output_bytes: u64,
    last_line: String,
    /// Changed files in the worktree, and the time of the last change in milliseconds.
    files: Option<(usize, u64)>,
}

impl Progress {
    /// Begins a phase. What was known of the last one is forgotten.
    pub fn begin(&self, phase: &'static str) {
        let mut figures = self.0.lock();
        *figures = Figures { phase, attempt: figures.attempt, ..Figures::default() };
    }

    pub fn set_attempt(&self, attempt: u32) {
        self.0.lock().attempt = attempt;
    }

    pub fn set_output(&self, bytes: u64, last_line: String) {
        let mut figures = self.0.lock();
        (figures.output_bytes, figures.last_line) = (bytes, last_line);
    }

    pub fn set_files(&self, changed: usize, modified_ms: u64) {
        self.0.lock().files = Some((changed, modified_ms));
    }

    /// Returns the `estado` of a heartbeat.
    pub fn state(&self) -> Value {
        let figures = self.0.lock();
        let mut state = json!({"fase": figures.phase});
        if figures.attempt > 1 {
            state["intento"] = json!(figures.attempt);
        }
        if figures.output_bytes > 0 {
            state["bytes"] = json!(figures.output_bytes);
            state["ultimaLinea"] = json!(figures.last_line);
        }
        if let Some((changed, modified_ms)) = figures.files {
            state["archivos"] = json!(changed);
            state["modificado"] = json!(modified_ms);
        }
        state
    }
}
