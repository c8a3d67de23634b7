//! Protects this process from inspection by other programs, and lets it adopt orphaned processes.

use rustix::{
    process::{
        DumpableBehavior, Signal, getpid, set_child_subreaper, set_dumpable_behavior, set_parent_process_death_signal,
    },
    thread::{CapabilitySet, remove_capability_from_bounding_set, set_no_new_privs},
};

use crate::children;

/// Keeps programs of the same user from reading the environment and memory of this process, and from tracing it.
///
/// Has no effect on programs that run as root or have `CAP_SYS_PTRACE`, `CAP_PERFMON` or `CAP_SYS_ADMIN`. Also disables
/// core dumps of this process.
pub fn forbid_inspection() {
    if let Err(error) = set_dumpable_behavior(DumpableBehavior::NotDumpable) {
        tracing::warn!(%error, "environment of this process not protected from programs of the same user");
    }
}

/// Makes this process the parent of the processes whose guard was killed, so that it can kill them.
pub fn adopt_orphans() {
    match set_child_subreaper(Some(getpid())) {
        Ok(()) => children::adopt_orphans(),
        Err(error) => tracing::warn!(%error, "cannot adopt orphaned processes, they survive if their guard is killed"),
    }
}

/// Prepares the guard. The program that it starts inherits the last two settings.
pub(crate) fn restrict_guard() {
    forbid_inspection();
    adopt_orphans();
    // If a program has stopped its guard with SIGSTOP, this signal resumes the guard when the server ends, so that it can
    // kill the program.
    let _ = set_parent_process_death_signal(Some(Signal::CONT));
    // Otherwise the program could become another user with a setuid binary, and the guard could not kill it.
    let _ = set_no_new_privs(true);
    // Keeps a program that runs as root from tracing this server. It can still read the server's environment, because
    // the sandbox needs `CAP_SYS_ADMIN`. Fails for other users, who have neither capability.
    let _ = remove_capability_from_bounding_set(CapabilitySet::SYS_PTRACE);
}
