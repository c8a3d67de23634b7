//! The configuration of the server.
//!
//! `keys.rs` is the table of all keys. The defaults, the names in file and environment, the checks, the example file, the reference
//! page and `faena config` derive from it. Order: defaults < `faena.toml` < environment < flags.
//! An invalid value or an unknown key is an error that names its position.

mod auth;
mod check;
mod dashboard;
mod describe;
mod environment;
mod example;
mod file;
mod health;
mod inboxes;
mod job_keys;
mod keys;
mod kind;
mod llm;
mod names;
mod pools;
mod queue;
mod rules;
mod sinks;
mod sources;
#[cfg(test)]
mod tests;
mod traces;
mod traffic;

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    time::Duration,
};

use faena_domain::{AddressRule, JobLimits, Limit, QueueRule, Scope, parse_duration};
use faena_engine::{
    EngineConfig, InboxConfig, OutboxConfig, PoolConfig, PoolToken, Roles, SinkConfig, SourceConfig, Target,
    WebhookConfig,
};
use faena_store::{ConfiguredRules, Retention, StoreOptions, StoredJobLimits};
use ipnet::IpNet;
use toml::{
    Spanned,
    de::{DeTable, DeValue},
};

pub use example::{example, sections};
pub use keys::{Key, UNUSED_VARIABLES, ValueKind, keys};

use crate::http::{Answers, ConnectionLimits, HttpConfig, Tls, TlsFiles};
use file::{Entry, File, Located, in_file_order};

#[derive(Clone, Debug, PartialEq)]
struct Setting {
    value: String,
    origin: String,
}

pub struct Config {
    settings: BTreeMap<&'static str, Setting>,
    pools: Vec<Located<PoolConfig>>,
    rules: ConfiguredRules,
    sinks: Vec<Located<SinkConfig>>,
    sources: Vec<Located<sources::Source>>,
    inboxes: Vec<Located<InboxConfig>>,
    unused: Vec<(&'static str, &'static str)>,
}

/// Durations that must not be zero, because that would be a deadline that has always passed, or a loop without a pause.
const POSITIVE: [&str; 10] = [
    "server.idle_timeout",
    "server.write_timeout",
    "worker.heartbeat",
    "guardian.interval",
    "webhook.timeout",
    "node.lease",
    "database.timeout",
    "processing.timeout",
    "assigned.timeout",
    "scheduled.timeout",
];

/// A configuration error. The binary prints it as one line and exits with code 2.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct ConfigError(String);

impl Config {
    pub fn defaults() -> Config {
        let settings =
            keys().map(|key| (key.path, Setting { value: key.default.into(), origin: "default".into() })).collect();
        Config {
            settings,
            pools: Vec::new(),
            rules: ConfiguredRules::default(),
            sinks: Vec::new(),
            sources: Vec::new(),
            inboxes: Vec::new(),
            unused: Vec::new(),
        }
    }

    /// Returns the variables that are set and have no effect, each with the reason.
    pub fn unused_variables(&self) -> &[(&'static str, &'static str)] {
        &self.unused
    }

    /// Reads the configuration. `file` is the path and whether the file must exist.
    pub fn load(
        file: (&Path, bool),
        environment: impl IntoIterator<Item = (String, String)>,
        flags: &[(&'static str, String)],
    ) -> Result<Config, ConfigError> {
        let mut config = Config::defaults();
        config.read_file(file.0, file.1)?;
        config.read_environment(environment)?;
        for (path, value) in flags {
            let flag = match *path {
                "database.url" => "database-url",
                path => path.rsplit('.').next().unwrap_or(path),
            };
            config.set(path, value.clone(), format!("--{flag}"))?;
        }
        config.find_unused();
        config.check_together()?;
        Ok(config)
    }

    /// Checks rules that concern more than one value.
    fn check_together(&self) -> Result<(), ConfigError> {
        let database = self.text("database.url");
        if database.starts_with("sqlite:") && database.contains('?') {
            let origin = &self.settings["database.url"].origin;
            return Err(ConfigError(format!(
                "{origin} database.url: a SQLite file has no parameters; remove the question mark and what follows it"
            )));
        }
        for path in POSITIVE {
            if self.duration(path).is_zero() {
                return Err(ConfigError(format!("{}: {path}: must be more than 0s", self.settings[path].origin)));
            }
        }
        if self.duration("worker.silence") <= self.duration("worker.heartbeat") {
            return Err(ConfigError(format!(
                "{}: worker.silence: must be longer than worker.heartbeat ({}), otherwise every worker is declared lost between two heartbeats",
                self.settings["worker.silence"].origin,
                self.text("worker.heartbeat")
            )));
        }
        self.check_traffic()?;
        let rule = AddressRule::new(&self.allowed_networks());
        for sink in &self.sinks {
            if let Target::Webhook(options) = &sink.value.target
                && let Err(what) = rule.check_url(&options.url)
            {
                return Err(ConfigError(format!("{}: [[sink]] url: {what}", sink.position)));
            }
        }
        self.sources()?;
        self.check_sinks_are_used()
    }

    /// Rejects a sink that no event and no source can reach.
    fn check_sinks_are_used(&self) -> Result<(), ConfigError> {
        for sink in self.sinks.iter().filter(|sink| sink.value.types.is_empty()) {
            if !self.sources.iter().any(|source| source.value.sink() == Some(&sink.value.name)) {
                return Err(ConfigError(format!(
                    "{}: [[sink]] types: is empty, and no [[outbox.source]] uses the sink {:?}; name types like \"job.*\", or remove the sink",
                    sink.position, sink.value.name
                )));
            }
        }
        Ok(())
    }

    /// Returns the sources together with the sinks they name.
    fn sources(&self) -> Result<Vec<SourceConfig>, ConfigError> {
        let sinks = || self.sinks.iter().map(|sink| (sink.value.name.as_str(), &sink.value.target));
        self.sources.iter().map(|source| sources::resolve(source, sinks())).collect()
    }

    fn read_file(&mut self, path: &Path, required: bool) -> Result<(), ConfigError> {
        let text = match std::fs::read_to_string(path) {
            Ok(text) => text,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound && !required => return Ok(()),
            Err(error) => return Err(ConfigError(format!("cannot read {}: {error}", path.display()))),
        };
        let file = File::new(path.display().to_string(), &text);
        for (section, content) in file.sections()? {
            self.read_section(&file, section, content)?;
        }
        Ok(())
    }

    fn read_section<'a>(
        &mut self,
        file: &File<'a>,
        section: Spanned<String>,
        content: Spanned<DeValue<'a>>,
    ) -> Result<(), ConfigError> {
        match section.get_ref().as_str() {
            "pool" => self.pools = pools::read(&Entry::list(file, "pool", content, pools::MAX_POOLS)?)?,
            "sink" => self.sinks = sinks::read(&Entry::list(file, "sink", content, sinks::MAX_SINKS)?)?,
            "inbox" => self.inboxes = inboxes::read(&Entry::list(file, "inbox", content, inboxes::MAX_INBOXES)?)?,
            "queues" => rules::read_queues(&Entry::list(file, "queues", content, rules::MAX_RULES)?, &mut self.rules)?,
            "queue" if content.get_ref().is_array() => return Err(file.error(&section.span(), rules::QUEUES_HINT)),
            "limit" => rules::read_limits(&Entry::list(file, "limit", content, rules::MAX_RULES)?, &mut self.rules)?,
            name => {
                let DeValue::Table(table) = content.into_inner() else {
                    return Err(file.error(&section.span(), format!("{name} must be a section: [{name}]")));
                };
                self.read_keys(file, name, table)?;
            }
        }
        Ok(())
    }

    fn read_keys<'a>(&mut self, file: &File<'a>, section: &str, table: DeTable<'a>) -> Result<(), ConfigError> {
        for (name, value) in in_file_order(table) {
            let path = format!("{section}.{}", name.get_ref());
            if path == "outbox.source" {
                let entries = Entry::list(file, "outbox.source", value, sources::MAX_SOURCES)?;
                self.sources = sources::read(&entries)?;
                continue;
            }
            let Some(key) = keys().find(|key| key.path == path) else {
                let is_of_queue = rules::is_key_of_one_queue(&path);
                let hint = if is_of_queue { rules::QUEUES_HINT } else { "\"faena config\" lists all keys" };
                return Err(file.error(&name.span(), format!("{path} is not a known key; {hint}")));
            };
            self.set(key.path, plain_text(value.get_ref()), file.position(&name.span()))?;
        }
        Ok(())
    }

    fn read_environment(&mut self, environment: impl IntoIterator<Item = (String, String)>) -> Result<(), ConfigError> {
        for (name, value) in self.read_open_telemetry(environment)? {
            match keys().find(|key| key.env == name) {
                Some(key) => self.set(key.path, value, format!("environment {name}"))?,
                None => environment::check_unknown(&name, &value)?,
            }
            self.unused.extend(UNUSED_VARIABLES.iter().filter(|(unused, _)| *unused == name));
        }
        Ok(())
    }

    fn set(&mut self, path: &'static str, value: String, origin: String) -> Result<(), ConfigError> {
        let key = keys().find(|key| key.path == path).expect("only known keys are set");
        key.check(&value).map_err(|what| {
            let shown = if key.kind.is_secret() { String::new() } else { format!("{value:?} ") };
            ConfigError(format!("{origin}: {path}: {shown}{what}"))
        })?;
        self.settings.insert(key.path, Setting { value, origin });
        Ok(())
    }

    pub fn text(&self, path: &str) -> &str {
        &self.settings.get(path).expect("every key has a value").value
    }

    fn number(&self, path: &str) -> u64 {
        self.text(path).parse().expect("checked when it was set")
    }

    fn size(&self, path: &str) -> usize {
        usize::try_from(self.number(path)).expect("bounded by its key")
    }

    fn duration(&self, path: &str) -> Duration {
        parse_duration(self.text(path)).expect("checked when it was set")
    }

    fn duration_ms(&self, path: &str) -> i64 {
        i64::try_from(self.duration(path).as_millis()).unwrap_or(i64::MAX)
    }

    fn names(&self, path: &str) -> Vec<String> {
        split(self.text(path)).map(str::to_owned).collect()
    }

    pub fn roles(&self) -> Roles {
        let names = self.names("server.roles");
        let has = |name: &str| names.iter().any(|known| known == name);
        Roles { api: has("api"), engine: has("engine"), worker: has("worker") }
    }

    /// Returns how connections are accepted. Fails if the TLS files are incomplete or not valid.
    pub fn http(&self) -> anyhow::Result<HttpConfig> {
        Ok(HttpConfig {
            limits: ConnectionLimits {
                total: self.size("server.max_connections"),
                per_address: self.size("server.max_connections_per_address"),
                trusted_proxies: self.networks("server.trusted_proxies"),
            },
            idle_timeout: self.duration("server.idle_timeout"),
            write_timeout: self.duration("server.write_timeout"),
            answers: Answers::new(self.size("server.unsent_bytes")),
            tls: self.tls_files()?.map(Tls::load).transpose()?,
        })
    }

    pub fn tls_files(&self) -> anyhow::Result<Option<TlsFiles>> {
        let path = |name: &str| Some(self.text(name)).filter(|text| !text.is_empty()).map(PathBuf::from);
        let client_authorities = path("tls.client_ca");
        match (path("tls.certificate"), path("tls.key")) {
            (Some(certificate), Some(key)) => Ok(Some(TlsFiles { certificate, key, client_authorities })),
            (None, None) if client_authorities.is_none() => Ok(None),
            _ => anyhow::bail!("tls.certificate and tls.key must be set together"),
        }
    }

    pub fn engine(&self) -> EngineConfig {
        let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_else(|_| "localhost".into());
        EngineConfig {
            roles: self.roles(),
            node_name: format!("{}:{}", host.trim(), std::process::id()),
            concurrency: self.size("worker.concurrency"),
            node_lease: self.duration("node.lease"),
            database_timeout: self.duration("database.timeout"),
            orphan_delay: self.duration("orphan.delay"),
            drain_grace: self.duration("drain.grace"),
            processing_timeout: self.duration("processing.timeout"),
            worker_heartbeat: self.duration("worker.heartbeat"),
            worker_silence: self.duration("worker.silence"),
            reconnect_grace: self.duration("reconnect.grace"),
            assigned_timeout: self.duration("assigned.timeout"),
            scheduled_timeout: self.duration("scheduled.timeout"),
            no_handler_timeout: self.duration("no_handler.timeout"),
            guardian_interval: self.duration("guardian.interval"),
            redis_queue: self.redis_queue(),
            rules: self.rules(),
            pools: values(&self.pools),
            guard: None,
            own_url: String::new(),
            pool_token: PoolToken::default(),
            retention: Retention {
                completed_ms: self.duration_ms("retention.completed"),
                cancelled_ms: self.duration_ms("retention.cancelled"),
                failed_ms: self.duration_ms("retention.failed"),
                audit_ms: self.duration_ms("retention.audit"),
                hourly_history_ms: self.duration_ms("retention.hourly_history"),
                daily_history_ms: self.duration_ms("retention.daily_history"),
            },
            allowed_networks: self.allowed_networks(),
            webhooks: WebhookConfig {
                attempts: u32::try_from(self.number("webhook.attempts")).expect("bounded by its key"),
                base_delay: self.duration("webhook.base_delay"),
                timeout: self.duration("webhook.timeout"),
                concurrency: self.size("webhook.concurrency"),
                per_host: self.size("webhook.per_host"),
                breaker: self.duration("webhook.breaker"),
                secrets: split(self.text("webhook.secrets")).filter_map(|secret| secret.parse().ok()).collect(),
            },
            outbox: OutboxConfig {
                keep: self.duration("outbox.keep"),
                source: self.text("outbox.origin").to_owned(),
                // A sink without event types only serves sources.
                sinks: values(&self.sinks).into_iter().filter(|sink| !sink.types.is_empty()).collect(),
                ..OutboxConfig::default()
            },
            sources: self.sources().expect("checked when it was loaded"),
            inboxes: inboxes::with_shared_streams(values(&self.inboxes), &values(&self.sinks)),
            job_limits: self.job_limits(),
            traces: self.traces(),
            llm: self.llm(),
            is_shell_allowed: self.text("worker.shell") == "true",
            http_response_bytes: self.size("worker.http_response_bytes"),
            shell_output_bytes: self.size("worker.shell_output_bytes"),
        }
    }

    fn allowed_networks(&self) -> Vec<IpNet> {
        self.networks("webhook.allow")
    }

    fn networks(&self, path: &str) -> Vec<IpNet> {
        self.names(path).iter().filter_map(|network| parse_network(network)).collect()
    }

    pub fn store(&self, migrate: bool) -> StoreOptions {
        StoreOptions {
            migrate,
            timeout_ms: u64::try_from(self.duration_ms("database.timeout")).unwrap_or(10_000),
            listen_url: Some(self.text("database.listen_url").to_owned()).filter(|url| !url.is_empty()),
            job_limits: StoredJobLimits {
                log_entries: self.size("limits.log_entries"),
                log_bytes: self.size("limits.log_bytes"),
                steps: self.size("limits.steps"),
                step_bytes: self.size("limits.step_bytes"),
            },
            ..StoreOptions::default()
        }
    }

    /// Returns the settings of queues and limits.
    pub fn rules(&self) -> ConfiguredRules {
        let mut configured = self.rules.clone();
        for (path, scope) in [("limits.concurrency", Scope::System), ("limits.key", Scope::Key("*".into()))] {
            if let Ok(number) = self.text(path).parse::<u32>() {
                configured.limits.push((scope, Limit { concurrency: Some(number), rate: None }));
            }
        }
        for name in self.names("queue.strict") {
            match configured.queues.iter_mut().find(|(known, _)| *known == name) {
                Some((_, rule)) => rule.strict = Some(true),
                None => configured.queues.push((name, QueueRule { strict: Some(true), ..QueueRule::default() })),
            }
        }
        configured
    }

    pub fn job_limits(&self) -> JobLimits {
        JobLimits {
            max_body_bytes: self.size("server.body_bytes"),
            max_batch_bytes: self.size("server.batch_bytes"),
            max_retries: u32::try_from(self.number("limits.max_retries")).unwrap_or(10),
            ..JobLimits::default()
        }
    }

    pub fn port(&self) -> u16 {
        u16::try_from(self.number("server.port")).expect("bounded by its key")
    }
}

fn values<T: Clone>(located: &[Located<T>]) -> Vec<T> {
    located.iter().map(|located| located.value.clone()).collect()
}

/// Returns a value as it would be written in the environment.
fn plain_text(value: &DeValue<'_>) -> String {
    match value {
        DeValue::String(text) => text.to_string(),
        DeValue::Integer(number) => number.to_string(),
        DeValue::Float(number) => number.to_string(),
        DeValue::Boolean(flag) => flag.to_string(),
        DeValue::Datetime(time) => time.to_string(),
        DeValue::Array(list) => list.iter().map(|value| plain_text(value.get_ref())).collect::<Vec<_>>().join(","),
        DeValue::Table(_) => "{ … }".into(),
    }
}

fn split(value: &str) -> impl Iterator<Item = &str> {
    value.split(',').map(str::trim).filter(|part| !part.is_empty())
}

fn parse_network(text: &str) -> Option<IpNet> {
    text.parse().ok().or_else(|| text.parse::<std::net::IpAddr>().ok().map(IpNet::from))
}
