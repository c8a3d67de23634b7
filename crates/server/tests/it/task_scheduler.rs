//! A client that was written from the description of the task-scheduler API alone works unchanged.

use std::{path::Path, process::Command};

use crate::{faena::Faena, postgres::Database, program::python};

async fn assert_client_is_served(environment: &[(&str, &str)]) {
    let folder = tempfile::tempdir().unwrap();
    // The client's worker sends no heartbeat, and one of its jobs takes longer than `worker.silence`.
    let short =
        [("FAENA_WEBHOOK_ALLOW", "127.0.0.0/8"), ("FAENA_WORKER_HEARTBEAT", "300ms"), ("FAENA_WORKER_SILENCE", "1s")];
    let faena = Faena::start(folder.path(), &[environment, &short].concat()).await;
    let client = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/it/task_scheduler/client.py");
    let mut command = Command::new(python());
    command.arg(client).arg(&faena.url);
    let output = tokio::task::spawn_blocking(move || command.output().unwrap()).await.unwrap();
    let output_text = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{output_text}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_of_the_task_scheduler_api_works_on_sqlite_with_services() {
    assert_client_is_served(&[]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_of_the_task_scheduler_api_works_on_postgres() {
    let database = Database::create().await;
    assert_client_is_served(&[("DATABASE_URL", &database.url)]).await;
}
