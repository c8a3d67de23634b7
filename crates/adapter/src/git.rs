//! Runs the `git` program.
//!
//! The smith keeps one bare copy of each repository, and in it one worktree per task. Text from a task reaches git only
//! as a checked address, as a branch name after `--`, or in a file. Hooks of the copies never run.

use std::{
    collections::HashMap,
    path::{Path, PathBuf},
    process::Stdio,
    sync::Arc,
    time::Duration,
};

use parking_lot::Mutex;
use sha2::{Digest, Sha256};
use tokio::{io::AsyncReadExt, process::Command};
use tokio_util::sync::CancellationToken;

use crate::{
    repository::{PullRequest, Repository},
    service::Failure,
};

/// How much of the output of one call is kept.
const MAX_OUTPUT_BYTES: u64 = 256 << 10;

/// Calls git with a time limit and an author for commits.
pub struct Git {
    /// Time limit for one call.
    pub limit: Duration,
    pub author: Author,
    /// One lock per copy of a repository: git refuses a second fetch at the same time.
    locks: Mutex<HashMap<PathBuf, Arc<tokio::sync::Mutex<()>>>>,
}

/// Author of the commits.
#[derive(Clone, Debug)]
pub struct Author {
    pub name: String,
    pub email: String,
}

impl Author {
    /// Parses `Name <address>`.
    pub fn parse(text: &str) -> Result<Author, String> {
        let invalid = || "must be like \"Name <name@example.org>\"".to_owned();
        let (name, email) = text.trim().strip_suffix('>').and_then(|text| text.split_once('<')).ok_or_else(invalid)?;
        let (name, email) = (name.trim(), email.trim());
        if name.is_empty() || email.is_empty() || text.contains(char::is_control) {
            return Err(invalid());
        }
        Ok(Author { name: name.to_owned(), email: email.to_owned() })
    }
}

/// A worktree of a copy of a repository.
pub struct Worktree<'a> {
    git: &'a Git,
    cancel: &'a CancellationToken,
    /// The bare copy.
    copy: PathBuf,
    pub folder: PathBuf,
    pub branch: String,
}

impl Git {
    pub fn new(limit: Duration, author: Author) -> Git {
        Git { limit, author, locks: Mutex::default() }
    }

    /// Checks that git can be started.
    pub async fn check(&self) -> Result<(), String> {
        match self.call(Path::new("/"), &["--version"], &CancellationToken::new()).await {
            Ok(_) => Ok(()),
            Err(_) => Err("git cannot be started; install it".into()),
        }
    }

    /// Calls git and returns its standard output.
    async fn call(&self, folder: &Path, arguments: &[&str], cancel: &CancellationToken) -> Result<String, Failure> {
        let name = arguments.iter().find(|word| !word.starts_with('-')).unwrap_or(&"git");
        let failed = |reason: String| Failure::Retry(format!("git {name}: {reason}"));
        let (mut child, _known) =
            faena_process::spawn(&mut self.command(folder, arguments)).map_err(|error| failed(error.to_string()))?;
        let (stdout, stderr) = (child.stdout.take(), child.stderr.take());
        let read = async |output: Option<&mut (dyn tokio::io::AsyncRead + Unpin + Send)>| {
            let mut bytes = Vec::new();
            if let Some(output) = output {
                let _ = (&mut *output).take(MAX_OUTPUT_BYTES).read_to_end(&mut bytes).await;
                let _ = tokio::io::copy(output, &mut tokio::io::sink()).await;
            }
            String::from_utf8_lossy(&bytes).into_owned()
        };
        let (mut stdout, mut stderr) = (stdout, stderr);
        let work = async {
            let (stdout, stderr) = tokio::join!(
                read(stdout.as_mut().map(|output| output as _)),
                read(stderr.as_mut().map(|output| output as _))
            );
            (child.wait().await, stdout, stderr)
        };
        let (status, stdout, stderr) = tokio::select! {
            done = work => done,
            () = cancel.cancelled() => return Err(Failure::Cancelled),
            () = tokio::time::sleep(self.limit) => return Err(failed(format!("took longer than {:?}", self.limit))),
        };
        match status {
            Ok(status) if status.success() => Ok(stdout),
            Ok(_) => Err(failed(last_lines(&stderr))),
            Err(error) => Err(failed(error.to_string())),
        }
    }

    fn command(&self, folder: &Path, arguments: &[&str]) -> Command {
        let mut command = Command::new("git");
        command.args(["-c", "core.hooksPath=/dev/null", "-c", "protocol.ext.allow=never", "-c", "gc.auto=0"]);
        command.args(["-c", "commit.gpgSign=false", "-c", "advice.detachedHead=false"]);
        command.args(arguments).current_dir(folder);
        // The environment of a surrounding git command must not redirect these calls.
        for name in ["GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_COMMON_DIR", "GIT_OBJECT_DIRECTORY"] {
            command.env_remove(name);
        }
        command.env("GIT_TERMINAL_PROMPT", "0").env("LC_ALL", "C");
        // Git must not find a repository around the folder: the workdir may be inside another checkout.
        if let Some(parent) = folder.parent() {
            command.env("GIT_CEILING_DIRECTORIES", parent);
        }
        if std::env::var_os("GIT_SSH_COMMAND").is_none() {
            command.env("GIT_SSH_COMMAND", "ssh -oBatchMode=yes");
        }
        command.env("GIT_AUTHOR_NAME", &self.author.name).env("GIT_AUTHOR_EMAIL", &self.author.email);
        command.env("GIT_COMMITTER_NAME", &self.author.name).env("GIT_COMMITTER_EMAIL", &self.author.email);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true);
        command
    }

    fn lock(&self, copy: &Path) -> Arc<tokio::sync::Mutex<()>> {
        self.locks.lock().entry(copy.to_owned()).or_default().clone()
    }

    /// Copies a branch into a new folder, without its history. Returns its commit.
    pub async fn check_out(
        &self,
        pull_request: &PullRequest,
        folder: &Path,
        cancel: &CancellationToken,
    ) -> Result<String, Failure> {
        remove_folder(folder)?;
        std::fs::create_dir_all(folder).map_err(|error| Failure::Retry(format!("cannot create a folder: {error}")))?;
        self.call(folder, &["init", "--quiet"], cancel).await?;
        let reference = format!("refs/heads/{}", pull_request.branch);
        let fetch = ["fetch", "--quiet", "--no-tags", "--depth=1", "--", &pull_request.address, &reference];
        self.call(folder, &fetch, cancel).await?;
        self.call(folder, &["checkout", "--quiet", "--detach", "FETCH_HEAD"], cancel).await?;
        Ok(self.call(folder, &["rev-parse", "HEAD"], cancel).await?.trim().to_owned())
    }

    /// Returns a handle to the worktree of a task. Changes nothing on disk.
    pub fn worktree<'a>(
        &'a self,
        copies: &Path,
        folder: PathBuf,
        repository: &Repository,
        task: &str,
        cancel: &'a CancellationToken,
    ) -> Worktree<'a> {
        let copy = copies.join(format!("{}.git", short_hash(&repository.address)));
        Worktree { git: self, cancel, copy, folder, branch: format!("faena/{task}") }
    }

    async fn update_copy(&self, copy: &Path, address: &str, cancel: &CancellationToken) -> Result<(), Failure> {
        if !copy.join("complete").exists() {
            remove_folder(copy)?;
            std::fs::create_dir_all(copy)
                .map_err(|error| Failure::Retry(format!("cannot create a folder: {error}")))?;
            self.call(copy, &["init", "--quiet", "--bare"], cancel).await?;
            self.call(copy, &["remote", "add", "--", "origin", address], cancel).await?;
            std::fs::write(copy.join("complete"), "")
                .map_err(|error| Failure::Retry(format!("cannot write a file: {error}")))?;
        }
        self.call(copy, &["fetch", "--quiet", "--prune", "--no-tags", "origin"], cancel).await?;
        // Fails for an empty repository, which has no commit to start from.
        self.call(copy, &["remote", "set-head", "origin", "--auto"], cancel).await?;
        Ok(())
    }

    /// Removes a worktree and its branch from the copy.
    pub async fn remove_worktree(&self, copies: &Path, address: &str, folder: &Path, task: &str) {
        let copy = copies.join(format!("{}.git", short_hash(address)));
        if !copy.exists() {
            return;
        }
        let (cancel, branch) = (CancellationToken::new(), format!("faena/{task}"));
        let lock = self.lock(&copy);
        let _locked = lock.lock().await;
        let _ = remove_folder(folder);
        let _ = self.call(&copy, &["worktree", "prune", "--expire=now"], &cancel).await;
        let _ = self.call(&copy, &["branch", "--quiet", "-D", "--", &branch], &cancel).await;
    }
}

impl Worktree<'_> {
    async fn call(&self, arguments: &[&str]) -> Result<String, Failure> {
        self.git.call(&self.folder, arguments, self.cancel).await
    }

    /// Fetches into the bare copy, and returns the commit from which a task without earlier work starts.
    pub async fn fetch(&self, repository: &Repository) -> Result<String, Failure> {
        let lock = self.git.lock(&self.copy);
        let _locked = tokio::select! {
            locked = lock.lock() => locked,
            () = self.cancel.cancelled() => return Err(Failure::Cancelled),
        };
        self.git.update_copy(&self.copy, &repository.address, self.cancel).await?;
        self.start_commit(repository.base.as_deref()).await
    }

    /// Returns the commit to start from: the pushed change of the task, if there is one, else the base.
    async fn start_commit(&self, base: Option<&str>) -> Result<String, Failure> {
        let pushed = format!("refs/remotes/origin/{}^{{commit}}", self.branch);
        let base = match base {
            Some(branch) => format!("refs/remotes/origin/{branch}^{{commit}}"),
            None => "refs/remotes/origin/HEAD^{commit}".to_owned(),
        };
        let verify = ["rev-parse", "--quiet", "--verify", "--end-of-options"];
        if let Ok(commit) = self.git.call(&self.copy, &[&verify[..], &[&pushed]].concat(), self.cancel).await {
            return Ok(commit.trim().to_owned());
        }
        let found = self.git.call(&self.copy, &[&verify[..], &[&base]].concat(), self.cancel).await;
        match found {
            Ok(commit) => Ok(commit.trim().to_owned()),
            Err(Failure::Cancelled) => Err(Failure::Cancelled),
            Err(_) => Err(Failure::Final("the repository has no such branch to start from".into())),
        }
    }

    /// Checks out the branch at a commit and discards uncommitted changes. Ignored files stay: they are caches.
    pub async fn reset(&self, commit: &str) -> Result<(), Failure> {
        if self.folder.join(".git").is_file()
            && self.call(&["checkout", "--quiet", "--force", "-B", &self.branch, commit]).await.is_ok()
            && self.call(&["clean", "--quiet", "-ffd"]).await.is_ok()
        {
            return Ok(());
        }
        if self.cancel.is_cancelled() {
            return Err(Failure::Cancelled);
        }
        let lock = self.git.lock(&self.copy);
        let _locked = lock.lock().await;
        remove_folder(&self.folder)?;
        let folder = self.folder.display().to_string();
        self.git.call(&self.copy, &["worktree", "prune", "--expire=now"], self.cancel).await?;
        let add = ["worktree", "add", "--quiet", "--force", "-B", &self.branch, "--", &folder, commit];
        self.git.call(&self.copy, &add, self.cancel).await.map(|_| ())
    }

    /// Commits everything that changed. Returns the new commit, or the current one if nothing changed.
    pub async fn commit(&self, message: &Path) -> Result<String, Failure> {
        self.call(&["add", "--all"]).await?;
        if self.call(&["diff", "--cached", "--quiet"]).await.is_err() {
            if self.cancel.is_cancelled() {
                return Err(Failure::Cancelled);
            }
            let message = message.display().to_string();
            self.call(&["commit", "--quiet", "--no-verify", "--file", &message]).await?;
        }
        Ok(self.call(&["rev-parse", "HEAD"]).await?.trim().to_owned())
    }

    /// Pushes a commit as the branch of the task, which belongs to the smith alone.
    pub async fn push(&self, commit: &str) -> Result<(), Failure> {
        let target = format!("{commit}:refs/heads/{}", self.branch);
        self.call(&["push", "--quiet", "--force", "--no-verify", "origin", "--", &target]).await.map(|_| ())
    }

    /// Returns the number of changed files and the time of the latest change in milliseconds.
    pub async fn changes(&self) -> Result<(usize, u64), Failure> {
        let status = self.call(&["status", "--porcelain", "-z", "--untracked-files=all"]).await?;
        let paths: Vec<&str> = status.split('\0').filter_map(|entry| entry.get(3..)).collect();
        let modified = paths.iter().take(1_000).filter_map(|path| {
            let modified = std::fs::symlink_metadata(self.folder.join(path)).ok()?.modified().ok()?;
            Some(modified.duration_since(std::time::UNIX_EPOCH).ok()?.as_millis() as u64)
        });
        Ok((paths.len(), modified.max().unwrap_or(0)))
    }
}

pub fn remove_folder(folder: &Path) -> Result<(), Failure> {
    match std::fs::remove_dir_all(folder) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(Failure::Retry(format!("cannot remove {}: {error}", folder.display())))
        }
        _ => Ok(()),
    }
}

fn short_hash(text: &str) -> String {
    Sha256::digest(text.as_bytes()).iter().take(12).map(|byte| format!("{byte:02x}")).collect()
}

/// Returns the end of git's messages as one line.
fn last_lines(stderr: &str) -> String {
    let lines: Vec<&str> = stderr.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
    let text = lines[lines.len().saturating_sub(3)..].join("; ");
    text.chars().take(500).collect()
}
