//! Gives freed memory back to the system.
//!
//! glibc keeps free pages that lie between pages in use: a server that was attacked with large requests would stay at
//! several times its usual size forever. The settings of glibc that prevent this cost a sixth of the throughput of
//! jobs.

use std::{convert::Infallible, fs, time::Duration};

use faena_allocator::{allocated_bytes, trim};
use tokio::task::spawn_blocking;

/// How often the memory of the process is checked.
const CHECK_EVERY: Duration = Duration::from_secs(1);
/// Minimum of freed memory that is worth an attempt, which takes milliseconds.
const MIN_FREED: u64 = 24 << 20;
/// Longest pause between two attempts that do not help, in checks.
const MAX_PAUSE: u32 = 60;

/// Gives back memory whenever much of it has been free for two checks. Never ends.
pub async fn give_back_freed_memory() -> Infallible {
    let mut attempts = Attempts::default();
    loop {
        tokio::time::sleep(CHECK_EVERY).await;
        let before = freed_bytes();
        if attempts.is_due(before) {
            let _ = spawn_blocking(trim).await;
            attempts.record(before, freed_bytes());
        }
    }
}

/// When the next attempt is due.
#[derive(Default)]
struct Attempts {
    /// Freed memory at the previous check.
    previous: u64,
    /// Freed memory that the last attempt could not give back.
    left: u64,
    /// Checks between two attempts. Each attempt that does not help doubles it.
    pause: u32,
    /// Checks since the last attempt.
    waited: u32,
}

impl Attempts {
    fn is_due(&mut self, freed: u64) -> bool {
        if freed > self.left + MIN_FREED {
            self.pause = 0;
        }
        // Memory that has been free for less than one check is probably used again soon.
        let is_due = freed.min(self.previous) > MIN_FREED && self.waited >= self.pause;
        self.previous = freed;
        self.waited = if is_due { 0 } else { self.waited.saturating_add(1) };
        is_due
    }

    fn record(&mut self, before: u64, after: u64) {
        let has_helped = after + MIN_FREED / 2 < before;
        self.pause = if has_helped { 0 } else { (self.pause * 2).clamp(1, MAX_PAUSE) };
        (self.left, self.previous) = (after, after);
    }
}

/// Returns the memory of this process that it has freed and not given back, 0 if the system does not say.
fn freed_bytes() -> u64 {
    let resident = resident_bytes();
    // The second figure costs more than the first.
    if resident <= MIN_FREED { 0 } else { resident.saturating_sub(allocated_bytes()) }
}

/// Returns the memory of this process without its program and files.
fn resident_bytes() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let size = status.lines().find_map(|line| line.strip_prefix("RssAnon:")?.strip_suffix("kB"));
    size.and_then(|kib| kib.trim().parse::<u64>().ok()).unwrap_or(0) << 10
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn memory_that_stays_free_is_given_back() {
        let mut attempts = Attempts::default();
        assert!(!attempts.is_due(20 * MIB) && !attempts.is_due(20 * MIB), "too little");
        assert!(!attempts.is_due(200 * MIB) && !attempts.is_due(MIB), "used again");
        assert!(!attempts.is_due(200 * MIB) && attempts.is_due(180 * MIB));
        attempts.record(180 * MIB, 10 * MIB);
        assert!(!attempts.is_due(10 * MIB));
        assert!(!attempts.is_due(300 * MIB) && attempts.is_due(300 * MIB), "it has helped, so there is no pause");
    }

    #[test]
    fn attempts_that_do_not_help_become_rare_until_more_memory_is_freed() {
        let mut attempts = Attempts { previous: 100 * MIB, ..Attempts::default() };
        let mut due = Vec::new();
        for check in 0..400 {
            if attempts.is_due(100 * MIB) {
                due.push(check);
                attempts.record(100 * MIB, 99 * MIB);
            }
        }
        assert_eq!(due, [0, 2, 5, 10, 19, 36, 69, 130, 191, 252, 313, 374]);
        assert!(!attempts.is_due(110 * MIB) && attempts.is_due(130 * MIB), "more was freed");
    }

    #[test]
    fn freed_memory_between_used_memory_is_given_back() {
        assert!(resident_bytes() > MIB);
        // Every second piece is freed, so no end of the heap is free.
        let mut pieces: Vec<Option<Box<[u8]>>> =
            (0..8_000_u32).map(|number| Some(vec![number as u8; 16 << 10].into_boxed_slice())).collect();
        pieces.iter_mut().step_by(2).for_each(|piece| *piece = None);
        let (before, freed) = (resident_bytes(), freed_bytes());
        trim();
        let after = resident_bytes();
        assert!(freed > 30 * MIB && after + 30 * MIB < before, "{before} {freed} {after}");
        assert_eq!(pieces.iter().flatten().count(), 4_000);
    }
}
