//! Tracks the child processes that this process has started, and kills all others: orphans of programs whose guard was killed.

use std::{
    collections::HashSet,
    fs, io,
    process::id,
    sync::{
        LazyLock,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use parking_lot::Mutex;
use rustix::process::{Pid, Signal, WaitOptions, kill_process, waitpid};
use tokio::process::{Child, Command};

/// Processes that this process has started and not yet waited for.
static KNOWN: LazyLock<Mutex<HashSet<u32>>> = LazyLock::new(Mutex::default);
static ADOPTS_ORPHANS: AtomicBool = AtomicBool::new(false);

/// How long the processes of one killed guard may take to end.
const ORPHAN_LIMIT: Duration = Duration::from_secs(5);
/// Pause while killed processes have not ended yet.
const PAUSE: Duration = Duration::from_millis(1);

/// A process that this process has started. While this value exists, the process does not count as an orphan.
#[derive(Debug)]
pub struct KnownChild(u32);

impl Drop for KnownChild {
    fn drop(&mut self) {
        KNOWN.lock().remove(&self.0);
    }
}

/// Starts a child process and records it, so that it does not count as an orphan.
///
/// A process that adopts orphans must start every process with this function.
pub fn spawn(command: &mut Command) -> io::Result<(Child, KnownChild)> {
    let mut known = KNOWN.lock();
    let child = command.spawn()?;
    let process = child.id().unwrap_or_default();
    known.insert(process);
    Ok((child, KnownChild(process)))
}

pub(crate) fn adopt_orphans() {
    ADOPTS_ORPHANS.store(true, Ordering::Relaxed);
}

/// Kills every child process that this process did not start, with its descendants. Blocks until they have ended.
pub(crate) fn kill_orphans() {
    if !ADOPTS_ORPHANS.load(Ordering::Relaxed) {
        return;
    }
    // While the lock is held, this process starts no other child, so each child is either known or an orphan.
    let known = KNOWN.lock();
    if !kill_children(&|process| !known.contains(&process), Some(ORPHAN_LIMIT)) {
        tracing::error!("processes could not be killed after their guard was killed, kill them manually");
    }
}

/// Kills the selected children of this process, with their descendants, until none are left. Returns `false` if some
/// are left after `limit`.
///
/// While processes end, the rounds follow each other without a pause, so that one of them catches even a process that keeps forking
/// and exiting.
pub(crate) fn kill_children(is_selected: &dyn Fn(u32) -> bool, limit: Option<Duration>) -> bool {
    let started = Instant::now();
    loop {
        let children: Vec<u32> = children_of(id()).into_iter().filter(|child| is_selected(*child)).collect();
        if children.is_empty() {
            return true;
        }
        for child in &children {
            kill_tree(*child);
        }
        let ended = children.iter().filter(|child| reap(**child)).count();
        if limit.is_some_and(|limit| started.elapsed() > limit) {
            return false;
        }
        if ended == 0 {
            std::thread::sleep(PAUSE);
        }
    }
}

/// Kills a process and its descendants. The children of a process are listed before it is killed, because they lose
/// their parent then.
fn kill_tree(root: u32) {
    let mut seen = HashSet::new();
    let mut waiting = vec![root];
    while let Some(process) = waiting.pop() {
        if seen.insert(process)
            && let Some(pid) = pid(process)
        {
            waiting.extend(children_of(process));
            let _ = kill_process(pid, Signal::KILL);
        }
    }
}

/// Removes a process from the process table if it has ended. Returns whether it has.
fn reap(process: u32) -> bool {
    pid(process).is_none_or(|pid| !matches!(waitpid(Some(pid), WaitOptions::NOHANG), Ok(None)))
}

pub(crate) fn pid(process: u32) -> Option<Pid> {
    i32::try_from(process).ok().and_then(Pid::from_raw)
}

/// Returns the children of a process, whichever of its threads started them.
fn children_of(process: u32) -> Vec<u32> {
    let threads: Vec<_> = fs::read_dir(format!("/proc/{process}/task")).into_iter().flatten().flatten().collect();
    let lists: Vec<String> =
        threads.iter().filter_map(|thread| fs::read_to_string(thread.path().join("children")).ok()).collect();
    if lists.is_empty() && !threads.is_empty() {
        return children_by_scan(process);
    }
    lists.iter().flat_map(|list| list.split_whitespace()).filter_map(|child| child.parse().ok()).collect()
}

/// Returns the children of a process on a kernel that does not list them.
fn children_by_scan(parent: u32) -> Vec<u32> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    let processes = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    processes.filter(|process| parent_of(*process) == Some(parent)).collect()
}

fn parent_of(process: u32) -> Option<u32> {
    let stat = fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
    // The name of the program is in parentheses and may contain anything.
    stat.rsplit_once(')')?.1.split_whitespace().nth(1)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_ways_find_the_children_of_a_process() {
        let mut child = std::process::Command::new("sleep").arg("3600").spawn().expect("a process");
        assert!(children_of(id()).contains(&child.id()));
        assert!(children_by_scan(id()).contains(&child.id()));
        child.kill().expect("killed");
        child.wait().expect("ended");
        assert!(!children_of(id()).contains(&child.id()));
    }
}
