//! What the engine can be told.

use std::time::Duration;

use faena_domain::JobLimits;
use faena_store::{Configured, GracePeriods, Retention};
use ipnet::IpNet;

use crate::{InboxConfig, OutboxConfig, PoolConfig, SourceConfig, WebhookConfig};

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
    /// How often a worker gives a sign of life, and how long it may be silent before it is given up for lost.
    pub worker_heartbeat: Duration,
    pub worker_silence: Duration,
    /// How long a worker whose connection broke has to come back.
    pub reconnect_grace: Duration,
    /// How long a worker may take to start a job it was handed, and a process to connect that was started for one.
    pub assigned_timeout: Duration,
    pub scheduled_timeout: Duration,
    /// How long a job waits for a worker that can run its type before it fails; zero: for ever.
    pub no_handler_timeout: Duration,
    /// How often whatever has no nearer due time is looked at.
    pub guardian_interval: Duration,
    /// Limits on the jobs that callers, sources and inboxes submit.
    pub job_limits: JobLimits,
    pub retention: Retention,
    /// What the configuration says about queues and limits, wherever nothing else was said at run time.
    pub rules: Configured,
    /// Worker processes to start and look after.
    pub pools: Vec<PoolConfig>,
    /// The command under which they are started: it kills the group of what it starts when this process is gone.
    pub guard: Vec<String>,
    /// Where they find this server.
    pub own_url: String,
    /// Networks that jobs may call although they are private.
    pub allowed_networks: Vec<IpNet>,
    pub webhooks: WebhookConfig,
    /// Where events go.
    pub outbox: OutboxConfig,
    /// Outboxes of applications and queues of brokers from which jobs come.
    pub sources: Vec<SourceConfig>,
    pub inboxes: Vec<InboxConfig>,
    pub shell_allowed: bool,
    /// The largest answer that `http.request` keeps.
    pub http_answer_bytes: usize,
    /// The most that `shell.run` keeps of each of its outputs.
    pub shell_output_bytes: usize,
}

impl EngineConfig {
    pub fn grace_periods(&self) -> GracePeriods {
        GracePeriods {
            orphan_delay_ms: ms(self.orphan_delay),
            reconnect_ms: ms(self.reconnect_grace),
            silence_ms: ms(self.worker_silence),
        }
    }
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
            worker_heartbeat: Duration::from_secs(30),
            worker_silence: Duration::from_secs(90),
            reconnect_grace: Duration::from_secs(10),
            assigned_timeout: Duration::from_secs(5 * 60),
            scheduled_timeout: Duration::from_secs(10 * 60),
            no_handler_timeout: Duration::from_secs(24 * 3_600),
            guardian_interval: Duration::from_secs(30),
            retention: Retention::default(),
            rules: Configured::default(),
            pools: Vec::new(),
            guard: Vec::new(),
            own_url: String::new(),
            allowed_networks: Vec::new(),
            webhooks: WebhookConfig::default(),
            outbox: OutboxConfig::default(),
            sources: Vec::new(),
            inboxes: Vec::new(),
            job_limits: JobLimits::default(),
            shell_allowed: false,
            http_answer_bytes: 256 << 10,
            shell_output_bytes: 64 << 10,
        }
    }
}

pub fn ms(duration: Duration) -> i64 {
    i64::try_from(duration.as_millis()).unwrap_or(i64::MAX)
}
