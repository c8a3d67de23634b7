//! `faena adapter sandbox`: tests changes in a fresh checkout, with limits.

use std::{ffi::OsString, fs, io, path::PathBuf, time::Duration};

use async_trait::async_trait;
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

use crate::{
    CannotStart,
    command::{self, CommandEnd, CommandSpec, Ending},
    git::{Author, Git, remove_folder},
    isolation::{self, Isolation, Network, UsageLimits},
    options::{Argv, ServiceArguments, argv, bytes, duration},
    outgoing::TESTED,
    records::Records,
    repository::Allowed,
    runner::serve,
    service::{Failure, Run, Service},
    task::{ASK_STATE, ENDED, STATE_CHANGED, TEST, TESTING, Work},
};

pub const HELP: &str = "\
The test command is a list of words, not shell text; quote a word with spaces, or write a JSON array.
It runs in a fresh checkout of the branch, with an empty home folder and only PATH, LANG and TZ of the environment.
Exit code 0 means that the tests passed. Tests that exceed a limit are killed and count as failed.

Example:
  faena adapter sandbox --workdir sandbox --allow-repository /srv/git \\
    --test-command 'make test' --time-limit 10m";

#[derive(clap::Args)]
pub struct Arguments {
    #[command(flatten)]
    service: ServiceArguments,
    /// Command that tests the checkout
    #[arg(long, value_name = "COMMAND", value_parser = argv)]
    test_command: Argv,
    /// Time limit for the tests
    #[arg(long, value_name = "DURATION", default_value = "30m", value_parser = duration)]
    time_limit: Duration,
    /// Maximum memory of the tests, all processes together
    #[arg(long, value_name = "SIZE", default_value = "2GiB", value_parser = bytes)]
    max_memory: u64,
    /// Maximum number of processes that the tests may run
    #[arg(long, value_name = "N", default_value_t = 256, value_parser = clap::value_parser!(u64).range(1..))]
    max_processes: u64,
    /// Largest file that the tests may write
    #[arg(long, value_name = "SIZE", default_value = "1GiB", value_parser = bytes)]
    max_file: u64,
    /// Maximum output; tests that write more are killed
    #[arg(long, value_name = "SIZE", default_value = "64MiB", value_parser = bytes)]
    max_output: u64,
    /// Maximum length of the log in the result; a longer log keeps its beginning and its end
    #[arg(long, value_name = "SIZE", default_value = "32KiB", value_parser = bytes)]
    max_log: u64,
    /// Network access of the tests
    #[arg(long, value_enum, default_value = "auto")]
    network: NetworkChoice,
    /// Time limit for one git command
    #[arg(long, value_name = "DURATION", default_value = "10m", value_parser = duration)]
    git_limit: Duration,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum NetworkChoice {
    /// No network if the system can isolate the tests, otherwise that of the machine; the log says which
    Auto,
    /// No network; the sandbox does not start if the system cannot isolate the tests
    Off,
    /// The network of the machine
    On,
}

/// The log is part of the task's data, which is limited to 256 KiB.
const LONGEST_LOG: u64 = 128 << 10;

pub async fn run(arguments: Arguments, stop: CancellationToken) -> Result<(), CannotStart> {
    let records = Records::open(&arguments.service.workdir)?;
    let author = Author { name: "Faena sandbox".into(), email: "sandbox@faena.invalid".into() };
    let guard = command::guard_program().map_err(|error: io::Error| CannotStart(error.to_string()))?;
    if arguments.max_log > LONGEST_LOG {
        return Err(CannotStart("--max-log: must be at most 128KiB".into()));
    }
    let sandbox = Sandbox {
        allowed: arguments.service.allowed()?,
        guard,
        git: Git::new(arguments.git_limit, author),
        isolation: isolation(arguments.network).await?,
        argv: arguments.test_command.0.clone(),
        time_limit: arguments.time_limit,
        usage: UsageLimits { memory_bytes: arguments.max_memory, processes: arguments.max_processes },
        max_file_bytes: arguments.max_file,
        max_output_bytes: arguments.max_output,
        log_bytes: arguments.max_log as usize,
    };
    sandbox.git.check().await.map_err(CannotStart)?;
    serve(sandbox, "sandbox", records, &arguments.service, stop).await
}

async fn isolation(choice: NetworkChoice) -> Result<Isolation, CannotStart> {
    if !isolation::has_prlimit().await {
        return Err(CannotStart("prlimit cannot be started; install util-linux".into()));
    }
    let found = match choice {
        NetworkChoice::On => Isolation::none(),
        NetworkChoice::Auto | NetworkChoice::Off => Isolation::find().await,
    };
    if choice == NetworkChoice::Off && found.network == Network::On {
        return Err(CannotStart(
            "--network off: this system does not allow new network namespaces; allow them, or choose --network auto"
                .into(),
        ));
    }
    let own_processes = found.has_own_processes;
    match found.network {
        Network::Off => tracing::info!(network = "off", loopback = "off", own_processes, "sandbox isolated"),
        Network::LoopbackOnly => tracing::info!(network = "off", loopback = "on", own_processes, "sandbox isolated"),
        Network::On if choice == NetworkChoice::On => tracing::info!(network = "on", "sandbox not isolated"),
        Network::On => tracing::warn!(network = "on", "sandbox not isolated, the system does not allow it"),
    }
    Ok(found)
}

struct Sandbox {
    allowed: Allowed,
    guard: PathBuf,
    git: Git,
    isolation: Isolation,
    argv: Vec<String>,
    time_limit: Duration,
    usage: UsageLimits,
    max_file_bytes: u64,
    max_output_bytes: u64,
    log_bytes: usize,
}

#[async_trait]
impl Service for Sandbox {
    fn messages(&self) -> &'static [&'static str] {
        &[TEST, ASK_STATE, STATE_CHANGED, ENDED]
    }

    fn states(&self) -> &'static [&'static str] {
        &[TESTING]
    }

    async fn perform(&self, run: &mut Run<'_>) -> Result<(&'static str, Value), Failure> {
        let Work::Test { pull_request } = &run.record.item.work else {
            return Err(Failure::Final("the sandbox only tests".into()));
        };
        let pull_request = self.allowed.pull_request(pull_request).map_err(Failure::Final)?;
        let folder = run.records.task_folder(&run.record.item.task);
        let (checkout, home) = (folder.join("checkout"), folder.join("home"));
        run.progress.begin("preparando");
        let commit = self.git.check_out(&pull_request, &checkout, run.cancel).await?;
        remove_folder(&home)?;
        fs::create_dir_all(&home).map_err(|error| Failure::Retry(format!("cannot create a folder: {error}")))?;
        run.progress.begin("probando");
        let variables: Vec<(&'static str, OsString)> = vec![
            ("HOME", home.clone().into()),
            ("TMPDIR", home.clone().into()),
            ("FAENA_TASK_ID", run.record.item.task.clone().into()),
            ("FAENA_BRANCH", pull_request.branch.clone().into()),
            ("FAENA_COMMIT", commit.clone().into()),
        ];
        let spec = CommandSpec {
            argv: self.isolation.wrap(&self.argv, self.usage, self.max_file_bytes),
            folder: &checkout,
            input: None,
            variables,
            inherits_environment: false,
            time_limit: self.time_limit,
            max_output_bytes: self.max_output_bytes,
            kept_bytes: self.log_bytes,
            usage: Some(self.usage),
        };
        let ended = command::run(&self.guard, spec, run.progress, run.cancel).await;
        let removed = remove_folder(&checkout).and(remove_folder(&home));
        let result = self.result(ended)?;
        removed?;
        tracing::info!(task = run.record.item.task, commit, passed = %result["exito"], "tests ended");
        Ok((TESTED, result))
    }

    async fn forget(&self, _records: &Records, _task: &str) {}
}

impl Sandbox {
    /// Turns the end of the tests into the payload of the result.
    fn result(&self, ended: CommandEnd) -> Result<Value, Failure> {
        let note = match &ended.ending {
            Ending::Exit(0) => None,
            Ending::Exit(code) => Some(format!("exit code {code}")),
            Ending::TimedOut => Some(format!("killed: it took longer than {:?}", self.time_limit)),
            Ending::TooMuchOutput => Some(format!("killed: it wrote more than {} bytes", self.max_output_bytes)),
            Ending::Exceeded(reason) => Some(format!("killed: {reason}")),
            Ending::Cancelled => return Err(Failure::Cancelled),
            Ending::Broken(reason) => return Err(Failure::Retry(reason.clone())),
        };
        let log = match &note {
            None => ended.log,
            Some(note) => format!("{}\n[{note}]", ended.log.trim_end()),
        };
        Ok(json!({"exito": note.is_none(), "log": log}))
    }
}
