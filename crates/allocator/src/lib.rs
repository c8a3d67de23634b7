//! Gives freed memory back to the system. The only crate with unsafe code: the function of the C library that does it has no safe
//! wrapper in a maintained crate.

/// Gives back all pages that contain no memory in use. Takes milliseconds; does nothing with C libraries other than glibc.
pub fn trim() {
    #[cfg(target_env = "gnu")]
    // SAFETY: takes no pointers, locks what it changes, and never moves memory that is in use.
    unsafe {
        libc::malloc_trim(0);
    }
}
