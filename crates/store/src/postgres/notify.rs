//! Sends signals to this process and to other nodes.
//!
//! A channel delivers signals inside this process immediately. NOTIFY delivers them to other nodes, if there are any.
//! Signals are collected for a few milliseconds and sent outside of writing transactions, because NOTIFY inside them
//! would serialise all commits. After a lost notification the other nodes find the change with their next poll; no job
//! is lost. The listener reconnects until the process stops, detects a dead connection and a server that has become
//! read-only, and wakes every loop after each reconnect, because signals may have been lost meanwhile.
//!
//! A transaction-mode pooler accepts LISTEN and delivers nothing. So the listener sends itself a notification through the pool
//! and waits for it. While notifications do not arrive, `problem` says why, and the nodes poll more often.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use deadpool_postgres::Pool;
use faena_domain::{JobId, Timestamp, WorkerId, error_chain};
use futures_util::StreamExt;
use parking_lot::Mutex;
use tokio::{
    sync::{Notify, broadcast, watch},
    time::Instant,
};
use tokio_postgres::{AsyncMessage, Client};
use tokio_util::sync::CancellationToken;

use super::hosts::{Hosts, Messages};
use crate::{Result, Signal, StoreError};

const CHANNEL: &str = "faena";
/// Name of the listening session in `pg_stat_activity`.
const LISTENER: &str = "faena listener";
const BATCH_WINDOW: Duration = Duration::from_millis(5);
/// Maximum number of signals that wait to be sent. Further signals are dropped: the other nodes find the changes when they poll.
const MAX_UNSENT: usize = 256;
const FIRST_PAUSE: Duration = Duration::from_secs(1);
const LONGEST_PAUSE: Duration = Duration::from_secs(5);
/// Pause after a pooler has lost notifications: that is permanent until its configuration changes.
const POOLER_PAUSE: Duration = Duration::from_secs(60);
/// After a connection has listened for this time, the next pause is the shortest again.
const STABLE_AFTER: Duration = Duration::from_secs(5);
/// How often the listening connection is checked, and how long it may take to answer.
const CHECK_INTERVAL: Duration = Duration::from_secs(10);
const CHECK_TIMEOUT: Duration = Duration::from_secs(5);
/// The same if the URL has several hosts.
const CHECK_INTERVAL_SEVERAL_HOSTS: Duration = Duration::from_secs(2);
const CHECK_TIMEOUT_SEVERAL_HOSTS: Duration = Duration::from_secs(2);
/// Payload of a notification that the listener sends to itself.
const ECHO: &str = "?";

/// How listening ended.
struct ListenEnd {
    listened: Duration,
    reason: String,
    is_pooler: bool,
}

/// Servers that the listener connects to. If the pool uses the same URL, it must follow the listener to another host.
struct ListenHosts {
    own: Hosts,
    /// Servers of the pool. `None`: the listener has a URL of its own.
    of_pool: Option<Hosts>,
    check_interval: Duration,
    answer_timeout: Duration,
}

#[derive(Clone)]
pub struct Notifier(Arc<Inner>);

struct Inner {
    local: broadcast::Sender<Signal>,
    unsent: Mutex<Vec<Signal>>,
    wake: Notify,
    has_other_nodes: AtomicBool,
    /// Distinguishes our own notifications from those of other nodes.
    sender: String,
    /// Why notifications do not arrive. `None`: no problem is known.
    problem: Mutex<Option<String>>,
    /// Number of notifications to itself that arrived.
    echoes: AtomicU64,
}

impl Notifier {
    pub fn start(hosts: &Hosts, listen_url: Option<&str>, pool: Pool, stop: CancellationToken) -> Result<Notifier> {
        let listen_hosts = match listen_url {
            Some(url) => {
                let invalid =
                    "database.listen_url is not a valid address; write postgres://user:password@host:5432/database";
                let hosts = Hosts::new(url).map_err(|_| StoreError::Setup(invalid.into()))?;
                ListenHosts::new(hosts.named(LISTENER), None)
            }
            None => ListenHosts::new(hosts.named(LISTENER), Some(hosts.clone())),
        };
        let notifier = Notifier(Arc::new(Inner {
            local: broadcast::channel(4_096).0,
            unsent: Mutex::default(),
            wake: Notify::new(),
            has_other_nodes: AtomicBool::new(false),
            sender: uuid::Uuid::new_v4().simple().to_string(),
            problem: Mutex::default(),
            echoes: AtomicU64::default(),
        }));
        let sender = notifier.clone();
        let (stopped, send_pool) = (stop.clone(), pool.clone());
        tokio::spawn(async move {
            tokio::select! { () = stopped.cancelled() => {}, () = sender.send_to_other_nodes(send_pool) => {} }
        });
        let listener = notifier.clone();
        tokio::spawn(async move {
            tokio::select! { () = stop.cancelled() => {}, () = listener.listen(listen_hosts, pool) => {} }
        });
        Ok(notifier)
    }

    /// Returns why notifications of other nodes do not arrive.
    pub fn problem(&self) -> Option<String> {
        self.0.problem.lock().clone()
    }

    pub fn subscribe(&self) -> broadcast::Receiver<Signal> {
        self.0.local.subscribe()
    }

    pub fn send(&self, signal: Signal) {
        let _ = self.0.local.send(signal);
        if self.0.has_other_nodes.load(Ordering::Relaxed) {
            let mut unsent = self.0.unsent.lock();
            if unsent.len() < MAX_UNSENT && signal.add_to(&mut unsent) {
                self.0.wake.notify_one();
            }
        }
    }

    /// Records how many nodes the last poll saw.
    pub fn nodes_seen(&self, nodes: usize) {
        self.0.has_other_nodes.store(nodes > 1, Ordering::Relaxed);
    }

    async fn send_to_other_nodes(&self, pool: Pool) {
        loop {
            self.0.wake.notified().await;
            tokio::time::sleep(BATCH_WINDOW).await;
            let signals = std::mem::take(&mut *self.0.unsent.lock());
            if signals.is_empty() {
                continue;
            }
            let words: Vec<String> = signals.into_iter().map(encode).collect();
            for part in words.chunks(100) {
                let text = format!("{} {}", self.0.sender, part.join(" "));
                let sent = async {
                    let client = pool.get().await.ok()?;
                    client.execute("SELECT pg_notify($1, $2)", &[&CHANNEL, &text]).await.ok()
                };
                // If the database is unavailable, the other nodes find the changes with their polls.
                let _ = tokio::time::timeout(Duration::from_secs(5), sent).await;
            }
        }
    }

    /// Listens until the process stops. Reconnects 1 s after the connection ended; the delay doubles with each failure, up to 5 s.
    async fn listen(&self, hosts: ListenHosts, pool: Pool) {
        let mut pause = FIRST_PAUSE;
        let mut logged = false;
        loop {
            let ended = self.listen_once(&hosts, &pool).await;
            if ended.listened >= STABLE_AFTER {
                (pause, logged) = (FIRST_PAUSE, false);
            }
            *self.0.problem.lock() = Some(ended.reason.clone());
            // Logged once per outage, not once per attempt.
            if !logged && ended.is_pooler {
                tracing::warn!(reason = ended.reason, "not listening to other nodes, polling instead");
            } else if !logged {
                tracing::info!(reason = ended.reason, "not listening to other nodes, polling instead");
            }
            logged = true;
            tokio::time::sleep(if ended.is_pooler { POOLER_PAUSE } else { pause }).await;
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
    }

    async fn listen_once(&self, hosts: &ListenHosts, pool: &Pool) -> ListenEnd {
        let failed = |reason: String| ListenEnd { listened: Duration::ZERO, reason, is_pooler: false };
        let (host, client, mut messages) = match hosts.own.open().await {
            Ok(connected) => connected,
            Err(error) => return failed(error_chain(&error)),
        };
        hosts.connected_to(host);
        let mut disconnections = hosts.disconnections();
        if let Err(reason) = self.query(&client, "LISTEN faena", hosts.answer_timeout, &mut messages).await {
            return failed(reason);
        }
        let began = Instant::now();
        // Signals until now may have been lost.
        self.send_locally(Signal::Missed);
        if !self.receives_echo(pool, &mut messages).await {
            // Everything that was sent to a session arrives before the answer to its next query.
            let echoes = self.0.echoes.load(Ordering::Relaxed);
            if let Err(reason) = self.query(&client, "SELECT 1", hosts.answer_timeout, &mut messages).await {
                return failed(reason);
            }
            if self.0.echoes.load(Ordering::Relaxed) == echoes {
                return ListenEnd { is_pooler: true, ..failed(LOST_BY_POOLER.into()) };
            }
        }
        *self.0.problem.lock() = None;
        let mut checks = tokio::time::interval_at(began + hosts.check_interval, hosts.check_interval);
        let reason = loop {
            let message = tokio::select! {
                message = messages.next() => message,
                // Without a query, a dead connection looks like an idle one.
                _ = checks.tick() => match self.check(&client, hosts, &mut messages).await {
                    Ok(()) => continue,
                    Err(reason) => break reason,
                },
                () = disconnected(&mut disconnections) => break "the database was replaced or has become read-only".into(),
            };
            match message {
                Some(Ok(message)) => self.receive_message(&message),
                Some(Err(error)) => break error_chain(&error),
                None => break "the server closed the connection".into(),
            }
        };
        ListenEnd { listened: began.elapsed(), reason, is_pooler: false }
    }

    /// Checks that the connection works and that its server still accepts writes, if it must.
    async fn check(
        &self,
        client: &Client,
        hosts: &ListenHosts,
        messages: &mut Messages,
    ) -> std::result::Result<(), String> {
        let sql = if hosts.own.needs_writable() { FAIL_IF_READ_ONLY } else { "SELECT 1" };
        self.query(client, sql, hosts.answer_timeout, messages).await.map_err(|reason| {
            match reason.contains("division by zero") {
                true => "the server has become read-only".to_owned(),
                false => reason,
            }
        })
    }

    /// Sends a notification to itself through the pool, and returns whether it arrives. `true` if it cannot be sent.
    async fn receives_echo(&self, pool: &Pool, messages: &mut Messages) -> bool {
        let before = self.0.echoes.load(Ordering::Relaxed);
        let text = format!("{} {ECHO}", self.0.sender);
        let sent = async {
            let client = pool.get().await.ok()?;
            client.execute("SELECT pg_notify($1, $2)", &[&CHANNEL, &text]).await.ok()
        };
        if !matches!(tokio::time::timeout(CHECK_TIMEOUT, sent).await, Ok(Some(_))) {
            return true;
        }
        let arrived = async {
            while self.0.echoes.load(Ordering::Relaxed) == before {
                match messages.next().await {
                    Some(Ok(message)) => self.receive_message(&message),
                    // The connection ended, which the caller notices.
                    _ => break,
                }
            }
        };
        tokio::time::timeout(CHECK_TIMEOUT, arrived).await.is_ok()
    }

    /// Runs a query, and processes the messages that arrive meanwhile. `Err`: why there was no answer in time.
    async fn query(
        &self,
        client: &Client,
        sql: &str,
        limit: Duration,
        messages: &mut Messages,
    ) -> std::result::Result<(), String> {
        let answer = tokio::time::timeout(limit, client.batch_execute(sql));
        tokio::pin!(answer);
        loop {
            tokio::select! {
                answered = &mut answer => return match answered {
                    Ok(Ok(())) => Ok(()),
                    Ok(Err(error)) => Err(error_chain(&error)),
                    Err(_) => Err(format!("no answer for {} s", limit.as_secs())),
                },
                message = messages.next() => match message {
                    Some(Ok(message)) => self.receive_message(&message),
                    Some(Err(error)) => return Err(error_chain(&error)),
                    None => return Err("the server closed the connection".into()),
                }
            }
        }
    }

    fn receive_message(&self, message: &AsyncMessage) {
        if let AsyncMessage::Notification(note) = message {
            self.receive(note.payload());
        }
    }

    /// Sends a signal to this process only.
    pub fn send_locally(&self, signal: Signal) {
        let _ = self.0.local.send(signal);
    }

    fn receive(&self, payload: &str) {
        let mut words = payload.split(' ');
        if words.next() == Some(self.0.sender.as_str()) {
            if words.next() == Some(ECHO) {
                self.0.echoes.fetch_add(1, Ordering::Relaxed);
            }
            return;
        }
        for signal in words.filter_map(decode) {
            let _ = self.0.local.send(signal);
        }
    }
}

impl ListenHosts {
    fn new(own: Hosts, of_pool: Option<Hosts>) -> ListenHosts {
        let (check_interval, answer_timeout) = if own.has_several() {
            (CHECK_INTERVAL_SEVERAL_HOSTS, CHECK_TIMEOUT_SEVERAL_HOSTS)
        } else {
            (CHECK_INTERVAL, CHECK_TIMEOUT)
        };
        ListenHosts { own, of_pool, check_interval, answer_timeout }
    }

    /// Records which host accepted the listener. The pool closes its connections to any other host, because the
    /// listener is the first to notice that a host hangs.
    fn connected_to(&self, host: usize) {
        self.of_pool.as_ref().unwrap_or(&self.own).move_to(host);
    }

    fn disconnections(&self) -> Option<watch::Receiver<u64>> {
        self.of_pool.as_ref().map(Hosts::disconnections)
    }
}

/// Waits until the pool has closed its connections. Never returns for a listener with its own URL.
async fn disconnected(disconnections: &mut Option<watch::Receiver<u64>>) {
    let changed = match disconnections {
        Some(disconnections) => disconnections.changed().await.is_ok(),
        None => false,
    };
    if !changed {
        std::future::pending().await
    }
}

const LOST_BY_POOLER: &str = "notifications do not arrive: a connection pooler in transaction mode loses LISTEN; set database.listen_url \
     to a direct address of PostgreSQL, or use pool_mode = session";

/// Divides by zero in a read-only session, because the caller only learns whether the query failed.
const FAIL_IF_READ_ONLY: &str = "SELECT 1 / (current_setting('transaction_read_only') = 'off')::int";

fn encode(signal: Signal) -> String {
    match signal {
        Signal::Ready(lane) => format!("r{lane}"),
        Signal::Cancel(id) => format!("c{id}"),
        Signal::Waiting => "w".into(),
        Signal::Worker(id) => format!("k{id}"),
        Signal::Capacity => "m".into(),
        Signal::Rules => "l".into(),
        Signal::ApiKeys => "p".into(),
        Signal::Webhook => "h".into(),
        Signal::Schedule => "s".into(),
        Signal::TaskDue(at) => format!("d{}", at.as_ms()),
        Signal::TaskJobEnded => "t".into(),
        Signal::TaskQueue => "q".into(),
        Signal::Event => "e".into(),
        Signal::Missed => "a".into(),
    }
}

fn decode(word: &str) -> Option<Signal> {
    match word.split_at_checked(1)? {
        ("r", lane) => lane.parse().ok().map(Signal::Ready),
        ("c", id) => id.parse::<JobId>().ok().map(Signal::Cancel),
        ("w", "") => Some(Signal::Waiting),
        ("k", id) => id.parse::<WorkerId>().ok().map(Signal::Worker),
        ("m", "") => Some(Signal::Capacity),
        ("l", "") => Some(Signal::Rules),
        ("p", "") => Some(Signal::ApiKeys),
        ("h", "") => Some(Signal::Webhook),
        ("s", "") => Some(Signal::Schedule),
        ("d", at) => at.parse().ok().map(|ms| Signal::TaskDue(Timestamp::from_ms(ms))),
        ("t", "") => Some(Signal::TaskJobEnded),
        ("q", "") => Some(Signal::TaskQueue),
        ("e", "") => Some(Signal::Event),
        ("a", "") => Some(Signal::Missed),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signals_are_parsed_as_they_were_written() {
        for signal in [
            Signal::Ready(77),
            Signal::Cancel(JobId::new()),
            Signal::Waiting,
            Signal::Worker(WorkerId::new()),
            Signal::Capacity,
            Signal::Rules,
            Signal::ApiKeys,
            Signal::Webhook,
            Signal::Schedule,
            Signal::TaskDue(Timestamp::from_ms(1_700_000_000_000)),
            Signal::TaskJobEnded,
            Signal::TaskQueue,
            Signal::Event,
            Signal::Missed,
        ] {
            assert_eq!(decode(&encode(signal)), Some(signal));
        }
        for noise in ["", "r", "x1", "rx", "cnoid", "w1", "k", "d", "dx", "é"] {
            assert_eq!(decode(noise), None, "{noise}");
        }
    }
}
