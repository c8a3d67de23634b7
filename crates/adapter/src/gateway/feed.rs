//! Notifies connections of changes to the tasks that they follow.

use std::{collections::HashMap, sync::Arc, time::Duration};

use faena::{Client, Method};
use parking_lot::Mutex;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use crate::{
    backoff::Backoff,
    task::TaskSnapshot,
    transport::{
        Outage,
        http::{follow_events, payload, task},
    },
};

/// How many tasks one connection may follow.
pub const MAX_FOLLOWED: usize = 100;
/// How many updates may wait for a slow client.
const QUEUE: usize = 64;

pub struct Feed {
    pub client: Client,
    /// How often the progress of followed tasks is read.
    every: Duration,
    followers: Mutex<HashMap<String, Vec<Follower>>>,
}

/// A connection that follows a task.
#[derive(Clone)]
struct Follower {
    connection: uuid::Uuid,
    updates: mpsc::Sender<Arc<TaskSnapshot>>,
    too_slow: CancellationToken,
}

/// The subscription of one connection. Dropping it ends the subscription.
pub struct Subscription<'a> {
    feed: &'a Feed,
    follower: Follower,
    pub updates: mpsc::Receiver<Arc<TaskSnapshot>>,
    /// Cancelled if the client does not read its updates.
    pub too_slow: CancellationToken,
}

impl Feed {
    pub fn new(client: Client, every: Duration) -> Feed {
        Feed { client, every, followers: Mutex::default() }
    }

    pub fn subscribe(&self) -> Subscription<'_> {
        let (sender, updates) = mpsc::channel(QUEUE);
        let too_slow = CancellationToken::new();
        let connection = uuid::Uuid::now_v7();
        let follower = Follower { connection, updates: sender, too_slow: too_slow.clone() };
        Subscription { feed: self, follower, updates, too_slow }
    }

    /// Follows the events of the server until the program stops.
    pub async fn follow(&self, stop: &CancellationToken) {
        let mut backoff = Backoff::new();
        loop {
            let ended = tokio::select! {
                ended = self.follow_once(&mut backoff) => ended,
                () = stop.cancelled() => return,
            };
            let reason = ended.err().map_or_else(|| "the stream ended".to_owned(), |outage| outage.to_string());
            tracing::warn!(reason, "event stream of the server lost, reconnecting");
            if !backoff.wait(stop).await {
                return;
            }
        }
    }

    async fn follow_once(&self, backoff: &mut Backoff) -> Result<(), Outage> {
        let request = self.client.request(Method::GET, "/api/v1/events").query("types", "task.*");
        follow_events(request, self.every, backoff, async |event| match event {
            Some(event) if event.event.as_deref() != Some("gap") => match payload(&event) {
                Some((id, _)) => self.refresh(&id).await,
                None => Ok(()),
            },
            _ => self.refresh_all().await,
        })
        .await
    }

    async fn refresh_all(&self) -> Result<(), Outage> {
        let followed: Vec<String> = self.followers.lock().keys().cloned().collect();
        for id in followed {
            self.refresh(&id).await?;
        }
        Ok(())
    }

    /// Reads a task that a client follows, and passes it on.
    async fn refresh(&self, id: &str) -> Result<(), Outage> {
        if !self.followers.lock().contains_key(id) {
            return Ok(());
        }
        let Some(task) = task(&self.client, id).await? else { return Ok(()) };
        let task = Arc::new(task);
        for follower in self.followers.lock().get(id).into_iter().flatten() {
            if let Err(mpsc::error::TrySendError::Full(_)) = follower.updates.try_send(task.clone()) {
                follower.too_slow.cancel();
            }
        }
        Ok(())
    }
}

impl Subscription<'_> {
    /// Follows a task.
    pub fn follow(&self, task: &str) {
        let mut followers = self.feed.followers.lock();
        let of_task = followers.entry(task.to_owned()).or_default();
        if !of_task.iter().any(|follower| follower.connection == self.follower.connection) {
            of_task.push(self.follower.clone());
        }
    }

    pub fn unfollow(&self, task: &str) {
        let mut followers = self.feed.followers.lock();
        if let Some(of_task) = followers.get_mut(task) {
            of_task.retain(|follower| follower.connection != self.follower.connection);
            if of_task.is_empty() {
                followers.remove(task);
            }
        }
    }
}

impl Drop for Subscription<'_> {
    fn drop(&mut self) {
        let connection = self.follower.connection;
        self.feed.followers.lock().retain(|_, followers| {
            followers.retain(|follower| follower.connection != connection);
            !followers.is_empty()
        });
    }
}
