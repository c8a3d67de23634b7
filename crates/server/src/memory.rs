//! Makes glibc give freed memory back to the system.
//!
//! By default it keeps large buffers for later: a server that was attacked with large requests stayed at several times its
//! usual size for ever. It reads its settings from the environment of a new process only, so the server starts itself once
//! more with them, under the same process id.

use std::{env, num::NonZeroUsize, os::unix::process::CommandExt, process::Command, thread};

/// Allocations from this size are separate mappings, which end when they are freed. Buffers of connections are larger than
/// this when they are full.
const MMAP_THRESHOLD: (&str, &str) = ("MALLOC_MMAP_THRESHOLD_", "65536");
/// Free memory at the end of a heap that is given back.
const TRIM_THRESHOLD: (&str, &str) = ("MALLOC_TRIM_THRESHOLD_", "131072");
/// Heaps that threads share, by default eight for each processor. Each keeps some free memory of its own.
const ARENAS: &str = "MALLOC_ARENA_MAX";

/// Starts this program again with the settings, unless the environment has some of them already.
pub fn give_back_freed_memory() {
    let arenas = thread::available_parallelism().map_or(2, NonZeroUsize::get).max(2).to_string();
    let settings = [MMAP_THRESHOLD, TRIM_THRESHOLD, (ARENAS, arenas.as_str())];
    if settings.iter().any(|(name, _)| env::var_os(name).is_some()) {
        return;
    }
    let Ok(program) = env::current_exe() else { return };
    let mut arguments = env::args_os();
    let mut command = Command::new(program);
    if let Some(name) = arguments.next() {
        command.arg0(name);
    }
    let error = command.args(arguments).envs(settings).exec();
    // The environment is unchanged in this process, so it goes on without the settings.
    eprintln!("the settings of the memory allocator are not in effect: {error}");
}
