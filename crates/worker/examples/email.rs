//! A typed handler with a middleware, and a program that submits a job and waits for its result.
//!
//!     faena serve                                     # in another terminal
//!     cargo run -p faena --example email              # the worker; Ctrl-C stops it
//!     cargo run -p faena --example email -- submit ada@example.org

use faena::{Client, Context, Error, JobError, JobRequest, Worker};
use serde::{Deserialize, Serialize};

#[derive(Serialize, Deserialize)]
struct Email {
    to: String,
    subject: String,
}

#[derive(Debug, Serialize, Deserialize)]
struct Receipt {
    message_id: String,
}

#[tokio::main]
async fn main() -> Result<(), Error> {
    tracing_subscriber::fmt().init();
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match arguments.as_slice() {
        [command, to] if command == "submit" => submit(to).await,
        _ => work().await,
    }
}

async fn work() -> Result<(), Error> {
    Worker::new()
        .name("mailer")
        .concurrency(16)
        .middleware(|job, next| async move {
            let started = std::time::Instant::now();
            let outcome = next.run(job.clone()).await;
            let ok = outcome.is_ok();
            tracing::info!(job = %job.id(), kind = job.kind(), took = ?started.elapsed(), ok, "job finished");
            outcome
        })
        .handle("email.send", send)
        .run()
        .await
}

async fn send(job: Context, email: Email) -> Result<Receipt, JobError> {
    if !email.to.contains('@') {
        return Err(JobError::fail(format!("to: not a valid address: \"{}\"", email.to)));
    }
    job.log(format!("sending \"{}\" to {}", email.subject, email.to));
    // The id is the same in every run of this job, so the mail server recognises a duplicate.
    Ok(Receipt { message_id: format!("<{}@example.org>", job.id()) })
}

async fn submit(to: &str) -> Result<(), Error> {
    let client = Client::from_env()?;
    let email = Email { to: to.into(), subject: "Welcome".into() };
    let job = JobRequest::new("email.send").payload(&email).max_retries(5).tag("example");
    let id = client.submit(&job).await?.id;
    println!("job {id}");
    match client.wait_for_result::<Receipt>(id).await {
        Ok(receipt) => println!("sent as {}", receipt.message_id),
        Err(Error::NotCompleted { status, error, .. }) => println!("{status}: {}", error.unwrap_or_default()),
        Err(error) => return Err(error),
    }
    Ok(())
}
