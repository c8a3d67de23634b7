//! Measures the cost of limits: the drain with and without them in one run.

use anyhow::Result;
use faena_domain::{JobId, NewJob, Timestamp};
use faena_store::StoreOptions;

use super::{drain, report::Report, scratch::Scratch, submit};

/// Number of jobs of one key that wait in front of the others.
const BLOCKED_JOBS: usize = 100_000;
const KEYS: usize = 1_000;

pub async fn limits(scratch: &mut Scratch, jobs: usize, report: &mut Report) -> Result<()> {
    let database = scratch.database_kind();
    report.step(&format!("{database}: drain without limits"));
    let url = scratch.fresh().await?;
    submit::fill(&url, jobs).await?;
    let plain = drain::drain(scratch, &url, jobs).await?.rate;
    report.plain(database, "drain, no limit", plain, "jobs/s");

    for (limit, goal) in [("10000", Some(0.8)), ("1000", None), ("100", None)] {
        report.step(&format!("{database}: drain, at most {limit} concurrently"));
        let url = scratch.fresh().await?;
        submit::fill(&url, jobs).await?;
        let limited = drain::drain_with(scratch, &url, jobs, &[("FAENA_LIMITS_CONCURRENCY", limit)]).await?.rate;
        report.against(database, &format!("drain, at most {limit} concurrently"), limited, "jobs/s", plain, goal);
    }

    let jobs = jobs / 3;
    report.step(&format!("{database}: drain of {KEYS} keys"));
    let url = scratch.fresh().await?;
    submit::fill_keyed(&url, jobs, "noop", |n| format!("key-{}", n % KEYS)).await?;
    let keyed = drain::drain_with(scratch, &url, jobs, &[("FAENA_LIMITS_KEY", "100")]).await?.rate;
    report.against(database, "drain, 1000 keys, 100 concurrently each", keyed, "jobs/s", plain, None);

    report.step(&format!("{database}: the same behind {BLOCKED_JOBS} jobs of a key that is at its limit"));
    let url = scratch.fresh().await?;
    submit_blocked_jobs(&url).await?;
    submit::fill_keyed(&url, jobs, "noop", |n| format!("key-{}", n % KEYS)).await?;
    let behind = drain::drain_with(scratch, &url, jobs, &[("FAENA_LIMITS_KEY", "100")]).await?.rate;
    report.against(database, "the same behind 100000 blocked jobs", behind, "jobs/s", keyed, Some(0.8));
    Ok(())
}

/// Submits jobs of a key that is at its limit, because another job of the key runs for an hour.
async fn submit_blocked_jobs(url: &str) -> Result<()> {
    let store = faena_store::open(url, StoreOptions::default()).await?;
    let key = Some("blocked".to_owned());
    let limit = faena_domain::Limit { concurrency: Some(1), rate: None };
    store.limit_set(faena_domain::Scope::Key("blocked".into()), limit, "bench", Timestamp::now()).await?;
    let mut first = NewJob { id: JobId::new(), payload: r#"{"ms":3600000}"#.into(), ..NewJob::new("sleep") };
    first.options.concurrency_key = key.clone();
    store.job_submit(vec![first], None, Timestamp::now()).await?;
    store.close().await;
    submit::fill_keyed(url, BLOCKED_JOBS, "noop", |_| "blocked".to_owned()).await
}
