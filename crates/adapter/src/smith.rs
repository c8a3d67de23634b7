//! `faena adapter smith`: makes plans and changes with the commands of a coding agent.

use std::{ffi::OsString, fs, io, path::PathBuf, time::Duration};

use async_trait::async_trait;
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

use crate::{
    CannotStart,
    command::{self, CommandEnd, CommandSpec, Ending},
    git::{Author, Git, Worktree},
    options::{Argv, ServiceArguments, argv, bytes, duration},
    outgoing::{CHANGE_MADE, PLAN_MADE, derived_id},
    private,
    records::Records,
    repository::{Allowed, PullRequest, Repository},
    runner::serve,
    service::{Failure, Run, Service},
    task::{APPROVE_PLAN, ASK_STATE, CODING, ENDED, GENERATE_PLAN, PLANNING, SEND_FEEDBACK, STATE_CHANGED, Work},
};

pub const HELP: &str = "\
The commands are lists of words, not shell text; quote a word with spaces, or write a JSON array.
They run in a git worktree of the task and read their request from standard input.
Their environment has FAENA_TASK_ID, FAENA_PHASE (plan or code), FAENA_PROMPT_FILE, FAENA_PLAN_FILE, FAENA_FEEDBACK_FILE, \
FAENA_REPOSITORY and FAENA_BRANCH.
The plan command writes the plan to standard output; the code command changes files.
Exit code 0 is success, 65 a failure without a retry, any other a failure that is retried.

Example:
  faena adapter smith --workdir smith --allow-repository /srv/git \\
    --plan-command 'agent --plan' --code-command 'agent --write'";

#[derive(clap::Args)]
pub struct Arguments {
    #[command(flatten)]
    service: ServiceArguments,
    /// Command that makes a plan
    #[arg(long, value_name = "COMMAND", value_parser = argv)]
    plan_command: Argv,
    /// Command that changes the files of the worktree
    #[arg(long, value_name = "COMMAND", value_parser = argv)]
    code_command: Argv,
    /// Time limit for the plan command
    #[arg(long, value_name = "DURATION", default_value = "30m", value_parser = duration)]
    plan_limit: Duration,
    /// Time limit for the code command
    #[arg(long, value_name = "DURATION", default_value = "5h", value_parser = duration)]
    code_limit: Duration,
    /// Time limit for one git command
    #[arg(long, value_name = "DURATION", default_value = "10m", value_parser = duration)]
    git_limit: Duration,
    /// Maximum size of a plan
    #[arg(long, value_name = "SIZE", default_value = "64KiB", value_parser = bytes)]
    max_plan: u64,
    /// Maximum output; a command that writes more is killed
    #[arg(long, value_name = "SIZE", default_value = "64MiB", value_parser = bytes)]
    max_output: u64,
    /// Author of the commits
    #[arg(long, value_name = "AUTHOR", default_value = "Faena smith <smith@faena.invalid>", value_parser = Author::parse)]
    author: Author,
}

/// `EX_DATAERR` of sysexits.h: the request is wrong, and another attempt would fail the same way.
const DATA_ERROR: i32 = 65;

pub async fn run(arguments: Arguments, stop: CancellationToken) -> Result<(), CannotStart> {
    let records = Records::open(&arguments.service.workdir)?;
    let cannot = |error: io::Error| CannotStart(format!("--workdir: {error}"));
    let copies = records.folder().join("repositories");
    private::create_folder(&copies).map_err(cannot)?;
    let smith = Smith {
        allowed: arguments.service.allowed()?,
        guard: command::guard_program().map_err(cannot)?,
        git: Git::new(arguments.git_limit, arguments.author.clone()),
        copies,
        plan_command: arguments.plan_command.0.clone(),
        code_command: arguments.code_command.0.clone(),
        plan_limit: arguments.plan_limit,
        code_limit: arguments.code_limit,
        max_plan_bytes: arguments.max_plan,
        max_output_bytes: arguments.max_output,
        // Twice per heartbeat interval, so that every heartbeat reports current files.
        file_check_interval: arguments.service.heartbeat / 2,
    };
    smith.git.check().await.map_err(CannotStart)?;
    serve(smith, "smith", records, &arguments.service, stop).await
}

struct Smith {
    allowed: Allowed,
    guard: PathBuf,
    git: Git,
    /// Folder of the local clones of repositories.
    copies: PathBuf,
    plan_command: Vec<String>,
    code_command: Vec<String>,
    plan_limit: Duration,
    code_limit: Duration,
    max_plan_bytes: u64,
    max_output_bytes: u64,
    /// How often the changed files are counted.
    file_check_interval: Duration,
}

/// What the commands of one phase receive.
struct Request<'a> {
    phase: &'static str,
    argv: &'a [String],
    limit: Duration,
    /// Standard input.
    text: String,
}

#[async_trait]
impl Service for Smith {
    fn messages(&self) -> &'static [&'static str] {
        &[GENERATE_PLAN, APPROVE_PLAN, SEND_FEEDBACK, ASK_STATE, STATE_CHANGED, ENDED]
    }

    fn states(&self) -> &'static [&'static str] {
        &[PLANNING, CODING]
    }

    async fn perform(&self, run: &mut Run<'_>) -> Result<(&'static str, Value), Failure> {
        match run.record.item.work.clone() {
            Work::Plan { repository, prompt } => self.plan(run, &repository, &prompt).await,
            Work::Code { repository, prompt, plan, correction } => {
                self.code(run, &repository, &prompt, &plan, correction.as_deref()).await
            }
            Work::Test { .. } => Err(Failure::Final("the smith does not run tests".into())),
        }
    }

    async fn forget(&self, records: &Records, task: &str) {
        let repository = records.load(task).and_then(|record| record.known.repository);
        let Some(Ok(repository)) = repository.map(|text| self.allowed.repository(&text)) else { return };
        let folder = records.task_folder(task).join("tree");
        self.git.remove_worktree(&self.copies, &repository.address, &folder, task).await;
    }
}

impl Smith {
    async fn plan(&self, run: &mut Run<'_>, repository: &str, prompt: &str) -> Result<(&'static str, Value), Failure> {
        let repository = self.allowed.repository(repository).map_err(Failure::Final)?;
        let (tree, start) = self.prepare(run, &repository).await?;
        let request =
            Request { phase: "plan", argv: &self.plan_command, limit: self.plan_limit, text: prompt.to_owned() };
        let ended = self.command(run, &tree, &repository, request).await?;
        if ended.stdout.len() as u64 > self.max_plan_bytes {
            return Err(Failure::Final(format!("the plan is larger than {} bytes", self.max_plan_bytes)));
        }
        let plan = String::from_utf8_lossy(&ended.stdout).trim().replace('\0', "\u{fffd}");
        if plan.is_empty() {
            return Err(Failure::Retry("the plan command wrote no plan to standard output".into()));
        }
        // A plan must not change files, so whatever its command changed is undone.
        tree.reset(&start).await?;
        let plan_id = format!("plan-{}", &derived_id(&[&run.record.item.task, &run.record.item.id])[..8]);
        Ok((PLAN_MADE, json!({"planId": plan_id, "plan": plan})))
    }

    async fn code(
        &self,
        run: &mut Run<'_>,
        repository: &str,
        prompt: &str,
        plan: &str,
        correction: Option<&str>,
    ) -> Result<(&'static str, Value), Failure> {
        let repository = self.allowed.repository(repository).map_err(Failure::Final)?;
        let (tree, start) = self.prepare(run, &repository).await?;
        let commit = match run.record.commit.clone() {
            // The change was finished before an interruption.
            Some(commit) => commit,
            None => {
                let text = match correction {
                    Some(correction) => format!("{prompt}\n\n# Plan\n\n{plan}\n\n# Correction\n\n{correction}\n"),
                    None => format!("{prompt}\n\n# Plan\n\n{plan}\n"),
                };
                self.write_inputs(run, &[("plan", plan), ("feedback", correction.unwrap_or_default())])?;
                let request = Request { phase: "code", argv: &self.code_command, limit: self.code_limit, text };
                self.command(run, &tree, &repository, request).await?;
                let message = self.write_message(run, prompt, correction.is_some())?;
                let commit = tree.commit(&message).await?;
                if commit == start && correction.is_none() {
                    return Err(Failure::Retry("the code command changed nothing".into()));
                }
                run.record.commit = Some(commit.clone());
                run.save()?;
                commit
            }
        };
        run.progress.begin("publicando");
        tree.push(&commit).await?;
        tracing::info!(task = run.record.item.task, commit, branch = tree.branch, "change pushed");
        let pull_request = PullRequest { address: repository.address, branch: tree.branch.clone() };
        Ok((CHANGE_MADE, json!({"pullRequestUrl": pull_request.to_string()})))
    }

    /// Brings the worktree to the commit from which this work starts, and stores that commit.
    async fn prepare<'a, 'r: 'a>(
        &'a self,
        run: &mut Run<'r>,
        repository: &Repository,
    ) -> Result<(Worktree<'a>, String), Failure> {
        run.progress.begin("preparando");
        let task = run.record.item.task.clone();
        let folder = run.records.task_folder(&task).join("tree");
        fs::create_dir_all(&folder).map_err(|error| Failure::Retry(format!("cannot create a folder: {error}")))?;
        let tree = self.git.worktree(&self.copies, folder, repository, &task, run.cancel);
        if let (Some(start), Some(_)) = (&run.record.start, &run.record.commit) {
            return Ok((tree, start.clone()));
        }
        // Earlier work on this task has already fetched the commit.
        if let Some(start) = &run.record.start {
            match tree.reset(start).await {
                Ok(()) => return Ok((tree, start.clone())),
                Err(Failure::Cancelled) => return Err(Failure::Cancelled),
                // A new clone does not contain commits that were never pushed.
                Err(_) => {}
            }
        }
        let start = tree.fetch(repository).await?;
        tree.reset(&start).await?;
        run.record.start = Some(start.clone());
        run.save()?;
        Ok((tree, start))
    }

    /// Runs a command of the agent in the worktree.
    async fn command(
        &self,
        run: &Run<'_>,
        tree: &Worktree<'_>,
        repository: &Repository,
        request: Request<'_>,
    ) -> Result<CommandEnd, Failure> {
        run.progress.begin(if request.phase == "plan" { "planificando" } else { "programando" });
        self.write_inputs(run, &[("prompt", &request.text)])?;
        let inputs = inputs_folder(run);
        let variables: Vec<(&'static str, OsString)> = vec![
            ("FAENA_TASK_ID", run.record.item.task.clone().into()),
            ("FAENA_PHASE", request.phase.into()),
            ("FAENA_PROMPT_FILE", inputs.join("prompt").into()),
            ("FAENA_PLAN_FILE", inputs.join("plan").into()),
            ("FAENA_FEEDBACK_FILE", inputs.join("feedback").into()),
            ("FAENA_REPOSITORY", repository.address.clone().into()),
            ("FAENA_BRANCH", tree.branch.clone().into()),
        ];
        let prompt = inputs.join("prompt");
        let spec = CommandSpec {
            argv: request.argv.to_vec(),
            folder: &tree.folder,
            input: Some(&prompt),
            variables,
            inherits_environment: true,
            time_limit: request.limit,
            max_output_bytes: self.max_output_bytes,
            kept_bytes: usize::try_from(self.max_plan_bytes).unwrap_or(usize::MAX).saturating_add(1).min(64 << 20),
            usage: None,
        };
        let ended = tokio::select! {
            ended = command::run(&self.guard, spec, run.progress, run.cancel) => ended,
            () = self.watch_files(run, tree) => unreachable!("it never ends"),
        };
        check_end(request, ended)
    }

    /// Counts changed files from time to time: many agents write nothing until they have finished.
    async fn watch_files(&self, run: &Run<'_>, tree: &Worktree<'_>) {
        loop {
            tokio::time::sleep(self.file_check_interval).await;
            if let Ok((changed, modified_ms)) = tree.changes().await {
                run.progress.set_files(changed, modified_ms);
            }
        }
    }

    fn write_inputs(&self, run: &Run<'_>, files: &[(&str, &str)]) -> Result<(), Failure> {
        let folder = inputs_folder(run);
        let written = private::create_folder(&folder)
            .and_then(|()| files.iter().try_for_each(|(name, text)| fs::write(folder.join(name), text)));
        written.map_err(|error| Failure::Retry(format!("cannot write the inputs of a command: {error}")))
    }

    /// Writes the commit message: the beginning of the prompt, and the task id.
    fn write_message(&self, run: &Run<'_>, prompt: &str, is_correction: bool) -> Result<PathBuf, Failure> {
        let title: String = prompt.lines().next().unwrap_or_default().chars().take(60).collect();
        let title = if title.trim().is_empty() { "Change" } else { title.trim() };
        let title = if is_correction { format!("{title} (correction)") } else { title.to_owned() };
        // A line that begins with # would be a comment.
        let title = title.trim_start_matches('#').trim_start();
        let message = format!("{title}\n\nFaena-Task: {}\n", run.record.item.task);
        self.write_inputs(run, &[("message", &message)])?;
        Ok(inputs_folder(run).join("message"))
    }
}

fn inputs_folder(run: &Run<'_>) -> PathBuf {
    run.records.task_folder(&run.record.item.task).join("inputs")
}

/// Returns the output of a command that succeeded, or the failure that follows from its exit code or from why it was killed.
fn check_end(request: Request<'_>, ended: CommandEnd) -> Result<CommandEnd, Failure> {
    let Request { phase, limit, .. } = request;
    let last_line = if ended.last_line.is_empty() { String::new() } else { format!(": {}", ended.last_line) };
    match &ended.ending {
        Ending::Exit(0) => Ok(ended),
        Ending::Exit(DATA_ERROR) => Err(Failure::Final(format!("the {phase} command refused the request{last_line}"))),
        Ending::Exit(code) => {
            Err(Failure::Retry(format!("the {phase} command ended with exit code {code}{last_line}")))
        }
        Ending::TimedOut => Err(Failure::Final(format!("the {phase} command took longer than {limit:?}"))),
        Ending::TooMuchOutput => {
            Err(Failure::Final(format!("the {phase} command wrote too much: {} bytes", ended.output_bytes)))
        }
        Ending::Exceeded(reason) => Err(Failure::Final(format!("the {phase} command was killed: {reason}"))),
        Ending::Cancelled => Err(Failure::Cancelled),
        Ending::Broken(reason) => Err(Failure::Retry(reason.clone())),
    }
}
