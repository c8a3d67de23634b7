//! Sends signals to this process and to other nodes.
//!
//! In this process immediately, by a channel. To other nodes by NOTIFY, never inside a writing transaction (that would
//! serialise all commits), collected for a few milliseconds, and only if there are other nodes. A lost notification costs one
//! poll, never a job. The listener reconnects for ever, notices a silently broken connection, and signals every loop to check
//! whenever it listens again.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use deadpool_postgres::Pool;
use faena_domain::{JobId, Timestamp, WorkerId, error_chain};
use futures_util::{Stream, StreamExt, stream};
use parking_lot::Mutex;
use tokio::{
    sync::{Notify, broadcast},
    time::Instant,
};
use tokio_postgres::{AsyncMessage, Client, Config, NoTls, Socket, config::SslMode, tls::TlsConnect};
use tokio_util::sync::CancellationToken;

use super::connect;
use crate::{Result, Signal};

const CHANNEL: &str = "faena";
/// Name of the listening session in `pg_stat_activity`.
const LISTENER: &str = "faena listener";
const BATCH_WINDOW: Duration = Duration::from_millis(5);
/// Number of signals that wait to be sent to other nodes. Further ones are left to their polls.
const OUTBOX: usize = 256;
const FIRST_PAUSE: Duration = Duration::from_secs(1);
const LONGEST_PAUSE: Duration = Duration::from_secs(60);
/// After a connection has listened for this time, the next pause is the shortest again.
const STEADY: Duration = Duration::from_secs(5);
/// How often the listening connection is checked, and how long it may take to answer.
const ASK_EVERY: Duration = Duration::from_secs(10);
const ANSWER: Duration = Duration::from_secs(5);

/// How listening ended.
struct Ended {
    listened: Duration,
    reason: String,
}

#[derive(Clone)]
pub struct Notifier(Arc<Inner>);

struct Inner {
    local: broadcast::Sender<Signal>,
    outbox: Mutex<Vec<Signal>>,
    wake: Notify,
    has_company: AtomicBool,
    /// Distinguishes our own notifications from those of other nodes.
    sender: String,
}

impl Notifier {
    pub fn start(url: &str, pool: Pool, stop: CancellationToken) -> Result<Notifier> {
        let mut config = connect::config(url)?;
        config.application_name(LISTENER);
        let notifier = Notifier(Arc::new(Inner {
            local: broadcast::channel(4_096).0,
            outbox: Mutex::default(),
            wake: Notify::new(),
            has_company: AtomicBool::new(false),
            sender: uuid::Uuid::new_v4().simple().to_string(),
        }));
        let talker = notifier.clone();
        let stopped = stop.clone();
        tokio::spawn(async move {
            tokio::select! { () = stopped.cancelled() => {}, () = talker.talk(pool) => {} }
        });
        let listener = notifier.clone();
        tokio::spawn(async move {
            tokio::select! { () = stop.cancelled() => {}, () = listener.listen(config) => {} }
        });
        Ok(notifier)
    }

    pub fn subscribe(&self) -> broadcast::Receiver<Signal> {
        self.0.local.subscribe()
    }

    pub fn send(&self, signal: Signal) {
        let _ = self.0.local.send(signal);
        if self.0.has_company.load(Ordering::Relaxed) {
            let mut outbox = self.0.outbox.lock();
            if outbox.len() < OUTBOX && signal.add_to(&mut outbox) {
                self.0.wake.notify_one();
            }
        }
    }

    /// Records how many nodes the last poll saw.
    pub fn nodes_seen(&self, nodes: usize) {
        self.0.has_company.store(nodes > 1, Ordering::Relaxed);
    }

    async fn talk(&self, pool: Pool) {
        loop {
            self.0.wake.notified().await;
            tokio::time::sleep(BATCH_WINDOW).await;
            let signals = std::mem::take(&mut *self.0.outbox.lock());
            if signals.is_empty() {
                continue;
            }
            let words: Vec<String> = signals.into_iter().map(word).collect();
            for part in words.chunks(100) {
                let text = format!("{} {}", self.0.sender, part.join(" "));
                let sent = async {
                    let client = pool.get().await.ok()?;
                    client.execute("SELECT pg_notify($1, $2)", &[&CHANNEL, &text]).await.ok()
                };
                // The database is unavailable: the other nodes find out by their polls.
                let _ = tokio::time::timeout(Duration::from_secs(5), sent).await;
            }
        }
    }

    /// Listens for ever: reconnects 1 s after the connection ended, after twice as long with each failure, at most a
    /// minute.
    async fn listen(&self, config: Config) {
        let mut pause = FIRST_PAUSE;
        let mut quiet = false;
        loop {
            let ended = if config.get_ssl_mode() == SslMode::Require {
                match connect::tls() {
                    Ok(tls) => self.listen_once(&config, tls).await,
                    Err(_) => return,
                }
            } else {
                self.listen_once(&config, NoTls).await
            };
            if ended.listened >= STEADY {
                (pause, quiet) = (FIRST_PAUSE, false);
            }
            // Logged once per outage, not once per attempt. Behind a transaction-mode pooler this is permanent.
            if !quiet {
                tracing::info!(reason = ended.reason, "not listening to other nodes, polling once a second");
                quiet = true;
            }
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
    }

    async fn listen_once<T>(&self, config: &Config, tls: T) -> Ended
    where
        T: tokio_postgres::tls::MakeTlsConnect<Socket> + Send,
        T::Stream: Send + Unpin + 'static,
        T::TlsConnect: Send,
        <T::TlsConnect as TlsConnect<Socket>>::Future: Send,
    {
        let never = |reason: String| Ended { listened: Duration::ZERO, reason };
        let (client, mut connection): (Client, _) = match tokio::time::timeout(ANSWER, config.connect(tls)).await {
            Ok(Ok(connected)) => connected,
            Ok(Err(error)) => return never(error_chain(&error)),
            Err(_) => return never("no answer while connecting".into()),
        };
        let mut messages = stream::poll_fn(move |context| connection.poll_message(context));
        if let Err(reason) = self.query(&client, "LISTEN faena", &mut messages).await {
            return never(reason);
        }
        let began = Instant::now();
        // Signals until now may have been lost.
        self.send_locally(Signal::Missed);
        let mut look = tokio::time::interval_at(began + ASK_EVERY, ASK_EVERY);
        let reason = loop {
            let message = tokio::select! {
                message = messages.next() => message,
                // A silently broken connection looks like one on which nothing happens.
                _ = look.tick() => match self.query(&client, "SELECT 1", &mut messages).await {
                    Ok(()) => continue,
                    Err(reason) => break reason,
                },
            };
            match message {
                Some(Ok(message)) => self.receive_message(&message),
                Some(Err(error)) => break error_chain(&error),
                None => break "the server closed it".into(),
            }
        };
        Ended { listened: began.elapsed(), reason }
    }

    /// Runs a query while messages keep arriving. `Err`: why there was no answer in time.
    async fn query<S>(&self, client: &Client, sql: &str, messages: &mut S) -> std::result::Result<(), String>
    where
        S: Stream<Item = std::result::Result<AsyncMessage, tokio_postgres::Error>> + Unpin,
    {
        let answer = tokio::time::timeout(ANSWER, client.batch_execute(sql));
        tokio::pin!(answer);
        loop {
            tokio::select! {
                answered = &mut answer => return match answered {
                    Ok(Ok(())) => Ok(()),
                    Ok(Err(error)) => Err(error_chain(&error)),
                    Err(_) => Err(format!("no answer for {} s", ANSWER.as_secs())),
                },
                message = messages.next() => match message {
                    Some(Ok(message)) => self.receive_message(&message),
                    Some(Err(error)) => return Err(error_chain(&error)),
                    None => return Err("the server closed it".into()),
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
            return;
        }
        for signal in words.filter_map(parse) {
            let _ = self.0.local.send(signal);
        }
    }
}

fn word(signal: Signal) -> String {
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
        Signal::Event => "e".into(),
        Signal::Missed => "a".into(),
    }
}

fn parse(word: &str) -> Option<Signal> {
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
            Signal::Event,
            Signal::Missed,
        ] {
            assert_eq!(parse(&word(signal)), Some(signal));
        }
        for noise in ["", "r", "x1", "rx", "cnoid", "w1", "k", "d", "dx", "é"] {
            assert_eq!(parse(noise), None, "{noise}");
        }
    }
}
