//! Limits for untrusted commands: resource limits of the kernel, separate namespaces, and a watch over the process
//! tree.
//!
//! The kernel's limits are per process. The watch adds up the whole tree, so that many small processes count like a large one; it
//! checks five times a second, so a tree can exceed its limit for up to 200 ms.

use std::{
    collections::{HashMap, HashSet},
    process::Stdio,
    time::Duration,
};

use tokio::process::Command;

/// How often the watch checks the processes.
const WATCH_EVERY: Duration = Duration::from_millis(200);
/// How long a probe of a program may take.
const PROBE_LIMIT: Duration = Duration::from_secs(10);

/// Limits of a process tree.
#[derive(Clone, Copy, Debug)]
pub struct UsageLimits {
    pub memory_bytes: u64,
    pub processes: u64,
}

/// How far this system can isolate a command.
#[derive(Clone, Debug)]
pub struct Isolation {
    /// The words that precede the command.
    wrapper: Vec<String>,
    pub network: Network,
    /// Whether the command has its own PID namespace, so that no process survives its first one.
    pub has_own_processes: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Network {
    On,
    /// Only the addresses of the machine itself.
    LoopbackOnly,
    /// No addresses at all.
    Off,
}

/// Brings the loopback interface up, then runs the command. The command's words reach the shell as parameters, never as text.
const LOOPBACK: &str = "ip link set lo up 2>/dev/null; exec \"$@\"";

impl Isolation {
    /// Returns no isolation apart from resource limits.
    pub fn none() -> Isolation {
        Isolation { wrapper: Vec::new(), network: Network::On, has_own_processes: false }
    }

    /// Finds the strongest isolation that this system allows, by trying it.
    pub async fn find() -> Isolation {
        let own_processes = ["--net", "--pid", "--fork", "--kill-child", "--mount-proc"];
        let candidates: [&[&[&str]]; 6] = [
            &[&own_processes],
            &[&own_processes[..4]],
            &[&["--net"]],
            &[&["--user", "--map-root-user"], &own_processes],
            &[&["--user", "--map-root-user"], &own_processes[..4]],
            &[&["--user", "--map-root-user", "--net"]],
        ];
        for candidate in candidates {
            let mut wrapper = vec!["unshare".to_owned()];
            wrapper.extend(candidate.concat().into_iter().map(str::to_owned));
            wrapper.push("--".into());
            if !succeeds(&wrapper, &["true"]).await {
                continue;
            }
            let has_own_processes = wrapper.iter().any(|word| word == "--pid");
            let with_loopback = [&wrapper[..], &["sh".into(), "-c".into(), LOOPBACK.into(), "sh".into()]].concat();
            let is_up = succeeds(&with_loopback, &["sh", "-c", "ip -oneline link show lo up | grep -q lo"]).await;
            return match is_up {
                true => Isolation { wrapper: with_loopback, network: Network::LoopbackOnly, has_own_processes },
                false => Isolation { wrapper, network: Network::Off, has_own_processes },
            };
        }
        Isolation::none()
    }

    /// Returns the words that run a command with these limits.
    pub fn wrap(&self, argv: &[String], usage: UsageLimits, max_file_bytes: u64) -> Vec<String> {
        // This limits data, not address space, because many runtimes reserve far more addresses than they use. The
        // kernel counts all processes of a user together, so only the watch limits their number.
        let mut words = self.wrapper.clone();
        words.extend([
            "prlimit".to_owned(),
            format!("--data={}", usage.memory_bytes),
            format!("--fsize={max_file_bytes}"),
            "--core=0".into(),
            "--".into(),
        ]);
        words.extend_from_slice(argv);
        words
    }
}

/// Returns whether `prlimit` can be used.
pub async fn has_prlimit() -> bool {
    succeeds(&["prlimit".to_owned(), "--core=0".into(), "--".into()], &["true"]).await
}

async fn succeeds(wrapper: &[String], command: &[&str]) -> bool {
    let Some((program, arguments)) = wrapper.split_first() else { return false };
    let mut probe = Command::new(program);
    probe.args(arguments).args(command).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    probe.kill_on_drop(true);
    let Ok((mut child, _known)) = faena_process::spawn(&mut probe) else { return false };
    let status = tokio::time::timeout(PROBE_LIMIT, child.wait()).await;
    matches!(status, Ok(Ok(status)) if status.success())
}

/// Waits until the tree below `root` exceeds a limit, and returns which. Without limits it waits forever.
pub async fn watch(root: Option<u32>, usage: Option<UsageLimits>) -> String {
    let (Some(root), Some(usage)) = (root, usage) else { return std::future::pending().await };
    loop {
        tokio::time::sleep(WATCH_EVERY).await;
        let (processes, memory_bytes) = tokio::task::spawn_blocking(move || measure(root)).await.unwrap_or_default();
        if processes > usage.processes {
            return format!("it had {processes} processes, more than the {} allowed", usage.processes);
        }
        if memory_bytes > usage.memory_bytes {
            return format!("it used {memory_bytes} bytes of memory, more than the {} allowed", usage.memory_bytes);
        }
    }
}

/// Returns the number of processes below `root` and the memory that they occupy.
fn measure(root: u32) -> (u64, u64) {
    let mut children: HashMap<u32, Vec<u32>> = HashMap::new();
    let mut groups: HashMap<u32, Vec<u32>> = HashMap::new();
    for entry in std::fs::read_dir("/proc").into_iter().flatten().flatten() {
        let Some(process) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
        let Some((parent, group)) = parent_and_group(process) else { continue };
        children.entry(parent).or_default().push(process);
        groups.entry(group).or_default().push(process);
    }
    let mut found: HashSet<u32> = HashSet::new();
    let mut waiting = children.get(&root).cloned().unwrap_or_default();
    while let Some(process) = waiting.pop() {
        if process != root && found.insert(process) {
            waiting.extend(children.get(&process).into_iter().flatten());
            // A process whose parent has ended is still in its group.
            waiting.extend(groups.get(&process).into_iter().flatten());
        }
    }
    let memory = found.iter().filter_map(|process| resident_bytes(*process)).sum();
    (found.len() as u64, memory)
}

fn parent_and_group(process: u32) -> Option<(u32, u32)> {
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
    // The name of the program is in parentheses and may contain anything.
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace().skip(1);
    Some((fields.next()?.parse().ok()?, fields.next()?.parse().ok()?))
}

fn resident_bytes(process: u32) -> Option<u64> {
    let status = std::fs::read_to_string(format!("/proc/{process}/status")).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok().map(|kib| kib * 1_024)
}
