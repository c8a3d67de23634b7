//! The table of configuration keys: names in file and environment, kinds, defaults and descriptions.

pub use super::kind::{Key, ValueKind};
use super::{job_keys::JOB_KEYS, kind::key};

const LEVELS: &[&str] = &["trace", "debug", "info", "warn", "error", "fatal"];

/// Variables of other task schedulers that Faena accepts and does not need, each with the reason.
pub const UNUSED_VARIABLES: [(&str, &str); 1] = [("NODE_ENV", "Faena has no modes")];

/// Returns every key, in the order of the example file.
pub fn keys() -> impl Iterator<Item = &'static Key> {
    SERVER_KEYS.iter().chain(JOB_KEYS)
}

const SERVER_KEYS: &[Key] = &[
    key("server.host", "HOST", ValueKind::Text, "127.0.0.1", "Address to listen on."),
    key(
        "server.port",
        "PORT",
        ValueKind::Number { min: 0, max: 65_535 },
        "3000",
        "Port to listen on; 0 picks a free port.",
    ),
    key(
        "server.roles",
        "FAENA_SERVER_ROLES",
        ValueKind::Roles,
        "api,engine,worker",
        "Parts this process runs: the API, the background loops, the built-in worker.",
    ),
    key(
        "server.body_bytes",
        "FAENA_SERVER_BODY_BYTES",
        ValueKind::Number { min: 1_024, max: 64 << 20 },
        "1048576",
        "Maximum size of a request body.",
    ),
    key(
        "server.batch_bytes",
        "FAENA_SERVER_BATCH_BYTES",
        ValueKind::Number { min: 1_024, max: 256 << 20 },
        "16777216",
        "Maximum body size of POST /api/v1/jobs/batch.",
    ),
    key(
        "server.max_connections",
        "FAENA_SERVER_MAX_CONNECTIONS",
        ValueKind::Number { min: 10, max: 1_000_000 },
        "20000",
        "Maximum number of open connections; a few more are accepted for health checks.",
    ),
    key(
        "server.max_connections_per_address",
        "FAENA_SERVER_MAX_CONNECTIONS_PER_ADDRESS",
        ValueKind::Number { min: 1, max: 1_000_000 },
        "1000",
        "Maximum number of open connections of one address, other than loopback and trusted proxies.",
    ),
    key(
        "server.idle_timeout",
        "FAENA_SERVER_IDLE_TIMEOUT",
        ValueKind::Duration,
        "60s",
        "Time after which a connection without a complete request is closed.",
    ),
    key(
        "server.write_timeout",
        "FAENA_SERVER_WRITE_TIMEOUT",
        ValueKind::Duration,
        "30s",
        "Time after which a connection whose client does not read its answer is closed.",
    ),
    key(
        "server.in_flight_bytes",
        "FAENA_SERVER_IN_FLIGHT_BYTES",
        ValueKind::Number { min: 1_048_576, max: 64 << 30 },
        "67108864",
        "Memory for requests and messages above 16 KiB that are received or processed; at least server.batch_bytes.",
    ),
    key(
        "server.unsent_bytes",
        "FAENA_SERVER_UNSENT_BYTES",
        ValueKind::Number { min: 1_048_576, max: 64 << 30 },
        "67108864",
        "Memory for answers above 64 KiB that their clients have not read yet.",
    ),
    key(
        "server.max_streams",
        "FAENA_SERVER_MAX_STREAMS",
        ValueKind::Number { min: 1, max: 1_000_000 },
        "1000",
        "Maximum number of open streams of events and job changes.",
    ),
    key(
        "server.max_streams_per_caller",
        "FAENA_SERVER_MAX_STREAMS_PER_CALLER",
        ValueKind::Number { min: 1, max: 1_000_000 },
        "200",
        "Maximum number of open streams of one API key, or of one address other than loopback for callers without a key.",
    ),
    key(
        "server.trusted_proxies",
        "FAENA_SERVER_TRUSTED_PROXIES",
        ValueKind::Networks,
        "",
        "Reverse proxies whose headers about the caller are trusted.",
    ),
    key(
        "server.base_path",
        "FAENA_SERVER_BASE_PATH",
        ValueKind::OptionalText,
        "",
        "Path below which a reverse proxy serves Faena, such as /faena.",
    ),
    key(
        "health.mode",
        "FAENA_HEALTH_MODE",
        ValueKind::Choice(&["auto", "always", "never"]),
        "auto",
        "When to open a second port for health checks and metrics alone, without TLS; auto: on a node without the role api.",
    ),
    key(
        "health.host",
        "FAENA_HEALTH_HOST",
        ValueKind::OptionalText,
        "",
        "Address of the port for health checks and metrics; empty: that of server.host.",
    ),
    key(
        "health.port",
        "FAENA_HEALTH_PORT",
        ValueKind::Number { min: 0, max: 65_535 },
        "3001",
        "Port for health checks and metrics alone; 0 picks a free port.",
    ),
    key(
        "tls.certificate",
        "FAENA_TLS_CERTIFICATE",
        ValueKind::OptionalText,
        "",
        "PEM file with the certificate chain; empty: no TLS.",
    ),
    key("tls.key", "FAENA_TLS_KEY", ValueKind::OptionalText, "", "PEM file with the private key of the certificate."),
    key(
        "tls.client_ca",
        "FAENA_TLS_CLIENT_CA",
        ValueKind::OptionalText,
        "",
        "PEM file with the authorities of client certificates; every client then needs a certificate. Empty: clients need none.",
    ),
    key(
        "auth.trusted_header",
        "FAENA_AUTH_TRUSTED_HEADER",
        ValueKind::OptionalText,
        "",
        "Header in which a trusted proxy names the person it has authenticated, such as X-Forwarded-User; empty: off.",
    ),
    key(
        "auth.trusted_groups_header",
        "FAENA_AUTH_TRUSTED_GROUPS_HEADER",
        ValueKind::OptionalText,
        "",
        "Header in which a trusted proxy names the groups of the person, separated by commas, such as X-Forwarded-Groups; \
         empty: off.",
    ),
    key(
        "cors.origins",
        "FAENA_CORS_ORIGINS",
        ValueKind::Origins,
        "",
        "Origins of web pages that may call the API; *: every page that sends an API key. Empty: none.",
    ),
    key(
        "cors.credentials",
        "FAENA_CORS_CREDENTIALS",
        ValueKind::Flag,
        "false",
        "Whether browsers may send cookies, for a reverse proxy that authenticates people; not with *.",
    ),
    key(
        "database.url",
        "DATABASE_URL",
        ValueKind::Secret,
        "sqlite:faena-data/faena.db",
        "sqlite:FILE, or postgres://user:password@host/database; several PostgreSQL hosts are separated by commas.",
    ),
    key(
        "database.listen_url",
        "FAENA_DATABASE_LISTEN_URL",
        ValueKind::Secret,
        "",
        "Direct URL of the same PostgreSQL for LISTEN, if database.url leads to a transaction-mode pooler. Empty: database.url.",
    ),
    key(
        "database.timeout",
        "FAENA_DATABASE_TIMEOUT",
        ValueKind::Duration,
        "10s",
        "Time limit for one database call, including the wait for a connection.",
    ),
    key(
        "log.level",
        "LOG_LEVEL",
        ValueKind::Choice(LEVELS),
        "info",
        "Minimum level of log lines: trace, debug, info, warn or error; fatal is the same as error.",
    ),
    key(
        "log.format",
        "FAENA_LOG_FORMAT",
        ValueKind::Choice(&["pretty", "json"]),
        "pretty",
        "Format of log lines: pretty or json.",
    ),
    key(
        "log.access",
        "FAENA_LOG_ACCESS",
        ValueKind::Flag,
        "false",
        "Whether every request is logged at info; health checks and scrapes are logged at debug.",
    ),
];
