//! Tests of reading the configuration.

use super::*;

fn load(file: &str, environment: &[(&str, &str)]) -> Result<Config, ConfigError> {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("faena.toml");
    std::fs::write(&path, file).expect("written");
    let environment = environment.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
    Config::load((&path, true), environment, &[])
}

fn error(file: &str, environment: &[(&str, &str)]) -> String {
    let text = load(file, environment).err().expect("rejected").to_string();
    text[text.find("faena.toml").unwrap_or(0)..].to_owned()
}

#[test]
fn the_environment_overrides_the_file() {
    let config = load("[server]\nport = 1\nhost = \"::1\"\n", &[("PORT", "2")]).expect("good");
    assert_eq!((config.port(), config.text("server.host")), (2, "::1"));
}

#[test]
fn every_variable_of_a_task_scheduler_service_is_accepted() {
    let environment = [
        ("NODE_ENV", "production"),
        ("PORT", "8080"),
        ("HOST", "127.0.0.2"),
        ("DATABASE_URL", "postgresql://postgres:postgres@db:5432/scheduler"),
        ("REDIS_URL", "redis://redis:6379"),
        ("LOG_LEVEL", "fatal"),
        ("QUEUE_PREFIX", "scheduler"),
        ("WORKER_CONCURRENCY", "100"),
    ];
    let config = load("", &environment).expect("good");
    assert_eq!((config.port(), config.text("server.host"), config.text("log.level")), (8080, "127.0.0.2", "fatal"));
    assert_eq!(config.engine().concurrency, 100);
    let unused: Vec<&str> = config.unused_variables().iter().map(|(name, _)| *name).collect();
    assert_eq!(unused, ["NODE_ENV", "REDIS_URL", "QUEUE_PREFIX"]);
    for level in ["trace", "debug", "info", "warn", "error", "fatal"] {
        load("", &[("LOG_LEVEL", level)]).expect(level);
    }
}

#[test]
fn an_invalid_value_and_an_unknown_key_are_rejected_with_their_position() {
    assert_eq!(
        error("[server]\n\nport = 99999\n", &[]),
        "faena.toml, line 3: server.port: \"99999\" must be a number from 0 to 65535"
    );
    assert_eq!(
        error("[server]\nprot = 1\n", &[]),
        "faena.toml, line 2: server.prot is not a known key; \"faena config\" lists all keys"
    );
    assert_eq!(error("[server\n", &[]), "faena.toml, line 1: unclosed table, expected `]`");
    assert_eq!(
        error("", &[("FAENA_NODE_LEASE", "soon")]),
        "environment FAENA_NODE_LEASE: node.lease: \"soon\" must be a duration like 500ms, 30s, 5m, 12h or 7d"
    );
    assert_eq!(
        error("", &[("FAENA_NOD_LEASE", "1s")]),
        "environment FAENA_NOD_LEASE is not a known key; \"faena config\" lists all keys"
    );
}

#[test]
fn an_error_points_at_the_key_and_not_at_an_earlier_line_with_the_same_beginning() {
    let file = "# port = 1\n[log]\nlevel = \"info\"\n[server]\nhost = \"::1\"\nroles = \"api\"\n\n[database]\ntimeout = \"30s\"\n\
                [webhook]\ntimeout = \"soon\"\n";
    assert_eq!(
        error(file, &[]),
        "faena.toml, line 11: webhook.timeout: \"soon\" must be a duration like 500ms, 30s, 5m, 12h or 7d"
    );
    let file = "[worker]\nheartbeat = \"5m\"\n[node]\nlease = \"15s\"\n";
    assert_eq!(
        error(file, &[("FAENA_WORKER_SILENCE", "1m")]),
        "environment FAENA_WORKER_SILENCE: worker.silence: must be longer than worker.heartbeat (5m), otherwise every worker is declared lost between two heartbeats"
    );
    let file = "[server]\nport = 1\n\n[[sink]]\nname = \"hook\"\nkind = \"webhook\"\nurl = \"http://10.0.0.1/\"\n";
    let found = error(file, &[]);
    assert!(found.starts_with("faena.toml, line 4: [[sink]] url: "), "{found}");
    assert_eq!(error("pool = 3\n", &[]), "faena.toml, line 1: pool must be written [[pool]], with two brackets");
    assert_eq!(error("\nserver = 3\n", &[]), "faena.toml, line 2: server must be a section: [server]");
}

#[test]
fn a_value_that_can_never_work_is_rejected_with_its_position() {
    for (file, expected) in [
        (
            "[outbox]\norigin = \"my jobs\"\n",
            "line 2: outbox.origin: \"my jobs\" must be a URI reference like /faena or https://example.com/jobs, without spaces",
        ),
        ("[queue]\nstrict = \"mail,a\\tb\"\n", "line 2: queue.strict: "),
        ("[node]\nlease = \"0s\"\n", "line 2: node.lease: must be more than 0s"),
        ("[processing]\ntimeout = \"0s\"\n", "line 2: processing.timeout: must be more than 0s"),
        (
            "[[sink]]\nname = \"a\"\nkind = \"file\"\npath = \"x\"\ntypes = []\n",
            "line 1: [[sink]] types: is empty, and no [[outbox.source]] uses the sink \"a\"",
        ),
    ] {
        let found = error(file, &[]);
        assert!(found.contains(expected), "{file}: {found}");
    }
}

#[test]
fn a_password_is_never_shown() {
    let config = load("", &[("DATABASE_URL", "postgres://user:s3cret@host/db")]).expect("good");
    let shown = format!("{:?}", config.rows());
    assert!(shown.contains("postgres://user:***@host/db"), "{shown}");
    assert!(!shown.contains("s3cret"));
}

#[test]
fn a_webhook_secret_is_never_shown_not_even_a_wrong_one() {
    let secret = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw";
    let config = load("", &[("FAENA_WEBHOOK_SECRETS", &format!("{secret}, {secret}"))]).expect("good");
    assert_eq!(config.engine().webhooks.secrets.len(), 2);
    let shown = format!("{:?} {:?}", config.rows(), config.engine());
    assert!(shown.contains("***,***") && !shown.contains("MfKQ"), "{shown}");
    assert_eq!(
        error("", &[("FAENA_WEBHOOK_SECRETS", &format!("{secret},whsec_s3cret"))]),
        "environment FAENA_WEBHOOK_SECRETS: webhook.secrets: must be secrets separated by commas, each whsec_ and 24 to 64 bytes in base64; number 2 is not base64 after whsec_"
    );
}

#[test]
fn the_example_file_is_up_to_date() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../faena.example.toml");
    let stored = std::fs::read_to_string(path).unwrap_or_default();
    assert_eq!(stored, example(), "run `cargo run -- config --example > faena.example.toml`");
}

#[test]
fn the_example_file_is_valid_when_every_line_is_enabled() {
    let taken: String = example()
        .lines()
        .map(|line| if line.starts_with('#') && !line.starts_with("# ") { &line[1..] } else { line })
        .map(|line| format!("{line}\n"))
        .collect();
    let config = load(&taken, &[]).expect("the defaults are good");
    for key in keys() {
        assert_eq!(config.text(key.path), key.default, "{}", key.path);
    }
}
