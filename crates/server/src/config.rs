//! The configuration: one table of keys, from which come the defaults, the names in file and environment, the checks, the
//! example file and `faena config`.
//!
//! Defaults < `faena.toml` < environment < flags. A wrong value or an unknown key is one error that names its place.

mod keys;
mod pools;
mod rules;
mod inboxes;
mod sinks;
mod sources;

use std::{collections::BTreeMap, fmt::Write, path::Path, time::Duration};

use faena_domain::{JobLimits, Limit, QueueRule, Scope, parse_duration};
use faena_engine::{
    EngineConfig, InboxConfig, OutboxConfig, PoolConfig, Roles, Secret, SinkConfig, SourceConfig, Target,
    WebhookConfig, address::AddressRule,
};
use faena_store::{Configured, Retention, StoreOptions};
use ipnet::IpNet;

use keys::{KEYS, Key, Kind};

/// Names that begin like a key's but belong to somebody else: the command line, and what `shell.run` hands to its programs.
const FOREIGN: [&str; 7] = [
    "FAENA_URL",
    "FAENA_CONFIG",
    "FAENA_JOB_ID",
    "FAENA_RUN",
    "FAENA_CORRELATION_ID",
    "FAENA_SCHEDULE_ID",
    "FAENA_SCHEDULE_DUE",
];

#[derive(Clone, Debug, PartialEq)]
struct Setting {
    value: String,
    origin: String,
}

pub struct Config {
    settings: BTreeMap<&'static str, Setting>,
    pools: Vec<PoolConfig>,
    rules: Configured,
    sinks: Vec<SinkConfig>,
    sources: Vec<sources::Source>,
    inboxes: Vec<InboxConfig>,
}

/// An error that the operator can put right: printed as one line, exit code 2.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct ConfigError(String);

impl Config {
    pub fn defaults() -> Config {
        let settings = KEYS
            .iter()
            .map(|key| (key.path, Setting { value: key.default.into(), origin: "default".into() }))
            .collect();
        Config {
            settings,
            pools: Vec::new(),
            rules: Configured::default(),
            sinks: Vec::new(),
            sources: Vec::new(),
            inboxes: Vec::new(),
        }
    }

    /// `file`: where it is, and whether it has to be there.
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
        config.check_together()?;
        Ok(config)
    }

    /// What is wrong with values that are right by themselves.
    fn check_together(&self) -> Result<(), ConfigError> {
        for path in ["worker.heartbeat", "guardian.interval", "webhook.timeout"] {
            if self.duration(path).is_zero() {
                return Err(ConfigError(format!("{}: {path}: must be more than 0s", self.settings[path].origin)));
            }
        }
        if self.duration("worker.silence") <= self.duration("worker.heartbeat") {
            return Err(ConfigError(format!(
                "{}: worker.silence: must be longer than worker.heartbeat ({}), or every worker is given up for lost between two of its beats",
                self.settings["worker.silence"].origin,
                self.text("worker.heartbeat")
            )));
        }
        let rule = AddressRule::new(&self.allowed_networks());
        for sink in &self.sinks {
            if let Target::Webhook(options) = &sink.target
                && let Err(what) = rule.check_url(&options.url)
            {
                return Err(ConfigError(format!("[[sink]] {:?}: url: {what}", sink.name)));
            }
        }
        self.sources()?;
        Ok(())
    }

    /// With their sinks.
    fn sources(&self) -> Result<Vec<SourceConfig>, ConfigError> {
        let sinks = || self.sinks.iter().map(|sink| (sink.name.as_str(), &sink.target));
        self.sources.iter().map(|source| sources::resolve(source, sinks())).collect()
    }

    fn read_file(&mut self, path: &Path, required: bool) -> Result<(), ConfigError> {
        let text = match std::fs::read_to_string(path) {
            Ok(text) => text,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound && !required => return Ok(()),
            Err(error) => return Err(ConfigError(format!("cannot read {}: {error}", path.display()))),
        };
        let table: toml::Table = text.parse().map_err(|error: toml::de::Error| {
            let line = error.span().map_or(1, |span| text[..span.start].lines().count().max(1));
            ConfigError(format!("{}, line {line}: {}", path.display(), error.message()))
        })?;
        for (section, content) in table {
            if section == "pool" {
                self.pools = pools::read(content, &path.display().to_string())?;
                continue;
            }
            if section == "sink" {
                self.sinks = sinks::read(content, &path.display().to_string())?;
                continue;
            }
            if matches!(section.as_str(), "queue" | "limit") && content.is_array() {
                rules::read(&section, content, &path.display().to_string(), &mut self.rules)?;
                continue;
            }
            if section == "inbox" {
                self.inboxes = inboxes::read(content, &path.display().to_string())?;
                continue;
            }
            let toml::Value::Table(mut content) = content else {
                return Err(ConfigError(format!("{}: {section} must be a section: [{section}]", path.display())));
            };
            if section == "outbox"
                && let Some(list) = content.remove("source")
            {
                self.sources = sources::read(list, &path.display().to_string())?;
            }
            for (name, value) in content {
                let dotted = format!("{section}.{name}");
                let line = text.lines().position(|line| line.trim_start().starts_with(&name)).map_or(1, |at| at + 1);
                let place = format!("{}, line {line}", path.display());
                let Some(key) = KEYS.iter().find(|key| key.path == dotted) else {
                    return Err(ConfigError(format!(
                        "{place}: {dotted} is not a known key; `faena config` lists them"
                    )));
                };
                self.set(key.path, plain(&value), place)?;
            }
        }
        Ok(())
    }

    fn read_environment(&mut self, environment: impl IntoIterator<Item = (String, String)>) -> Result<(), ConfigError> {
        for (name, value) in environment {
            match KEYS.iter().find(|key| key.env == name) {
                Some(key) => self.set(key.path, value, format!("environment {name}"))?,
                None if name.starts_with("FAENA_")
                    && !name.starts_with("FAENA_TEST_")
                    && !FOREIGN.contains(&name.as_str()) =>
                {
                    return Err(ConfigError(format!(
                        "environment {name}: is not a known key; `faena config` lists them"
                    )));
                }
                None => {}
            }
        }
        Ok(())
    }

    fn set(&mut self, path: &'static str, value: String, origin: String) -> Result<(), ConfigError> {
        let key = KEYS.iter().find(|key| key.path == path).expect("only known keys are set");
        key.check(&value).map_err(|what| {
            let secret = matches!(key.kind, Kind::Secret | Kind::Secrets);
            let shown = if secret { "the value".to_owned() } else { format!("{value:?}") };
            ConfigError(format!("{origin}: {path}: {shown} {what}"))
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

    pub fn engine(&self) -> EngineConfig {
        let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_else(|_| "localhost".into());
        EngineConfig {
            roles: self.roles(),
            node_name: format!("{}:{}", host.trim(), std::process::id()),
            concurrency: self.size("worker.concurrency"),
            node_lease: self.duration("node.lease"),
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
            rules: self.rules(),
            pools: self.pools.clone(),
            guard: Vec::new(),
            own_url: String::new(),
            retention: Retention {
                completed_ms: self.duration_ms("retention.completed"),
                cancelled_ms: self.duration_ms("retention.cancelled"),
                failed_ms: self.duration_ms("retention.failed"),
                audit_ms: self.duration_ms("retention.audit"),
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
                // A sink that wants nothing of Faena's is there for sources.
                sinks: self.sinks.iter().filter(|sink| !sink.types.is_empty()).cloned().collect(),
                ..OutboxConfig::default()
            },
            sources: self.sources().expect("checked when it was loaded"),
            inboxes: self.inboxes.clone(),
            job_reader: faena_api::job_reader(
                self.limits(),
                AddressRule::new(&self.allowed_networks()),
                self.body_bytes().0,
            ),
            shell_allowed: self.text("worker.shell") == "true",
            http_answer_bytes: self.size("worker.http_answer_bytes"),
            shell_output_bytes: self.size("worker.shell_output_bytes"),
        }
    }

    fn allowed_networks(&self) -> Vec<IpNet> {
        self.names("webhook.allow").iter().filter_map(|net| parse_network(net)).collect()
    }

    pub fn store(&self, migrate: bool) -> StoreOptions {
        StoreOptions {
            migrate,
            statement_timeout_ms: u64::try_from(self.duration_ms("database.timeout")).unwrap_or(30_000),
        }
    }

    /// What is said about queues and limits.
    pub fn rules(&self) -> Configured {
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

    pub fn limits(&self) -> JobLimits {
        JobLimits {
            max_retries: u32::try_from(self.number("limits.max_retries")).unwrap_or(10),
            ..JobLimits::default()
        }
    }

    pub fn port(&self) -> u16 {
        u16::try_from(self.number("server.port")).expect("bounded by its key")
    }

    pub fn body_bytes(&self) -> (usize, usize) {
        (self.size("server.body_bytes"), self.size("server.batch_bytes"))
    }

    /// Every key with its value and where that came from. Secrets are not shown.
    pub fn rows(&self) -> Vec<(String, String, String)> {
        let pools = self.pools.iter().map(|pool| {
            let what = format!("{} ({} to {})", pool.command.join(" "), pool.min, pool.max);
            (format!("pool.{}", pool.name), what, "faena.toml".to_owned())
        });
        let sources = self.sources.iter().map(|source| {
            let (name, what) = source.row();
            (format!("outbox.source.{name}"), what, "faena.toml".to_owned())
        });
        let inboxes = self.inboxes.iter();
        let inboxes =
            inboxes.map(|inbox| (format!("inbox.{}", inbox.name), inboxes::describe(inbox), "faena.toml".to_owned()));
        let sinks = self
            .sinks
            .iter()
            .map(|sink| (format!("sink.{}", sink.name), sinks::describe(sink), "faena.toml".to_owned()));
        let limits = self.rules.limits.iter().map(|(scope, limit)| {
            let at_once = limit.concurrency.map(|most| format!("{most} at once"));
            let what: Vec<String> = at_once.into_iter().chain(limit.rate.map(|rate| rate.to_string())).collect();
            (format!("limit.{} {}", scope.kind(), scope.parts().1), what.join(", "), "faena.toml".to_owned())
        });
        let queues = self.rules.queues.iter().map(|(name, rule)| {
            let strict = rule.strict.map(|strict| format!("strict {strict}"));
            let fairness = rule.fairness.map(|fairness| format!("fairness {fairness:?}").to_lowercase());
            let what: Vec<String> = strict.into_iter().chain(fairness).collect();
            (format!("queue.{name}"), what.join(", "), "faena.toml".to_owned())
        });
        KEYS.iter()
            .map(|key| {
                let setting = &self.settings[key.path];
                let value = match key.kind {
                    Kind::Secret => without_password(&setting.value),
                    Kind::Secrets => split(&setting.value).map(|_| "***").collect::<Vec<_>>().join(","),
                    _ => setting.value.clone(),
                };
                (key.path.to_owned(), value, setting.origin.clone())
            })
            .chain(queues.filter(|(_, what, _)| !what.is_empty()))
            .chain(limits)
            .chain(pools)
            .chain(sinks)
            .chain(sources)
            .chain(inboxes)
            .collect()
    }
}

impl Key {
    fn check(&self, value: &str) -> Result<(), String> {
        match self.kind {
            Kind::Text | Kind::Secret => {
                if value.trim().is_empty() {
                    Err("must not be empty".into())
                } else {
                    Ok(())
                }
            }
            Kind::Limit { max } => match value.parse::<u64>() {
                Ok(number) if (1..=max).contains(&number) => Ok(()),
                _ if value == "none" => Ok(()),
                _ => Err(format!("must be a whole number from 1 to {max}, or none")),
            },
            Kind::Number { min, max } => match value.parse::<u64>() {
                Ok(number) if (min..=max).contains(&number) => Ok(()),
                _ => Err(format!("must be a number from {min} to {max}")),
            },
            Kind::Duration => match parse_duration(value) {
                Some(_) => Ok(()),
                None => Err("must be a duration like 500ms, 30s, 5m, 12h or 7d".into()),
            },
            Kind::Flag => match value {
                "true" | "false" => Ok(()),
                _ => Err("must be true or false".into()),
            },
            Kind::Choice(choices) => {
                if choices.contains(&value) {
                    Ok(())
                } else {
                    Err(format!("must be one of {}", choices.join(", ")))
                }
            }
            Kind::Roles => {
                let known = split(value).all(|role| matches!(role, "api" | "engine" | "worker"));
                if known && split(value).next().is_some() {
                    Ok(())
                } else {
                    Err("must name api, engine or worker, separated by commas".into())
                }
            }
            Kind::Networks => match split(value).find(|net| parse_network(net).is_none()) {
                None => Ok(()),
                Some(net) => Err(format!("must be networks like 10.0.0.0/8 separated by commas; {net:?} is none")),
            },
            Kind::Names => Ok(()),
            Kind::Secrets => {
                for (at, secret) in split(value).enumerate() {
                    if let Err(what) = secret.parse::<Secret>() {
                        return Err(format!(
                            "must be secrets like whsec_ and 24 to 64 bytes in base64, separated by commas; number {} {what}",
                            at + 1
                        ));
                    }
                }
                Ok(())
            }
        }
    }
}

/// `faena.example.toml`: every key with its default and what it means.
pub fn example() -> String {
    let mut text = String::from(
        "# Every key with its default. Copy what you want to change into faena.toml.\n\
         # Order: defaults < faena.toml < environment < flags. `faena config` shows the effective values and where each came from.\n",
    );
    let mut section = "";
    // `[queue]` and `[[queue]]` exclude each other in a file; the second can say all that the first can.
    for key in KEYS.iter().filter(|key| key.path != "queue.strict") {
        let (current, name) = key.path.split_once('.').expect("a section and a name");
        if current != section {
            let _ = write!(text, "\n[{current}]\n");
            section = current;
        }
        let value = match key.kind {
            Kind::Number { .. } | Kind::Flag => key.default.to_owned(),
            Kind::Limit { .. } if key.default != "none" => key.default.to_owned(),
            _ => format!("{:?}", key.default),
        };
        let _ = write!(text, "# {} Environment: {}\n#{name} = {value}\n", key.doc, key.env);
    }
    text.push_str(rules::EXAMPLE);
    text.push_str(pools::EXAMPLE);
    text.push_str(sinks::EXAMPLE);
    text.push_str(sources::EXAMPLE);
    text.push_str(inboxes::EXAMPLE);
    text
}

fn plain(value: &toml::Value) -> String {
    match value {
        toml::Value::String(text) => text.clone(),
        toml::Value::Array(list) => list.iter().map(plain).collect::<Vec<_>>().join(","),
        other => other.to_string(),
    }
}

fn split(value: &str) -> impl Iterator<Item = &str> {
    value.split(',').map(str::trim).filter(|part| !part.is_empty())
}

fn parse_network(text: &str) -> Option<IpNet> {
    text.parse().ok().or_else(|| text.parse::<std::net::IpAddr>().ok().map(IpNet::from))
}

/// A database address as it may be shown.
pub fn without_password(url: &str) -> String {
    match url::Url::parse(url) {
        Ok(mut parsed) if parsed.password().is_some() => {
            let _ = parsed.set_password(Some("***"));
            parsed.to_string()
        }
        Ok(_) => url.to_owned(),
        // Not understood, so it cannot be told where a password would stand.
        Err(_) => "***".into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn load(file: &str, environment: &[(&str, &str)]) -> Result<Config, ConfigError> {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("faena.toml");
        std::fs::write(&path, file).expect("written");
        let environment = environment.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
        Config::load((&path, true), environment, &[])
    }

    fn error(file: &str, environment: &[(&str, &str)]) -> String {
        let text = load(file, environment).err().expect("refused").to_string();
        text[text.find("faena.toml").unwrap_or(0)..].to_owned()
    }

    #[test]
    fn later_places_go_before_earlier_ones() {
        let config = load("[server]\nport = 1\nhost = \"::1\"\n", &[("PORT", "2")]).expect("good");
        assert_eq!((config.port(), config.text("server.host")), (2, "::1"));
    }

    #[test]
    fn a_wrong_value_and_an_unknown_key_are_named_with_their_place() {
        assert_eq!(
            error("[server]\n\nport = 99999\n", &[]),
            "faena.toml, line 3: server.port: \"99999\" must be a number from 0 to 65535"
        );
        assert_eq!(
            error("[server]\nprot = 1\n", &[]),
            "faena.toml, line 2: server.prot is not a known key; `faena config` lists them"
        );
        assert_eq!(error("[server\n", &[]), "faena.toml, line 1: unclosed table, expected `]`");
        assert_eq!(
            error("", &[("FAENA_NODE_LEASE", "soon")]),
            "environment FAENA_NODE_LEASE: node.lease: \"soon\" must be a duration like 500ms, 30s, 5m, 12h or 7d"
        );
        assert_eq!(
            error("", &[("FAENA_NOD_LEASE", "1s")]),
            "environment FAENA_NOD_LEASE: is not a known key; `faena config` lists them"
        );
    }

    #[test]
    fn a_password_is_never_shown() {
        let config = load("", &[("DATABASE_URL", "postgres://user:geheim@host/db")]).expect("good");
        let shown = format!("{:?}", config.rows());
        assert!(shown.contains("postgres://user:***@host/db"), "{shown}");
        assert!(!shown.contains("geheim"));
    }

    #[test]
    fn a_webhook_secret_is_never_shown_not_even_a_wrong_one() {
        let secret = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw";
        let config = load("", &[("FAENA_WEBHOOK_SECRETS", &format!("{secret}, {secret}"))]).expect("good");
        assert_eq!(config.engine().webhooks.secrets.len(), 2);
        let shown = format!("{:?} {:?}", config.rows(), config.engine());
        assert!(shown.contains("***,***") && !shown.contains("MfKQ"), "{shown}");
        assert_eq!(
            error("", &[("FAENA_WEBHOOK_SECRETS", &format!("{secret},whsec_geheim"))]),
            "environment FAENA_WEBHOOK_SECRETS: webhook.secrets: the value must be secrets like whsec_ and 24 to 64 bytes in base64, separated by commas; number 2 is not base64 after whsec_"
        );
    }

    #[test]
    fn the_example_file_is_up_to_date() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../faena.example.toml");
        let stored = std::fs::read_to_string(path).unwrap_or_default();
        assert_eq!(stored, example(), "run `cargo run -- config --example > faena.example.toml`");
    }

    #[test]
    fn the_example_file_is_valid_with_every_line_taken_in() {
        let taken: String = example()
            .lines()
            .map(|line| if line.starts_with('#') && !line.starts_with("# ") { &line[1..] } else { line })
            .map(|line| format!("{line}\n"))
            .collect();
        let config = load(&taken, &[]).expect("the defaults are good");
        for key in KEYS {
            assert_eq!(config.text(key.path), key.default, "{}", key.path);
        }
    }
}
