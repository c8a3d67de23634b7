//! Configuration of the engine.

use std::{path::PathBuf, time::Duration};

use faena_domain::JobLimits;
use faena_store::{ConfiguredRules, GracePeriods, Retention};
use ipnet::IpNet;

use crate::{
    InboxConfig, OutboxConfig, PoolConfig, RedisQueueConfig, SourceConfig, WebhookConfig, builtin::LlmConfig,
    traces::TraceConfig,
};

#[derive(Clone, Debug)]
pub struct EngineConfig {
    pub roles: Roles,
    /// Display name of this node, such as its host name.
    pub node_name: String,
    /// Slots of the built-in worker.
    pub concurrency: usize,
    /// How long a node keeps its jobs without renewing its lease.
    pub node_lease: Duration,
    /// Longest time that one call to the store takes.
    pub database_timeout: Duration,
    /// Delay before an orphaned job is retried.
    pub orphan_delay: Duration,
    /// How long running jobs may continue after the server is asked to stop.
    pub drain_grace: Duration,
    /// Timeout of a job that sets none.
    pub processing_timeout: Duration,
    /// How often a worker sends a heartbeat.
    pub worker_heartbeat: Duration,
    /// How long a worker may be silent before it is declared lost.
    pub worker_silence: Duration,
    /// How long a disconnected worker has to reconnect.
    pub reconnect_grace: Duration,
    /// How long a worker may take to start a job it received.
    pub assigned_timeout: Duration,
    /// How long a process that was started for a job may take to connect.
    pub scheduled_timeout: Duration,
    /// How long a job waits for a worker that can run its type before it fails. Zero: forever.
    pub no_handler_timeout: Duration,
    /// Longest time between two rounds of the guardian.
    pub guardian_interval: Duration,
    /// The queue in Redis that jobs are dispatched from. `None`: the database dispatches.
    pub redis_queue: Option<RedisQueueConfig>,
    pub retention: Retention,
    /// Configured rules of queues and limits. Rules set at run time take precedence.
    pub rules: ConfiguredRules,
    /// Limits on the jobs that callers, sources and inboxes submit.
    pub job_limits: JobLimits,
    /// Pools of worker processes to run.
    pub pools: Vec<PoolConfig>,
    /// The `faena` binary, which guards each program that is started. `None`: only the process groups of programs are killed.
    pub guard: Option<PathBuf>,
    /// URL under which the processes of pools reach this server.
    pub own_url: String,
    /// API key of the processes of pools.
    pub pool_token: PoolToken,
    /// Private networks that jobs and webhooks may call.
    pub allowed_networks: Vec<IpNet>,
    pub webhooks: WebhookConfig,
    pub outbox: OutboxConfig,
    /// Outboxes of applications to relay.
    pub sources: Vec<SourceConfig>,
    /// Queues of brokers whose messages become jobs, or events of tasks.
    pub inboxes: Vec<InboxConfig>,
    /// Where to send spans. `None`: no spans are created.
    pub traces: Option<TraceConfig>,
    /// The language model of `llm.chat` jobs.
    pub llm: Option<LlmConfig>,
    /// Whether `shell.run` jobs are allowed.
    pub is_shell_allowed: bool,
    /// Number of bytes of a response body that `http.request` keeps.
    pub http_response_bytes: usize,
    /// Number of bytes of stdout, and of stderr, that `shell.run` keeps.
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

/// The roles of this process.
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
            database_timeout: Duration::from_secs(10),
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
            redis_queue: None,
            retention: Retention::default(),
            rules: ConfiguredRules::default(),
            pools: Vec::new(),
            guard: None,
            own_url: String::new(),
            pool_token: PoolToken::default(),
            allowed_networks: Vec::new(),
            webhooks: WebhookConfig::default(),
            outbox: OutboxConfig::default(),
            sources: Vec::new(),
            inboxes: Vec::new(),
            job_limits: JobLimits::default(),
            traces: None,
            llm: None,
            is_shell_allowed: false,
            http_response_bytes: 256 << 10,
            shell_output_bytes: 64 << 10,
        }
    }
}

/// API key of the processes of pools. `Debug` hides it.
#[derive(Clone, Default)]
pub struct PoolToken(pub String);

impl std::fmt::Debug for PoolToken {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("PoolToken(…)")
    }
}

/// Converts a duration to milliseconds, the unit of the store.
pub fn ms(duration: Duration) -> i64 {
    i64::try_from(duration.as_millis()).unwrap_or(i64::MAX)
}
