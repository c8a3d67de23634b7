//! Programs other than the binary under test.

use std::process::Child;

/// A process. Dropping it kills the process.
pub struct Program(pub Child);

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Returns the Python interpreter that `./test` found.
pub fn python() -> String {
    std::env::var("FAENA_TEST_PYTHON").unwrap_or_else(|_| "python3".into())
}
