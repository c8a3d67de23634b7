//! The table of configuration keys: names in file and environment, kinds, defaults and descriptions.

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
    /// A text that may be empty: the feature is off then.
    OptionalText,
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
    /// Origins of web pages, or `*`.
    Origins,
    /// Names of queues.
    Names,
    /// A URI reference.
    Uri,
    /// Never shown, even in an error.
    Secrets,
    /// URL of a collector of spans; empty: off. Not shown in an error, because it may contain a password.
    Endpoint,
    /// Headers as `name=value`. Never shown, even in an error.
    Headers,
    /// Attributes as `name=value`.
    Pairs,
    /// A number from 0 to 1.
    Ratio,
}

impl Kind {
    /// Returns whether an error must not contain the value.
    pub fn is_secret(self) -> bool {
        matches!(self, Kind::Secret | Kind::Secrets | Kind::Endpoint | Kind::Headers)
    }
}

const fn key(path: &'static str, env: &'static str, kind: Kind, default: &'static str, doc: &'static str) -> Key {
    Key { path, env, kind, default, doc }
}

const LEVELS: &[&str] = &["trace", "debug", "info", "warn", "error", "fatal"];

/// Variables of other task schedulers that Faena accepts and does not need, each with the reason.
pub const UNUSED_VARIABLES: [(&str, &str); 3] = [
    ("NODE_ENV", "Faena has no modes"),
    ("REDIS_URL", "the database holds the queues"),
    ("QUEUE_PREFIX", "queues have names of their own"),
];

pub const KEYS: &[Key] = &[
    key("server.host", "HOST", Kind::Text, "127.0.0.1", "Address to listen on."),
    key("server.port", "PORT", Kind::Number { min: 0, max: 65_535 }, "3000", "Port to listen on; 0 picks a free port."),
    key(
        "server.roles",
        "FAENA_SERVER_ROLES",
        Kind::Roles,
        "api,engine,worker",
        "Parts this process runs: the API, the background loops, the built-in worker.",
    ),
    key(
        "server.body_bytes",
        "FAENA_SERVER_BODY_BYTES",
        Kind::Number { min: 1_024, max: 64 << 20 },
        "1048576",
        "Maximum size of a request body.",
    ),
    key(
        "server.batch_bytes",
        "FAENA_SERVER_BATCH_BYTES",
        Kind::Number { min: 1_024, max: 256 << 20 },
        "16777216",
        "Maximum body size of POST /api/v1/jobs/batch.",
    ),
    key(
        "server.max_connections",
        "FAENA_SERVER_MAX_CONNECTIONS",
        Kind::Number { min: 10, max: 1_000_000 },
        "20000",
        "Open connections; a few more are accepted for health checks.",
    ),
    key(
        "server.max_connections_per_address",
        "FAENA_SERVER_MAX_CONNECTIONS_PER_ADDRESS",
        Kind::Number { min: 1, max: 1_000_000 },
        "1000",
        "Open connections of one address, other than loopback and trusted proxies.",
    ),
    key(
        "server.idle_timeout",
        "FAENA_SERVER_IDLE_TIMEOUT",
        Kind::Duration,
        "60s",
        "Time after which a connection without a complete request is closed.",
    ),
    key(
        "server.trusted_proxies",
        "FAENA_SERVER_TRUSTED_PROXIES",
        Kind::Networks,
        "",
        "Reverse proxies whose headers about the caller are believed.",
    ),
    key(
        "health.mode",
        "FAENA_HEALTH_MODE",
        Kind::Choice(&["auto", "always", "never"]),
        "auto",
        "When to open a second port for health checks and metrics alone, without TLS; auto: on a node without the role api.",
    ),
    key(
        "health.host",
        "FAENA_HEALTH_HOST",
        Kind::OptionalText,
        "",
        "Address of the port for health checks and metrics; empty: that of server.host.",
    ),
    key(
        "health.port",
        "FAENA_HEALTH_PORT",
        Kind::Number { min: 0, max: 65_535 },
        "3001",
        "Port for health checks and metrics alone; 0 picks a free port.",
    ),
    key(
        "tls.certificate",
        "FAENA_TLS_CERTIFICATE",
        Kind::OptionalText,
        "",
        "PEM file with the certificate chain; empty: no TLS.",
    ),
    key("tls.key", "FAENA_TLS_KEY", Kind::OptionalText, "", "PEM file with the private key of the certificate."),
    key(
        "tls.client_ca",
        "FAENA_TLS_CLIENT_CA",
        Kind::OptionalText,
        "",
        "PEM file with the authorities of client certificates; every client then needs one. Empty: none is asked for.",
    ),
    key(
        "auth.trusted_header",
        "FAENA_AUTH_TRUSTED_HEADER",
        Kind::OptionalText,
        "",
        "Header in which a trusted proxy names the person it has authenticated, such as X-Forwarded-User; empty: off.",
    ),
    key(
        "cors.origins",
        "FAENA_CORS_ORIGINS",
        Kind::Origins,
        "",
        "Web pages of other origins that may call; *: every page that sends an API key. Empty: none.",
    ),
    key(
        "cors.credentials",
        "FAENA_CORS_CREDENTIALS",
        Kind::Flag,
        "false",
        "Whether browsers may send cookies, for a reverse proxy that authenticates people; not with *.",
    ),
    key(
        "database.url",
        "DATABASE_URL",
        Kind::Secret,
        "sqlite:faena-data/faena.db",
        "sqlite:FILE, or postgres://user:password@host/database.",
    ),
    key("database.timeout", "FAENA_DATABASE_TIMEOUT", Kind::Duration, "30s", "Time limit for one database call."),
    key(
        "log.level",
        "LOG_LEVEL",
        Kind::Choice(LEVELS),
        "info",
        "Minimum level of log lines: trace, debug, info, warn or error; fatal is the same as error.",
    ),
    key(
        "log.format",
        "FAENA_LOG_FORMAT",
        Kind::Choice(&["pretty", "json"]),
        "pretty",
        "Format of log lines: pretty or json.",
    ),
    key(
        "log.access",
        "FAENA_LOG_ACCESS",
        Kind::Flag,
        "false",
        "Whether every request is logged at info; health checks and scrapes are logged at debug.",
    ),
    key(
        "worker.concurrency",
        "WORKER_CONCURRENCY",
        Kind::Number { min: 1, max: 10_000 },
        "5",
        "Jobs that the built-in worker runs concurrently.",
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
        "Bytes kept of each output stream of a shell.run program.",
    ),
    key(
        "worker.http_response_bytes",
        "FAENA_WORKER_HTTP_RESPONSE_BYTES",
        Kind::Number { min: 0, max: 1 << 20 },
        "262144",
        "Bytes kept of the response to http.request.",
    ),
    key(
        "worker.heartbeat",
        "FAENA_WORKER_HEARTBEAT",
        Kind::Duration,
        "30s",
        "Interval at which remote workers send heartbeats.",
    ),
    key(
        "worker.silence",
        "FAENA_WORKER_SILENCE",
        Kind::Duration,
        "90s",
        "A remote worker without a heartbeat for this long is lost.",
    ),
    key(
        "queue.strict",
        "FAENA_QUEUE_STRICT",
        Kind::Names,
        "",
        "Queues in which a higher priority always goes first, regardless of waiting time.",
    ),
    key(
        "node.lease",
        "FAENA_NODE_LEASE",
        Kind::Duration,
        "15s",
        "Lease of a node. If a node does not renew it, other nodes take over its jobs.",
    ),
    key(
        "orphan.delay",
        "FAENA_ORPHAN_DELAY",
        Kind::Duration,
        "5s",
        "Delay before jobs of a lost worker or dead node are retried.",
    ),
    key(
        "drain.grace",
        "FAENA_DRAIN_GRACE",
        Kind::Duration,
        "30s",
        "Time that running jobs have to finish after SIGTERM.",
    ),
    key(
        "processing.timeout",
        "FAENA_PROCESSING_TIMEOUT",
        Kind::Duration,
        "30m",
        "Time limit for a run of a job without timeoutMs.",
    ),
    key(
        "assigned.timeout",
        "FAENA_ASSIGNED_TIMEOUT",
        Kind::Duration,
        "5m",
        "Time limit for a worker to start an assigned job.",
    ),
    key(
        "scheduled.timeout",
        "FAENA_SCHEDULED_TIMEOUT",
        Kind::Duration,
        "10m",
        "Time limit for starting a worker process for a job.",
    ),
    key(
        "reconnect.grace",
        "FAENA_RECONNECT_GRACE",
        Kind::Duration,
        "10s",
        "Time that a disconnected worker has to reconnect before its jobs are retried.",
    ),
    key(
        "no_handler.timeout",
        "FAENA_NO_HANDLER_TIMEOUT",
        Kind::Duration,
        "24h",
        "Time that a job waits for a worker that runs its type before it fails with no_handler; 0s: no limit.",
    ),
    key(
        "guardian.interval",
        "FAENA_GUARDIAN_INTERVAL",
        Kind::Duration,
        "30s",
        "Maximum interval between checks of deadlines.",
    ),
    key(
        "webhook.attempts",
        "FAENA_WEBHOOK_ATTEMPTS",
        Kind::Number { min: 1, max: 50 },
        "3",
        "Maximum number of attempts to deliver a webhook.",
    ),
    key(
        "webhook.base_delay",
        "FAENA_WEBHOOK_BASE_DELAY",
        Kind::Duration,
        "1s",
        "Delay before the second attempt of a webhook. It doubles with each attempt, up to five minutes.",
    ),
    key(
        "webhook.timeout",
        "FAENA_WEBHOOK_TIMEOUT",
        Kind::Duration,
        "10s",
        "Time limit for one attempt, including the response.",
    ),
    key(
        "webhook.concurrency",
        "FAENA_WEBHOOK_CONCURRENCY",
        Kind::Number { min: 1, max: 1_000 },
        "32",
        "Webhooks that this process sends concurrently.",
    ),
    key(
        "webhook.per_host",
        "FAENA_WEBHOOK_PER_HOST",
        Kind::Number { min: 1, max: 1_000 },
        "8",
        "Webhooks that this process sends concurrently to one host.",
    ),
    key(
        "webhook.breaker",
        "FAENA_WEBHOOK_BREAKER",
        Kind::Duration,
        "30s",
        "Time that the circuit of a host stays open after five consecutive failures.",
    ),
    key(
        "webhook.secrets",
        "FAENA_WEBHOOK_SECRETS",
        Kind::Secrets,
        "",
        "Signing secrets of webhooks, newest first, separated by commas: whsec_ and 24 to 64 bytes in base64.",
    ),
    key(
        "webhook.allow",
        "FAENA_WEBHOOK_ALLOW",
        Kind::Networks,
        "",
        "Private networks that webhooks and http.request may connect to.",
    ),
    key("retention.completed", "FAENA_RETENTION_COMPLETED", Kind::Duration, "7d", "Retention of completed jobs."),
    key("retention.cancelled", "FAENA_RETENTION_CANCELLED", Kind::Duration, "7d", "Retention of cancelled jobs."),
    key(
        "retention.failed",
        "FAENA_RETENTION_FAILED",
        Kind::Duration,
        "30d",
        "Retention of failed jobs (dead letters).",
    ),
    key("retention.audit", "FAENA_RETENTION_AUDIT", Kind::Duration, "365d", "Retention of audit log entries."),
    key(
        "retention.hourly_history",
        "FAENA_RETENTION_HOURLY_HISTORY",
        Kind::Duration,
        "14d",
        "Retention of the history per hour (`/api/v1/metrics/history`).",
    ),
    key(
        "retention.daily_history",
        "FAENA_RETENTION_DAILY_HISTORY",
        Kind::Duration,
        "730d",
        "Retention of the history per day.",
    ),
    key(
        "outbox.keep",
        "FAENA_OUTBOX_KEEP",
        Kind::Duration,
        "3d",
        "Retention of events; they can be republished until then.",
    ),
    key("outbox.origin", "FAENA_OUTBOX_ORIGIN", Kind::Uri, "/faena", "The CloudEvents `source` attribute of events."),
    key(
        "llm.base_url",
        "FAENA_LLM_BASE_URL",
        Kind::Endpoint,
        "",
        "OpenAI-compatible server for llm.chat jobs, such as https://api.example.com/v1. Empty: such jobs fail at once.",
    ),
    key(
        "llm.model",
        "FAENA_LLM_MODEL",
        Kind::OptionalText,
        "",
        "Model that llm.chat jobs use unless their payload names another.",
    ),
    key(
        "llm.headers",
        "FAENA_LLM_HEADERS",
        Kind::Headers,
        "",
        "Headers of each request to the server, such as authorization=Bearer%20KEY, separated by commas.",
    ),
    key(
        "llm.max_tokens",
        "FAENA_LLM_MAX_TOKENS",
        Kind::Number { min: 1, max: 1_000_000 },
        "4096",
        "Most tokens of one answer.",
    ),
    key(
        "traces.endpoint",
        "FAENA_TRACES_ENDPOINT",
        Kind::Endpoint,
        "",
        "OpenTelemetry collector that receives spans over OTLP/HTTP, such as http://localhost:4318; without a path, /v1/traces is added. Empty: no traces.",
    ),
    key(
        "traces.headers",
        "FAENA_TRACES_HEADERS",
        Kind::Headers,
        "",
        "Headers of each request to the collector, such as authorization=Bearer%20TOKEN, separated by commas.",
    ),
    key(
        "traces.sample_ratio",
        "FAENA_TRACES_SAMPLE_RATIO",
        Kind::Ratio,
        "1",
        "Share of the traces that begin in Faena and are recorded, from 0 to 1. A request with a traceparent decides itself.",
    ),
    key(
        "traces.service_name",
        "FAENA_TRACES_SERVICE_NAME",
        Kind::Text,
        "faena",
        "The attribute service.name of spans.",
    ),
    key(
        "traces.attributes",
        "FAENA_TRACES_ATTRIBUTES",
        Kind::Pairs,
        "",
        "Further attributes of the resource, such as deployment.environment.name=production, separated by commas.",
    ),
    key(
        "limits.concurrency",
        "FAENA_LIMITS_CONCURRENCY",
        Kind::Limit { max: 1_000_000 },
        "none",
        "Jobs that run concurrently on all nodes together; none: no limit.",
    ),
    key(
        "limits.key",
        "FAENA_LIMITS_KEY",
        Kind::Limit { max: 1_000_000 },
        "1",
        "Jobs with the same concurrencyKey that run concurrently, unless the key has its own limit; none: no limit.",
    ),
    key(
        "limits.max_retries",
        "FAENA_LIMITS_MAX_RETRIES",
        Kind::Number { min: 0, max: 1_000 },
        "10",
        "Maximum accepted value of maxRetries.",
    ),
    key(
        "limits.requests_per_key",
        "FAENA_LIMITS_REQUESTS_PER_KEY",
        Kind::Limit { max: 1_000_000 },
        "none",
        "Requests per second of one API key, on this server; none: no limit.",
    ),
    key(
        "limits.requests_per_key_burst",
        "FAENA_LIMITS_REQUESTS_PER_KEY_BURST",
        Kind::Limit { max: 10_000_000 },
        "none",
        "Requests of one API key that may come at once; none: ten times the rate.",
    ),
    key(
        "limits.requests_per_address",
        "FAENA_LIMITS_REQUESTS_PER_ADDRESS",
        Kind::Limit { max: 1_000_000 },
        "none",
        "Requests per second of one client address, on this server; none: no limit.",
    ),
    key(
        "limits.requests_per_address_burst",
        "FAENA_LIMITS_REQUESTS_PER_ADDRESS_BURST",
        Kind::Limit { max: 10_000_000 },
        "none",
        "Requests of one client address that may come at once; none: ten times the rate.",
    ),
];
