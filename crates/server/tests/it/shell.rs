//! Runs the command line like a user, against a running server.

use std::process::Output;

use serde_json::Value;

use crate::faena::{Faena, run};

/// A server, and a folder in which commands run.
pub struct Shell {
    pub folder: tempfile::TempDir,
    pub faena: Faena,
}

impl Shell {
    pub async fn start(environment: &[(&str, &str)]) -> Shell {
        let folder = tempfile::tempdir().unwrap();
        let faena = Faena::start(folder.path(), environment).await;
        Shell { folder, faena }
    }

    /// Kills the server and starts it again.
    pub async fn restart_after_kill(&mut self, environment: &[(&str, &str)]) {
        self.faena.kill();
        self.faena = Faena::start(self.folder.path(), environment).await;
    }

    /// Runs a command. Returns the exit code, stdout and stderr.
    pub fn run(&self, arguments: &[&str]) -> (i32, String, String) {
        output_parts(&run(self.folder.path(), &[("FAENA_URL", &self.faena.url)], arguments))
    }

    /// Runs a command that must succeed without a warning, and returns its stdout.
    pub fn stdout(&self, arguments: &[&str]) -> String {
        let (code, stdout, stderr) = self.run(arguments);
        assert_eq!((code, stderr.as_str()), (0, ""), "{arguments:?}");
        stdout
    }

    /// Runs a command that must succeed, and returns the JSON that it prints.
    pub fn json(&self, arguments: &[&str]) -> Value {
        let text = self.stdout(arguments);
        serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}"))
    }
}

/// Returns the exit code, stdout and stderr.
pub fn output_parts(output: &Output) -> (i32, String, String) {
    let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap();
    (output.status.code().unwrap(), text(&output.stdout), text(&output.stderr))
}
