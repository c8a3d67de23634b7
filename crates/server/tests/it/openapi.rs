//! Sends requests that an independent program generates from the OpenAPI document to the real binary.
//!
//! [Schemathesis](https://schemathesis.readthedocs.io) sends valid and invalid requests, follows links from one answer to the
//! next request, and checks every answer: no 5xx, no status, header or body that is not documented, no invalid request
//! accepted, no valid one rejected, and no key that is ignored. The cases are the same in every run.

use std::{
    path::Path,
    process::{Command, Stdio},
};

use serde_json::json;

use crate::{faena::Faena, program::python};

const FOLDER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/it/openapi");
/// Requests per operation and phase. `FAENA_TEST_EXAMPLES` sets another number.
const EXAMPLES: &str = "5";

#[tokio::test(flavor = "multi_thread")]
async fn generated_requests_get_documented_answers() {
    let folder = tempfile::tempdir().unwrap();
    let faena = Faena::start(folder.path(), &[]).await;
    let new_key = json!({"name": "schemathesis", "scopes": ["admin"]}).to_string();
    let created = faena.http.post(format!("{}/api/v1/api-keys", faena.url)).body(new_key).send().await.unwrap();
    let created: serde_json::Value = created.json().await.unwrap();
    let (key, id) = (created["key"].as_str().unwrap(), created["id"].as_str().unwrap());
    let (passed, printed) = generate_requests(folder.path(), &faena.url, key, id);
    assert!(passed, "{printed}\n{}", faena.log());
    let panicked = faena.log().lines().filter(|line| line.contains("ERROR") || line.contains("panicked")).count();
    assert_eq!(panicked, 0, "{}", faena.log());
}

/// Runs Schemathesis. Returns whether it found nothing, and its report.
fn generate_requests(folder: &Path, url: &str, key: &str, key_id: &str) -> (bool, String) {
    let examples = std::env::var("FAENA_TEST_EXAMPLES").unwrap_or_else(|_| EXAMPLES.into());
    let output = Command::new(python())
        .current_dir(folder)
        .args(["-m", "schemathesis.cli", "--config-file"])
        .arg(Path::new(FOLDER).join("schemathesis.toml"))
        .args(["run", &format!("{url}/openapi.json"), "--checks", "all", "--request-timeout", "30", "--no-color"])
        .args(["--max-examples", &examples, "--header", &format!("Authorization: Bearer {key}")])
        .env("FAENA_OWN_KEY_ID", key_id)
        .env("SCHEMATHESIS_HOOKS", "hooks")
        .env("PYTHONPATH", FOLDER)
        .env("PYTHONDONTWRITEBYTECODE", "1")
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let printed = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    (output.status.success(), printed)
}
