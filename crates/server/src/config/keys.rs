//! The table of keys: the one place that knows them all, their names in file and environment, their defaults and what they mean.

pub struct Key {
    /// `section.name`, as in the file.
    pub path: &'static str,
    pub env: &'static str,
    pub kind: Kind,
    pub default: &'static str,
    pub doc: &'static str,
}

#[derive(Clone, Copy, PartialEq)]
pub enum Kind {
    Text,
    Secret,
    Number {
        min: u64,
        max: u64,
    },
    /// A number, or `none`.
    Limit {
        max: u64,
    },
    Duration,
    Flag,
    Choice(&'static [&'static str]),
    Roles,
    Networks,
    Names,
    /// Never shown, not even in an error.
    Secrets,
}

const fn key(path: &'static str, env: &'static str, kind: Kind, default: &'static str, doc: &'static str) -> Key {
    Key { path, env, kind, default, doc }
}

const LEVELS: &[&str] = &["trace", "debug", "info", "warn", "error"];

pub const KEYS: &[Key] = &[
    key("server.host", "HOST", Kind::Text, "127.0.0.1", "The address to listen on."),
    key(
        "server.port",
        "PORT",
        Kind::Number { min: 0, max: 65_535 },
        "3000",
        "The port to listen on; 0 takes a free one.",
    ),
    key(
        "server.roles",
        "FAENA_SERVER_ROLES",
        Kind::Roles,
        "api,engine,worker",
        "What this process does: the doors, the loops, the built-in worker.",
    ),
    key(
        "server.body_bytes",
        "FAENA_SERVER_BODY_BYTES",
        Kind::Number { min: 1_024, max: 64 << 20 },
        "1048576",
        "The largest request body.",
    ),
    key(
        "server.batch_bytes",
        "FAENA_SERVER_BATCH_BYTES",
        Kind::Number { min: 1_024, max: 256 << 20 },
        "16777216",
        "The largest body of POST /api/v1/jobs/batch.",
    ),
    key(
        "database.url",
        "DATABASE_URL",
        Kind::Secret,
        "sqlite:faena-data/faena.db",
        "sqlite:FILE, or postgres://user:password@host/database.",
    ),
    key(
        "database.timeout",
        "FAENA_DATABASE_TIMEOUT",
        Kind::Duration,
        "30s",
        "How long one call to the database may take.",
    ),
    key("log.level", "LOG_LEVEL", Kind::Choice(LEVELS), "info", "What is logged: trace, debug, info, warn or error."),
    key(
        "log.format",
        "FAENA_LOG_FORMAT",
        Kind::Choice(&["pretty", "json"]),
        "pretty",
        "How it is logged: pretty or json.",
    ),
    key(
        "worker.concurrency",
        "WORKER_CONCURRENCY",
        Kind::Number { min: 1, max: 10_000 },
        "5",
        "Jobs that the built-in worker runs at once.",
    ),
    key(
        "worker.shell",
        "FAENA_WORKER_SHELL",
        Kind::Flag,
        "false",
        "Whether shell.run may start programs on this machine.",
    ),
    key(
        "worker.shell_output_bytes",
        "FAENA_WORKER_SHELL_OUTPUT_BYTES",
        Kind::Number { min: 0, max: 1 << 20 },
        "65536",
        "What is kept of each output of a program.",
    ),
    key(
        "worker.http_answer_bytes",
        "FAENA_WORKER_HTTP_ANSWER_BYTES",
        Kind::Number { min: 0, max: 1 << 20 },
        "262144",
        "What is kept of the answer to http.request.",
    ),
    key("worker.heartbeat", "FAENA_WORKER_HEARTBEAT", Kind::Duration, "30s", "How often remote workers report."),
    key(
        "worker.silence",
        "FAENA_WORKER_SILENCE",
        Kind::Duration,
        "90s",
        "After which silence a remote worker is lost.",
    ),
    key(
        "queue.strict",
        "FAENA_QUEUE_STRICT",
        Kind::Names,
        "",
        "Queues in which a higher priority always goes first, without aging.",
    ),
    key(
        "node.lease",
        "FAENA_NODE_LEASE",
        Kind::Duration,
        "15s",
        "After which silence a server's jobs are given to others. Renewed every third of it.",
    ),
    key(
        "orphan.delay",
        "FAENA_ORPHAN_DELAY",
        Kind::Duration,
        "5s",
        "How long the jobs of a dead server wait before their next try.",
    ),
    key("drain.grace", "FAENA_DRAIN_GRACE", Kind::Duration, "30s", "How long running jobs may go on after SIGTERM."),
    key(
        "processing.timeout",
        "FAENA_PROCESSING_TIMEOUT",
        Kind::Duration,
        "30m",
        "How long a job may run that sets no timeoutMs.",
    ),
    key(
        "assigned.timeout",
        "FAENA_ASSIGNED_TIMEOUT",
        Kind::Duration,
        "5m",
        "How long a job may be assigned without starting.",
    ),
    key(
        "scheduled.timeout",
        "FAENA_SCHEDULED_TIMEOUT",
        Kind::Duration,
        "10m",
        "How long a worker may take to be started for a job.",
    ),
    key(
        "reconnect.grace",
        "FAENA_RECONNECT_GRACE",
        Kind::Duration,
        "10s",
        "How long a disconnected worker keeps its jobs.",
    ),
    key(
        "no_handler.timeout",
        "FAENA_NO_HANDLER_TIMEOUT",
        Kind::Duration,
        "24h",
        "How long a job waits for a worker that can run its type before it fails with no_handler; 0s: for ever.",
    ),
    key(
        "guardian.interval",
        "FAENA_GUARDIAN_INTERVAL",
        Kind::Duration,
        "30s",
        "How often deadlines are looked at, at the least.",
    ),
    key(
        "webhook.attempts",
        "FAENA_WEBHOOK_ATTEMPTS",
        Kind::Number { min: 1, max: 50 },
        "3",
        "How often a webhook is sent at the most, until it is delivered.",
    ),
    key(
        "webhook.base_delay",
        "FAENA_WEBHOOK_BASE_DELAY",
        Kind::Duration,
        "1s",
        "The delay before the second attempt of a webhook. Each further one doubles it, up to five minutes.",
    ),
    key(
        "webhook.timeout",
        "FAENA_WEBHOOK_TIMEOUT",
        Kind::Duration,
        "10s",
        "How long one attempt may take, until the receiver has answered.",
    ),
    key(
        "webhook.concurrency",
        "FAENA_WEBHOOK_CONCURRENCY",
        Kind::Number { min: 1, max: 1_000 },
        "32",
        "Webhooks that this process sends at once.",
    ),
    key(
        "webhook.per_host",
        "FAENA_WEBHOOK_PER_HOST",
        Kind::Number { min: 1, max: 1_000 },
        "8",
        "How many of them go to one host.",
    ),
    key(
        "webhook.breaker",
        "FAENA_WEBHOOK_BREAKER",
        Kind::Duration,
        "30s",
        "How long a host is left alone after five failures in a row.",
    ),
    key(
        "webhook.secrets",
        "FAENA_WEBHOOK_SECRETS",
        Kind::Secrets,
        "",
        "What webhooks are signed with: whsec_ and 24 to 64 bytes in base64, the newest first, separated by commas.",
    ),
    key(
        "webhook.allow",
        "FAENA_WEBHOOK_ALLOW",
        Kind::Networks,
        "",
        "Private networks that may be called all the same, by http.request too.",
    ),
    key("retention.completed", "FAENA_RETENTION_COMPLETED", Kind::Duration, "7d", "How long completed jobs are kept."),
    key("retention.cancelled", "FAENA_RETENTION_CANCELLED", Kind::Duration, "7d", "How long cancelled jobs are kept."),
    key("retention.failed", "FAENA_RETENTION_FAILED", Kind::Duration, "30d", "How long failed jobs are kept."),
    key(
        "retention.audit",
        "FAENA_RETENTION_AUDIT",
        Kind::Duration,
        "365d",
        "How long the audit log tells what people did.",
    ),
    key(
        "limits.concurrency",
        "FAENA_LIMITS_CONCURRENCY",
        Kind::Limit { max: 1_000_000 },
        "none",
        "Jobs that run at once in the whole system, on all nodes together; none: no limit.",
    ),
    key(
        "limits.key",
        "FAENA_LIMITS_KEY",
        Kind::Limit { max: 1_000_000 },
        "1",
        "Jobs with the same concurrencyKey that run at once, for keys without a limit of their own; none: no limit.",
    ),
    key(
        "limits.max_retries",
        "FAENA_LIMITS_MAX_RETRIES",
        Kind::Number { min: 0, max: 1_000 },
        "10",
        "The largest maxRetries that is accepted.",
    ),
];
