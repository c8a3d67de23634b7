//! The sample workers: they wait instead of working, report progress, and fail now and then.

use std::time::Duration;

use faena::{Context, JobError, Progress, Worker};
use serde::Deserialize;
use serde_json::{Value, json};

pub fn all(url: &str) -> Vec<Worker> {
    let worker = |name: &str, concurrency| Worker::new().url(url).name(name).concurrency(concurrency);
    vec![
        worker("mailer", 4).handle("email.send", send_mail),
        worker("cashier", 2)
            .handle("payment.charge", charge)
            .handle("refund.check", check_refund)
            .handle("refund.pay", pay_refund),
        worker("renderer", 2).handle("video.render", render),
        worker("reporter", 3)
            .handle("report.extract", prepare)
            .handle("report.convert", prepare)
            .handle("report.publish", prepare)
            .handle("report.nightly", prepare),
    ]
}

/// Payload of all sample jobs. `n` is the number of the job, and decides whether and how it fails.
#[derive(Deserialize)]
struct Sample {
    #[serde(default)]
    n: u64,
}

async fn wait(ms: u64) {
    tokio::time::sleep(Duration::from_millis(ms)).await;
}

async fn send_mail(job: Context, sample: Sample) -> Result<Value, JobError> {
    wait(200 + sample.n % 5 * 100).await;
    if sample.n % 7 == 3 && job.retry_count() == 0 {
        return Err(JobError::retry("421 mailbox is busy, try again later"));
    }
    Ok(json!({"messageId": format!("<{}@demo.example>", job.id())}))
}

async fn charge(job: Context, sample: Sample) -> Result<Value, JobError> {
    job.log("asking the bank");
    wait(400).await;
    match sample.n % 60 {
        4 | 34 => Err(JobError::fail("card declined: insufficient funds")),
        10 => Err(JobError::retry("bank does not answer: timeout after 400 ms")),
        _ => Ok(json!({"receipt": sample.n})),
    }
}

async fn check_refund(job: Context, _: Value) -> Result<Value, JobError> {
    job.log("no earlier refund for this order");
    wait(800).await;
    Ok(json!({"risk": "low"}))
}

async fn pay_refund(_: Context, _: Value) -> Result<Value, JobError> {
    wait(1_500).await;
    Ok(json!({"paid": true}))
}

/// Takes twelve seconds, stores its steps and reports progress.
async fn render(job: Context, sample: Sample) -> Result<Value, JobError> {
    const STEPS: [&str; 3] = ["download", "encode", "upload"];
    job.set_total_steps(3);
    for (at, step) in STEPS.into_iter().enumerate() {
        job.log(format!("{step} of clip {}", sample.n));
        let progress = job.clone();
        job.step(step, || async move {
            for tick in 0..8_u32 {
                wait(500).await;
                let done = u32::try_from(at).unwrap_or(0) * 8 + tick + 1;
                progress.progress(Progress::new().phase(step).percentage(f64::from(done) * 100.0 / 24.0));
            }
            Ok::<_, JobError>(json!({"frames": 240}))
        })
        .await?;
    }
    Ok(json!({"file": format!("clip-{}.webm", sample.n)}))
}

async fn prepare(job: Context, sample: Sample) -> Result<Value, JobError> {
    job.log(format!("{} of report {}", job.kind().to_owned(), sample.n));
    wait(1_000 + sample.n % 3 * 500).await;
    if job.kind() == "report.convert" && sample.n.is_multiple_of(5) {
        return Err(JobError::fail("column \"total\" is missing in line 4711"));
    }
    Ok(json!({"rows": 100 + sample.n}))
}
