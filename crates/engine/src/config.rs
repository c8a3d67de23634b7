//! What the engine can be told.

use std::time::Duration;

use faena_store::Retention;
use ipnet::IpNet;

#[derive(Clone, Debug)]
pub struct EngineConfig {
    pub roles: Roles,
    /// For people: where this process runs.
    pub node_name: String,
    /// Jobs that the built-in worker runs at once.
    pub concurrency: usize,
    /// How long a node's jobs stay its own without a sign of life.
    pub node_lease: Duration,
    /// How long an orphaned job waits before its next try.
    pub orphan_delay: Duration,
    /// How long running jobs may go on after the order to stop.
    pub drain_grace: Duration,
    /// A job's time, when it names none.
    pub processing_timeout: Duration,
    pub retention: Retention,
    /// Networks that jobs may call although they are private.
    pub allowed_networks: Vec<IpNet>,
    pub shell_allowed: bool,
    /// The largest answer that `http.request` keeps.
    pub http_answer_bytes: usize,
    /// The most that `shell.run` keeps of each of its outputs.
    pub shell_output_bytes: usize,
}

/// What this process does.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Roles {
    pub api: bool,
    pub engine: bool,
    pub worker: bool,
}

impl Roles {
    pub const ALL: Roles = Roles { api: true, engine: true, worker: true };
}

impl Default for EngineConfig {
    fn default() -> Self {
        EngineConfig {
            roles: Roles::ALL,
            node_name: "local".into(),
            concurrency: 5,
            node_lease: Duration::from_secs(15),
            orphan_delay: Duration::from_secs(5),
            drain_grace: Duration::from_secs(30),
            processing_timeout: Duration::from_secs(30 * 60),
            retention: Retention::default(),
            allowed_networks: Vec::new(),
            shell_allowed: false,
            http_answer_bytes: 256 << 10,
            shell_output_bytes: 64 << 10,
        }
    }
}

pub fn ms(duration: Duration) -> i64 {
    i64::try_from(duration.as_millis()).unwrap_or(i64::MAX)
}
