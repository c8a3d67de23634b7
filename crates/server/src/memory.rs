//! Gives freed memory back to the system.
//!
//! glibc keeps pages that are free between others in use: a server that was attacked with large requests would stay at several times
//! its usual size forever. Its own settings that prevent this cost a sixth of the throughput of jobs.

use std::{convert::Infallible, fs, time::Duration};

use faena_allocator::trim;
use tokio::task::spawn_blocking;

/// How often the size of the process is checked.
const CHECK_EVERY: Duration = Duration::from_secs(2);
/// Growth after which a trim, which takes milliseconds, is worth its cost.
const MIN_GROWTH: u64 = 24 << 20;
/// Longest pause between two attempts of a process that needs its memory, in checks.
const MAX_PAUSE: u32 = 30;

/// Returns freed memory to the system whenever the process has grown and stopped growing. Never ends.
pub async fn give_back_freed_memory() -> Infallible {
    let mut attempts = Attempts { least: resident_bytes(), previous: 0, pause: 0, waited: 0 };
    loop {
        tokio::time::sleep(CHECK_EVERY).await;
        let before = resident_bytes();
        if attempts.is_due(before) {
            let _ = spawn_blocking(trim).await;
            attempts.record(before, resident_bytes());
        }
    }
}

/// When the next attempt is due.
struct Attempts {
    /// The smallest size so far.
    least: u64,
    /// The size at the previous check.
    previous: u64,
    /// Checks between two attempts. Each attempt that does not help doubles it.
    pause: u32,
    /// Checks since the last attempt.
    waited: u32,
}

impl Attempts {
    fn is_due(&mut self, now: u64) -> bool {
        let is_due = now > self.least + MIN_GROWTH && now <= self.previous && self.waited >= self.pause;
        self.least = self.least.min(now);
        self.previous = now;
        self.waited = if is_due { 0 } else { self.waited.saturating_add(1) };
        is_due
    }

    fn record(&mut self, before: u64, after: u64) {
        let has_helped = after + MIN_GROWTH / 2 < before;
        self.pause = if has_helped { 0 } else { (self.pause * 2).clamp(1, MAX_PAUSE) };
        self.previous = after;
    }
}

/// Returns the memory of this process, 0 if the system does not say.
fn resident_bytes() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let size = status.lines().find_map(|line| line.strip_prefix("VmRSS:")?.strip_suffix("kB"));
    size.and_then(|kib| kib.trim().parse::<u64>().ok()).unwrap_or(0) << 10
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn memory_is_given_back_after_it_has_grown() {
        let mut attempts = Attempts { least: 50 * MIB, previous: 0, pause: 0, waited: 0 };
        assert!(!attempts.is_due(60 * MIB) && !attempts.is_due(60 * MIB), "too little");
        assert!(!attempts.is_due(200 * MIB), "still growing");
        assert!(attempts.is_due(200 * MIB));
        attempts.record(200 * MIB, 60 * MIB);
        assert!(!attempts.is_due(60 * MIB));
        assert!(!attempts.is_due(300 * MIB) && attempts.is_due(300 * MIB), "it has helped, so there is no pause");
    }

    #[test]
    fn attempts_that_do_not_help_become_rare_and_never_end() {
        let mut attempts = Attempts { least: 50 * MIB, previous: 200 * MIB, pause: 0, waited: 0 };
        let mut due = Vec::new();
        for check in 0..200 {
            if attempts.is_due(200 * MIB) {
                due.push(check);
                attempts.record(200 * MIB, 199 * MIB);
                attempts.previous = 200 * MIB;
            }
        }
        assert_eq!(due, [0, 2, 5, 10, 19, 36, 67, 98, 129, 160, 191]);
    }

    #[test]
    fn freed_memory_between_used_memory_is_given_back() {
        assert!(resident_bytes() > MIB);
        // Every second piece is freed, so no end of the heap is free.
        let mut pieces: Vec<Option<Box<[u8]>>> =
            (0..8_000_u32).map(|number| Some(vec![number as u8; 16 << 10].into_boxed_slice())).collect();
        pieces.iter_mut().step_by(2).for_each(|piece| *piece = None);
        let before = resident_bytes();
        trim();
        let after = resident_bytes();
        assert!(after + 30 * MIB < before, "{before} {after}");
        assert_eq!(pieces.iter().flatten().count(), 4_000);
    }
}
