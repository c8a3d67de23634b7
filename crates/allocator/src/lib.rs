//! Gives freed memory back to the system. The only crate with unsafe code: the functions of the C library that do it have no safe
//! wrapper in a maintained crate.

/// Gives back all pages that contain no memory in use. Takes milliseconds; does nothing with C libraries other than glibc.
pub fn trim() {
    #[cfg(target_env = "gnu")]
    // SAFETY: takes no pointers, locks what it changes, and never moves memory that is in use.
    unsafe {
        libc::malloc_trim(0);
    }
}

/// Returns the bytes that the process has allocated and not freed, or `u64::MAX` with C libraries other than glibc, which do not
/// report them.
pub fn allocated_bytes() -> u64 {
    #[cfg(target_env = "gnu")]
    {
        // SAFETY: takes no pointers, locks what it reads, and returns a plain structure.
        let figures = unsafe { libc::mallinfo2() };
        (figures.uordblks + figures.hblkhd) as u64
    }
    #[cfg(not(target_env = "gnu"))]
    u64::MAX
}
