//! Three servers with different clocks run for a simulated week, and fifty times one of them is killed during its
//! round: each due time fires at most once, and with `catch_up` exactly once.
//!
//! The seed decides what happens; when exactly a server dies inside its round depends on the machine. FAENA_TEST_SEEDS=100
//! runs that many seeds.

use std::{collections::HashSet, sync::Arc, time::Duration};

use faena_domain::{
    JobId, JobLimits, Timestamp,
    schedule::{DstOverlap, JobTemplate, Misfire, Overlap, Schedule, ScheduleSpec, TickOutcome, Timing},
};
use faena_engine::{Engine, EngineConfig, Roles};
use faena_store::Store;
use futures_util::future::join_all;
use rand::{RngExt, SeedableRng, rngs::StdRng};

use crate::fixture::{
    TestDatabase, cut_connections, open_database_for_another_node, open_postgres, open_sqlite, reopened,
};

const MINUTE: i64 = 60_000;
const HOUR: i64 = 60 * MINUTE;
const KILLS: usize = 50;

/// A schedule and how many jobs it must have created, where that is certain.
struct Case {
    spec: ScheduleSpec,
    exactly: Option<usize>,
}

fn case(name: &str, timing: Timing, misfire: Misfire, overlap: Overlap) -> Case {
    let job = JobTemplate { kind: name.into(), ..JobTemplate::default() };
    let spec = ScheduleSpec {
        name: name.into(),
        timing,
        job,
        misfire,
        overlap,
        catch_up_limit: 10_000,
        ..ScheduleSpec::default()
    };
    Case { spec, exactly: None }
}

fn cron(expression: &str, zone: &str) -> Timing {
    Timing { cron_expression: Some(expression.into()), timezone: zone.into(), ..Timing::default() }
}

fn every(minutes: u64) -> Timing {
    Timing { interval_ms: Some(minutes * 60_000), ..Timing::default() }
}

/// Daylight saving time ends in Madrid on 2026-10-25, in the middle of the week.
fn cases() -> Vec<Case> {
    use Misfire::{CatchUp, RunOnce, Skip};
    let both = Timing { dst_overlap: Some(DstOverlap::Both), ..cron("30 2 * * *", "Europe/Madrid") };
    let first = cron("30 2 * * *", "Europe/Madrid");
    let sure = |count, case: Case| Case { exactly: Some(count), ..case };
    vec![
        case("every 20 minutes", cron("*/20 * * * *", "UTC"), CatchUp, Overlap::Allow),
        case("every 17 minutes", every(17), CatchUp, Overlap::Allow),
        sure(8, case("at night, both", both, CatchUp, Overlap::Allow)),
        sure(7, case("at night, first", first, CatchUp, Overlap::Allow)),
        sure(168, case("hourly in Madrid", cron("0 * * * *", "Europe/Madrid"), CatchUp, Overlap::Allow)),
        case("run once", every(15), RunOnce, Overlap::Allow),
        case("skip", cron("*/15 * * * *", "UTC"), Skip, Overlap::Allow),
        case("no overlap", every(60), CatchUp, Overlap::Skip),
        case("one waits", every(60), CatchUp, Overlap::QueueOne),
        case("the newest counts", every(60), CatchUp, Overlap::CancelPrevious),
    ]
}

struct Node {
    engine: Arc<Engine>,
    skew_ms: i64,
    sleeps_until: Timestamp,
}

struct Simulation {
    random: StdRng,
    database: Option<TestDatabase>,
    stores: Vec<Arc<dyn Store>>,
    nodes: Vec<Node>,
    schedules: Vec<Schedule>,
    now: Timestamp,
}

async fn engine(store: Arc<dyn Store>, now: Timestamp) -> Arc<Engine> {
    let config = EngineConfig { roles: Roles { worker: false, ..Roles::ALL }, ..EngineConfig::default() };
    Engine::without_loops(store, config, now).await.unwrap()
}

impl Simulation {
    async fn new(seed: u64, (store, database): (Arc<dyn Store>, TestDatabase), now: Timestamp) -> Simulation {
        let mut stores = vec![store];
        if matches!(database, TestDatabase::Postgres(_)) {
            stores.extend([
                open_database_for_another_node(&database).await,
                open_database_for_another_node(&database).await,
            ]);
        }
        let mut schedules = Vec::new();
        for case in cases() {
            let schedule = Schedule::new(case.spec, &JobLimits::default(), now).unwrap().schedule;
            stores[0].schedule_create(schedule.clone(), "test", now).await.unwrap();
            schedules.push(schedule);
        }
        let random = StdRng::seed_from_u64(seed);
        let mut simulation = Simulation { random, database: Some(database), stores, nodes: Vec::new(), schedules, now };
        for skew_ms in [-2_000, 0, 2_000] {
            let engine = engine(simulation.store_of(simulation.nodes.len()), now).await;
            simulation.nodes.push(Node { engine, skew_ms, sleeps_until: now });
        }
        simulation
    }

    fn store_of(&self, node: usize) -> Arc<dyn Store> {
        self.stores[node % self.stores.len()].clone()
    }

    /// Runs a round of all live servers at the same time. `victim` dies during its round.
    async fn step(&mut self, victim: Option<usize>) {
        self.now = self.now.plus_ms(self.random.random_range(1..90 * MINUTE));
        for node in &mut self.nodes {
            if self.random.random_range(0..100) < 5 {
                node.sleeps_until = self.now.plus_ms(self.random.random_range(0..5 * HOUR));
            }
        }
        let life = Duration::from_micros(self.random.random_range(0..4_000));
        let awake =
            self.nodes.iter().enumerate().filter(|(at, node)| node.sleeps_until <= self.now || victim == Some(*at));
        let rounds = awake.map(async |(at, node)| {
            let round = node.engine.run_loop("scheduler", self.now.plus_ms(node.skew_ms));
            if victim == Some(at) { tokio::time::timeout(life, round).await.ok() } else { Some(round.await) }
        });
        join_all(rounds).await;
        if let Some(victim) = victim {
            self.replace(victim).await;
        }
        self.end_some_jobs().await;
    }

    /// Replaces the dead server. On PostgreSQL, half of the time all connections are closed too.
    async fn replace(&mut self, victim: usize) {
        let database = self.database.take().unwrap();
        if self.stores.len() > 1 {
            if self.random.random_range(0..2) == 0 {
                cut_connections(&database).await;
            }
            let dead = std::mem::replace(&mut self.stores[victim], open_database_for_another_node(&database).await);
            self.nodes[victim].engine = engine(self.stores[victim].clone(), self.now).await;
            // The operating system does the same with the connections of a process that has ended.
            tokio::spawn(async move { dead.close().await });
            self.database = Some(database);
        } else {
            let store = self.stores.remove(0);
            let skews: Vec<_> = self.nodes.drain(..).map(|node| (node.skew_ms, node.sleeps_until)).collect();
            let (store, database) = reopened(store, database).await;
            (self.stores, self.database) = (vec![store], Some(database));
            for (skew_ms, sleeps_until) in skews {
                let engine = engine(self.store_of(0), self.now).await;
                self.nodes.push(Node { engine, skew_ms, sleeps_until });
            }
        }
    }

    /// Ends some jobs, so that schedules find their last job running at one time and finished at another.
    async fn end_some_jobs(&mut self) {
        for schedule in self.schedules.iter().filter(|schedule| schedule.spec.overlap != Overlap::Allow) {
            if self.random.random_range(0..100) < 10
                && let Ok(Some(found)) = self.stores[0].schedule_get(schedule.id).await
                && let Some(job) = found.last_job
            {
                let _ = self.stores[0].job_cancel(job, "over", None, self.now).await;
            }
        }
    }

    async fn settle(&mut self) {
        for _ in 0..100 {
            if let Ok(round) = self.nodes[1].engine.run_loop("scheduler", self.now).await
                && !round.more
            {
                return;
            }
        }
        panic!("the schedules do not settle");
    }

    /// Checks that every due time is recorded once and that each fired one has exactly one job.
    async fn check(&self, seed: u64) {
        let store = &self.stores[0];
        let mut jobs: HashSet<JobId> = HashSet::new();
        for (schedule, case) in self.schedules.iter().zip(cases()) {
            let what = format!("seed {seed}, {}", schedule.spec.name);
            let stored = store.schedule_get(schedule.id).await.unwrap().unwrap();
            assert!(stored.next_at.is_some_and(|at| at > self.now), "{what}: nothing is left over");
            let dues = self.dues(schedule, stored.cursor_at);
            let rows = store.schedule_ticks(schedule.id, None, 100_000).await.unwrap();
            let recorded: u64 = rows.iter().map(|row| row.count.unwrap()).sum();
            assert_eq!(recorded, dues.len() as u64, "{what}: each due time is recorded once");
            let fired: Vec<_> = rows.iter().rev().filter(|row| row.outcome == TickOutcome::Fired).collect();
            assert_eq!(stored.runs, fired.len() as u64, "{what}");
            if let Some(count) = case.exactly {
                assert_eq!(fired.len(), count, "{what}");
            }
            let fired_at: Vec<Timestamp> = fired.iter().map(|row| row.due_at).collect();
            if schedule.spec.misfire == Misfire::CatchUp && schedule.spec.overlap == Overlap::Allow {
                assert_eq!(fired_at, dues, "{what}: every due time became a job");
            }
            assert!(fired_at.iter().all(|due| dues.contains(due)) && !fired_at.is_empty(), "{what}");
            for rows in fired.chunks(16) {
                for (job, row) in
                    join_all(rows.iter().map(|row| store.job_get(row.job_id.unwrap()))).await.into_iter().zip(rows)
                {
                    let job = job.unwrap().expect("the created job exists");
                    assert_eq!(job.schedule_due, Some(row.due_at), "{what}");
                    assert_eq!(job.schedule_id, Some(schedule.id.to_string()), "{what}");
                    assert!(jobs.insert(job.id), "{what}: each due time has a job of its own");
                }
            }
        }
        let counts = store.counts().await.unwrap();
        let all: i64 = [faena_store::Tally::Pending, faena_store::Tally::Queued, faena_store::Tally::Cancelled]
            .into_iter()
            .map(|tally| counts.total(tally))
            .sum();
        assert_eq!(usize::try_from(all).unwrap(), jobs.len(), "seed {seed}: there are no other jobs");
    }

    fn dues(&self, schedule: &Schedule, up_to: Timestamp) -> Vec<Timestamp> {
        let timing = schedule.clone().compile().unwrap().timing;
        let mut last = schedule.created_at;
        let dues = std::iter::from_fn(|| {
            last = timing.next(last)?.due;
            Some(last).filter(|due| *due <= up_to)
        });
        dues.collect()
    }
}

async fn simulate(seed: u64, opened: (Arc<dyn Store>, TestDatabase)) {
    let start = Timestamp::parse("2026-10-22T00:00:00Z").unwrap();
    let end = start.plus_ms(7 * 24 * HOUR);
    let mut simulation = Simulation::new(seed, opened, start).await;
    let mut kills = 0;
    while simulation.now < end.plus_ms(-HOUR) {
        let dies = kills < KILLS && simulation.random.random_range(0..100) < 35;
        let victim = dies.then(|| simulation.random.random_range(0..3));
        kills += usize::from(dies);
        simulation.step(victim).await;
    }
    simulation.now = end;
    simulation.settle().await;
    assert_eq!(kills, KILLS, "seed {seed}");
    simulation.check(seed).await;
}

fn seeds() -> u64 {
    std::env::var("FAENA_TEST_SEEDS").ok().and_then(|text| text.parse().ok()).unwrap_or(1)
}

#[tokio::test(flavor = "multi_thread")]
async fn with_dying_servers_every_due_time_fires_once_on_postgres() {
    for seed in 0..seeds() {
        simulate(seed, open_postgres().await).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn with_restarts_every_due_time_fires_once_on_sqlite() {
    for seed in 0..seeds() {
        simulate(seed, open_sqlite().await).await;
    }
}
