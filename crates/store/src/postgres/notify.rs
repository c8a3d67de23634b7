//! Tells this process and the other nodes what has become ready.
//!
//! In this process by a channel, at once. To other nodes by NOTIFY, never inside a writing transaction (it would put all
//! commits in one line), put together for a few milliseconds, and only when there are other nodes. A lost notification costs
//! one poll, never a job; the listener connects again for ever.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use deadpool_postgres::Pool;
use faena_domain::{JobId, WorkerId};
use futures_util::{StreamExt, stream};
use parking_lot::Mutex;
use tokio::sync::{Notify, broadcast};
use tokio_postgres::{AsyncMessage, Client, Config, NoTls, Socket, config::SslMode, tls::TlsConnect};
use tokio_util::sync::CancellationToken;

use super::connect;
use crate::{Result, Signal};

const CHANNEL: &str = "faena";
const GATHER: Duration = Duration::from_millis(5);
/// Signals that wait to be sent to other nodes. What is over is found by their poll.
const OUTBOX: usize = 256;

#[derive(Clone)]
pub struct Notifier(Arc<Inner>);

struct Inner {
    local: broadcast::Sender<Signal>,
    outbox: Mutex<Vec<Signal>>,
    wake: Notify,
    has_company: AtomicBool,
    /// Tells our own notifications from those of others.
    sender: String,
}

impl Notifier {
    pub fn start(url: &str, pool: Pool, stop: CancellationToken) -> Result<Notifier> {
        let config = connect::config(url)?;
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

    pub fn tell(&self, signal: Signal) {
        let _ = self.0.local.send(signal);
        if self.0.has_company.load(Ordering::Relaxed) {
            let mut outbox = self.0.outbox.lock();
            if outbox.len() < OUTBOX && !outbox.contains(&signal) {
                outbox.push(signal);
                self.0.wake.notify_one();
            }
        }
    }

    /// How many nodes the last poll saw.
    pub fn nodes_seen(&self, nodes: usize) {
        self.0.has_company.store(nodes > 1, Ordering::Relaxed);
    }

    async fn talk(&self, pool: Pool) {
        loop {
            self.0.wake.notified().await;
            tokio::time::sleep(GATHER).await;
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
                // The database is away: the others find out by their poll.
                let _ = tokio::time::timeout(Duration::from_secs(5), sent).await;
            }
        }
    }

    async fn listen(&self, config: Config) {
        let mut pause = Duration::from_secs(1);
        loop {
            let started = tokio::time::Instant::now();
            let ended = if config.get_ssl_mode() == SslMode::Require {
                match connect::tls() {
                    Ok(tls) => self.listen_once(&config, tls).await,
                    Err(_) => return,
                }
            } else {
                self.listen_once(&config, NoTls).await
            };
            if let Err(error) = ended {
                tracing::debug!(error = %crate::error::chain(&error), "the listening connection ended");
            }
            if started.elapsed() > Duration::from_secs(60) {
                pause = Duration::from_secs(1);
            }
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(Duration::from_secs(60));
        }
    }

    async fn listen_once<T>(&self, config: &Config, tls: T) -> std::result::Result<(), tokio_postgres::Error>
    where
        T: tokio_postgres::tls::MakeTlsConnect<Socket> + Send,
        T::Stream: Send + Unpin + 'static,
        T::TlsConnect: Send,
        <T::TlsConnect as TlsConnect<Socket>>::Future: Send,
    {
        let (client, mut connection): (Client, _) = config.connect(tls).await?;
        let mut messages = stream::poll_fn(move |context| connection.poll_message(context));
        let start = client.batch_execute("LISTEN faena");
        tokio::pin!(start);
        let mut listening = false;
        loop {
            tokio::select! {
                result = &mut start, if !listening => { result?; listening = true; }
                message = messages.next() => match message {
                    Some(Ok(AsyncMessage::Notification(note))) => self.hear(note.payload()),
                    Some(Ok(_)) => {}
                    Some(Err(error)) => return Err(error),
                    None => return Ok(()),
                }
            }
        }
    }

    /// Tells this process only.
    pub fn tell_here(&self, signal: Signal) {
        let _ = self.0.local.send(signal);
    }

    fn hear(&self, payload: &str) {
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
        Signal::Room => "m".into(),
        Signal::Rules => "l".into(),
        Signal::Webhook => "h".into(),
        Signal::Schedule => "s".into(),
        Signal::Event => "e".into(),
    }
}

fn parse(word: &str) -> Option<Signal> {
    match word.split_at_checked(1)? {
        ("r", lane) => lane.parse().ok().map(Signal::Ready),
        ("c", id) => id.parse::<JobId>().ok().map(Signal::Cancel),
        ("w", "") => Some(Signal::Waiting),
        ("k", id) => id.parse::<WorkerId>().ok().map(Signal::Worker),
        ("m", "") => Some(Signal::Room),
        ("l", "") => Some(Signal::Rules),
        ("h", "") => Some(Signal::Webhook),
        ("s", "") => Some(Signal::Schedule),
        ("e", "") => Some(Signal::Event),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signals_are_read_as_they_were_said() {
        for signal in [
            Signal::Ready(77),
            Signal::Cancel(JobId::new()),
            Signal::Waiting,
            Signal::Worker(WorkerId::new()),
            Signal::Room,
            Signal::Rules,
            Signal::Webhook,
            Signal::Schedule,
            Signal::Event,
        ] {
            assert_eq!(parse(&word(signal)), Some(signal));
        }
        for noise in ["", "r", "x1", "rx", "cnoid", "w1", "k", "é"] {
            assert_eq!(parse(noise), None, "{noise}");
        }
    }
}
