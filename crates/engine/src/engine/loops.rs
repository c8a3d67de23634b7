//! Lists the background loops of a node, in the order in which a job passes through them.
//!
//! To add a loop, write a `run_once` that processes one bounded batch, and add it to one of the lists below: its name,
//! the longest time between two rounds, what wakes it, and the function that runs one round.

use std::{sync::Arc, time::Duration};

use faena_domain::Timestamp;
use futures_util::future::BoxFuture;
use tokio::sync::Notify;

use super::Engine;
use crate::{
    EngineError, Round, bulk, handlers,
    inbox::Inbox,
    measure, nodes,
    outbox::{Relay, Source},
    poller, promoter, queue, recorder, retention, schedules, tasks,
    traces::{self, Tracer},
    workers::status_writer,
};

/// Period of fallback polls if other nodes write to the database too: their signals may be lost.
const SHARED_POLL: Duration = Duration::from_secs(1);
/// Period of fallback polls if no other node writes to the database.
const SINGLE_NODE_POLL: Duration = Duration::from_secs(30);
/// Longest time between two rounds of a loop that signals wake.
const FALLBACK: Duration = Duration::from_secs(30);
/// Period of the bulk loop. Within this time a node finds a bulk action that another node accepted.
const BULK: Duration = Duration::from_secs(10);
/// Period of the scheduler. Within this time it notices that the clock was set forward, which a timer does not notice.
const SCHEDULES: Duration = Duration::from_secs(10);
/// Longest time between two rounds of a source or inbox. A round usually returns an earlier time for the next one.
const INPUTS: Duration = Duration::from_secs(60);
/// Period of the check for claims that this node never received.
const RECONCILE: Duration = Duration::from_secs(2);
/// Period of storing when API keys were last used.
const KEY_USAGE: Duration = Duration::from_secs(30);
/// Period of adding what happened to the history. A server that dies loses the times it measured since the last round.
const HISTORY: Duration = Duration::from_secs(10);
/// Period of deleting finished jobs and events that are older than their retention.
const RETENTION: Duration = Duration::from_secs(60);

/// Runs one round of a loop, with the current time.
type RunOnce = Box<dyn Fn(Arc<Engine>, Timestamp) -> BoxFuture<'static, Result<Round, EngineError>> + Send>;

/// A background loop of this node.
pub(super) struct Loop {
    name: Arc<str>,
    /// Longest time between two rounds.
    period: Duration,
    /// Starts the next round early.
    wakeup: Arc<Notify>,
    /// Whether the loop brings in work. Such loops stop first on shutdown.
    is_intake: bool,
    run_once: RunOnce,
}

impl Loop {
    /// Creates a loop that brings in work. It stops first on shutdown.
    fn intake<Fut>(
        name: impl Into<Arc<str>>,
        period: Duration,
        wakeup: &Arc<Notify>,
        run_once: impl Fn(Arc<Engine>, Timestamp) -> Fut + Send + 'static,
    ) -> Loop
    where
        Fut: Future<Output = Result<Round, EngineError>> + Send + 'static,
    {
        let run_once: RunOnce = Box::new(move |engine, now| Box::pin(run_once(engine, now)));
        Loop { name: name.into(), period, wakeup: wakeup.clone(), is_intake: true, run_once }
    }

    /// Creates a loop that stops last on shutdown, after the last reports are stored.
    fn outgoing<Fut>(
        name: impl Into<Arc<str>>,
        period: Duration,
        wakeup: &Arc<Notify>,
        run_once: impl Fn(Arc<Engine>, Timestamp) -> Fut + Send + 'static,
    ) -> Loop
    where
        Fut: Future<Output = Result<Round, EngineError>> + Send + 'static,
    {
        Loop { is_intake: false, ..Loop::intake(name, period, wakeup, run_once) }
    }
}

impl Engine {
    /// Starts the loops of this node's roles and the slots of its built-in worker.
    pub(super) fn start_loops(self: &Arc<Engine>) {
        for Loop { name, period, wakeup, is_intake, run_once } in self.list_loops() {
            let driver = if is_intake { &self.loops.intake } else { &self.loops.outgoing };
            let engine = self.clone();
            driver.start(name, period, wakeup, move |now| run_once(engine.clone(), now));
        }
        if self.config.roles.worker {
            for _ in 0..self.config.concurrency {
                self.local.slots.spawn(self.local.worker.clone().run_slot());
            }
        }
        self.listen_for_signals();
    }

    /// Runs one round of the loop `name` with `now` as the current time. Fails if this node has no such loop.
    pub async fn run_loop(self: &Arc<Engine>, name: &str, now: Timestamp) -> Result<Round, EngineError> {
        match self.list_loops().into_iter().find(|known| *known.name == *name) {
            Some(known) => (known.run_once)(self.clone(), now).await,
            None => Err(EngineError::UnknownLoop(name.to_owned())),
        }
    }

    /// Returns the loops of this node's roles.
    fn list_loops(&self) -> Vec<Loop> {
        let mut loops = Vec::new();
        if self.config.roles.engine {
            loops.extend(self.due_loops());
        }
        loops.extend(self.job_loops());
        loops.extend(self.queue_loops());
        if self.config.roles.engine {
            loops.extend(self.delivery_loops());
            loops.extend(self.input_loops());
        }
        loops.extend(self.worker_loops());
        loops.extend(self.node_loops());
        loops.extend(self.tracer.clone().map(trace_loop));
        if self.config.roles.engine {
            loops.extend(self.maintenance_loops());
        }
        loops
    }

    fn due_loops(&self) -> [Loop; 3] {
        [
            Loop::intake("scheduler", SCHEDULES, &self.wakeups.scheduler, |e, now| async move {
                Ok(schedules::run_once(&*e.store, &e.schedules, now).await?)
            }),
            Loop::intake("tasks", SCHEDULES, &self.wakeups.tasks, |e, now| async move {
                Ok(tasks::run_once(&*e.store, &e.task_timer, now).await?)
            }),
            Loop::intake("promoter", FALLBACK, &self.wakeups.promoter, |e, now| async move {
                Ok(promoter::run_once(&*e.store, now).await?)
            }),
        ]
    }

    fn job_loops(&self) -> [Loop; 3] {
        [
            Loop::intake("dispatcher", FALLBACK, &self.wakeups.dispatcher, |e, now| async move {
                Ok(e.dispatch.dispatcher.run_once(&e, now).await?)
            }),
            Loop::outgoing("recorder", FALLBACK, &self.wakeups.recorder, |e, now| async move {
                Ok(recorder::run_once(&*e.store, &e.dispatch.in_flight, &e.bus, e.node_id(), now).await?)
            }),
            Loop::outgoing("reporter", FALLBACK, &self.wakeups.reporter, |e, now| async move {
                Ok(e.reports.reporter.run_once(&*e.store, now).await?)
            }),
        ]
    }

    /// Returns the loops of a queue in Redis.
    fn queue_loops(&self) -> Vec<Loop> {
        let Some(redis) = &self.queue.redis else { return Vec::new() };
        vec![
            Loop::outgoing(
                "queue",
                FALLBACK,
                &redis.follow_wakeup,
                |e, _| async move { queue::follow::run_once(&e).await },
            ),
            Loop::outgoing(
                "queue-reconciler",
                self.config.guardian_interval,
                &redis.reconcile_wakeup,
                |e, now| async move { queue::reconcile::run_once(&e, now).await },
            ),
        ]
    }

    fn delivery_loops(&self) -> Vec<Loop> {
        let webhooks = Loop::outgoing("webhooks", FALLBACK, &self.wakeups.webhooks, |e, now| async move {
            e.deliver_webhooks(now).await
        });
        let period = self.poll_period();
        let relays = self.events.outbox.relays.iter().map(|relay| relay_loop(relay.clone(), period));
        [webhooks].into_iter().chain(relays).collect()
    }

    fn input_loops(&self) -> Vec<Loop> {
        let sources = self.inputs.sources.iter().map(|source| source_loop(source.clone()));
        sources.chain(self.inputs.inboxes.iter().map(|inbox| inbox_loop(inbox.clone()))).collect()
    }

    fn worker_loops(&self) -> Vec<Loop> {
        let half_heartbeat = self.config.worker_heartbeat / 2;
        let mut loops = vec![
            Loop::outgoing("event-reader", self.poll_period(), &self.wakeups.event_reader, |e, now| async move {
                Ok(e.events.reader.run_once(now).await?)
            }),
            Loop::outgoing("worker-status", half_heartbeat, &self.wakeups.worker_status, |e, now| async move {
                let round = e.persist_worker_status(now).await?;
                if round.handled > 0 {
                    // Collects the changes of the next moment, so that one round stores them together.
                    tokio::time::sleep(status_writer::BATCH_WINDOW).await;
                }
                Ok(round)
            }),
            Loop::outgoing("guardian", self.config.guardian_interval, &self.wakeups.guardian, |e, now| async move {
                e.run_guardian(now).await
            }),
        ];
        if !self.local.pools.is_empty() {
            loops.push(Loop::intake("pools", FALLBACK, &self.wakeups.pools, |e, now| async move {
                e.local.pools.run_once(&e, now).await
            }));
        }
        loops
    }

    fn node_loops(&self) -> [Loop; 5] {
        // No signal wakes these loops.
        let never = Arc::new(Notify::new());
        [
            Loop::intake("poller", self.poll_period(), &never, |e, now| async move { poller::run_once(&e, now).await }),
            Loop::outgoing("lease", self.config.node_lease / 3, &never, |e, now| async move {
                nodes::renew_lease(&e, now).await
            }),
            Loop::outgoing("reconciler", RECONCILE, &never, |e, now| async move { nodes::reconcile(&e, now).await }),
            Loop::outgoing("history", HISTORY, &never, |e, now| async move { measure::record_history(&e, now).await }),
            Loop::outgoing(
                "key-usage",
                KEY_USAGE,
                &never,
                |e, _| async move { Ok(e.key_usage.run_once(&*e.store).await?) },
            ),
        ]
    }

    fn maintenance_loops(&self) -> [Loop; 3] {
        let never = Arc::new(Notify::new());
        [
            Loop::intake("handlers", self.config.guardian_interval, &never, |e, now| async move {
                handlers::run_once(&e, now).await
            }),
            Loop::intake("bulk", BULK, &self.wakeups.bulk, |e, now| async move {
                Ok(bulk::run_once(&*e.store, now).await?)
            }),
            Loop::intake("retention", RETENTION, &never, |e, now| async move {
                Ok(retention::run_once(&*e.store, &e.config.retention, e.config.outbox.keep, now).await?)
            }),
        ]
    }

    /// Returns the period of polls for changes of other nodes that no signal announced.
    fn poll_period(&self) -> Duration {
        if self.store.is_shared() { SHARED_POLL } else { SINGLE_NODE_POLL }
    }

    /// Sends due webhooks. During shutdown it only stores the results of the last attempts.
    async fn deliver_webhooks(&self, now: Timestamp) -> Result<Round, EngineError> {
        let webhooks = &self.events.webhooks;
        if self.loops.intake.stop.is_cancelled() {
            return Ok(Round::done(webhooks.store_results(&*self.store, now).await?));
        }
        Ok(webhooks.run_once(&*self.store, self.node_id(), now).await?)
    }
}

/// Exports spans, on every node with a configured collector.
fn trace_loop(tracer: Arc<Tracer>) -> Loop {
    let wakeup = tracer.exporter.wakeup.clone();
    Loop::outgoing("trace-exporter", traces::INTERVAL, &wakeup, move |e, now| {
        let tracer = tracer.clone();
        async move { Ok(tracer.run_once(&*e.store, now).await) }
    })
}

fn relay_loop(relay: Arc<Relay>, period: Duration) -> Loop {
    let (name, wakeup) = (format!("relay:{}", relay.name()), relay.wakeup.clone());
    Loop::outgoing(name, period, &wakeup, move |e, now| {
        let relay = relay.clone();
        async move { Ok(relay.run_once(&*e.store, e.node_id(), now).await?) }
    })
}

fn source_loop(source: Arc<Source>) -> Loop {
    let (name, wakeup) = (source.name.clone(), source.wakeup.clone());
    Loop::intake(name, INPUTS, &wakeup, move |e, now| {
        let source = source.clone();
        async move { Ok(source.run_once(&*e.store, &e.bus, now).await?) }
    })
}

fn inbox_loop(inbox: Arc<Inbox>) -> Loop {
    let (name, wakeup) = (inbox.name.clone(), inbox.wakeup.clone());
    Loop::intake(name, INPUTS, &wakeup, move |e, now| {
        let inbox = inbox.clone();
        async move { Ok(inbox.run_once(&*e.store, &e.bus, now).await?) }
    })
}
