//! Measures 100 000 schedules that are due at the same time, compared with a bulk submit of as many jobs.

use std::{sync::Arc, time::Instant};

use anyhow::Result;
use faena_domain::{
    JobLimits, Timestamp,
    schedule::{JobTemplate, Schedule, ScheduleSpec, Timing},
};
use faena_store::Store;
use futures_util::{StreamExt, TryStreamExt, stream};

use super::{
    baseline_sqlite::{PAYLOAD, rate},
    report::Report,
    scratch::Scratch,
    submit,
};

const SCHEDULES: usize = 100_000;
/// The batch size of the scheduler loop.
const BATCH: usize = 1_000;
const GOAL_SECONDS: f64 = 10.0;

pub async fn schedules(scratch: &mut Scratch, report: &mut Report) -> Result<()> {
    let database = scratch.database_kind();
    report.step(&format!("{database}: bulk submit of {SCHEDULES} jobs"));
    let bulk = submit::bulk(&scratch.fresh().await?, SCHEDULES).await?;
    report.plain(database, "bulk submit, 2 x 1000", bulk, "jobs/s");

    for (timing, cron) in [("cron in a zone", Some("* * * * *")), ("intervals", None)] {
        report.step(&format!("{database}: {SCHEDULES} schedules, {timing}"));
        let store = submit::open(&scratch.fresh().await?).await?;
        let started = Instant::now();
        let due = fill(&store, cron).await?;
        report.plain(database, &format!("schedules created, {timing}"), rate(SCHEDULES, started), "schedules/s");
        let started = Instant::now();
        let mut fired = 0;
        loop {
            let round = store.schedule_fire(BATCH, due).await?;
            fired += round.ticks.iter().filter(|tick| tick.job_id.is_some()).count();
            if round.next_at.is_none_or(|at| at > due) {
                break;
            }
        }
        let seconds = started.elapsed().as_secs_f64();
        anyhow::ensure!(fired == SCHEDULES, "{fired} of {SCHEDULES} schedules fired");
        report.at_most(database, &format!("{SCHEDULES} due together, fired in, {timing}"), seconds, "s", GOAL_SECONDS);
        report.against(database, &format!("fired, {timing}"), rate(SCHEDULES, started), "jobs/s", bulk, None);
        store.close().await;
    }
    Ok(())
}

/// Creates the schedules. Returns the time at which all are due.
async fn fill(store: &Arc<dyn Store>, cron: Option<&str>) -> Result<Timestamp> {
    let now = Timestamp::now();
    let spec = ScheduleSpec {
        name: "bench".into(),
        timing: Timing {
            cron_expression: cron.map(str::to_owned),
            interval_ms: cron.is_none().then_some(60_000),
            timezone: "Europe/Madrid".into(),
            ..Timing::default()
        },
        job: JobTemplate { kind: "noop".into(), payload: PAYLOAD.into(), ..JobTemplate::default() },
        ..ScheduleSpec::default()
    };
    let creations = stream::iter(0..SCHEDULES).map(|_| {
        let compiled = Schedule::new(spec.clone(), &JobLimits::default(), now);
        async move {
            let compiled = compiled.map_err(|errors| anyhow::anyhow!("{errors:?}"))?;
            store.schedule_create(compiled.schedule, "bench", now).await?;
            anyhow::Ok(())
        }
    });
    creations.buffer_unordered(256).try_collect::<()>().await?;
    Ok(now.plus_ms(60_000))
}
