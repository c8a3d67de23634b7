//! Serves one client of the gateway.

use std::{
    collections::HashMap,
    sync::Arc,
    time::{Duration, Instant},
};

use axum::extract::ws::{CloseFrame, Message, WebSocket, close_code};
use faena::Method;
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

use super::{
    Gateway,
    feed::{MAX_FOLLOWED, Subscription},
    messages::{Request, about, error, parse},
};
use crate::{task::TaskSnapshot, transport::http::task};

/// How often the gateway pings a client.
const PING_EVERY: Duration = Duration::from_secs(20);
/// A client that sends nothing, not even an answer to a ping, for this long is disconnected.
const SILENCE_LIMIT: Duration = Duration::from_secs(60);
/// How long a client may take to receive one message.
const SEND_LIMIT: Duration = Duration::from_secs(10);

struct Connection<'a> {
    gateway: &'a Gateway,
    socket: WebSocket,
    subscription: Subscription<'a>,
    /// What was last sent about each followed task.
    sent: HashMap<String, Value>,
    last_seen: Instant,
}

/// The connection has ended: closed, broken, or too slow.
struct Closed;

pub async fn serve(gateway: Arc<Gateway>, socket: WebSocket) {
    let subscription = gateway.feed.subscribe();
    let mut connection =
        Connection { gateway: &gateway, socket, subscription, sent: HashMap::new(), last_seen: Instant::now() };
    let Err(Closed) = connection.run(&gateway.stop).await;
}

enum Next {
    Received(Option<Result<Message, axum::Error>>),
    Update(Arc<TaskSnapshot>),
    Tick,
    Stop,
    TooSlow,
}

impl Connection<'_> {
    async fn run(&mut self, stop: &CancellationToken) -> Result<std::convert::Infallible, Closed> {
        let mut ping = tokio::time::interval(PING_EVERY);
        loop {
            let next = tokio::select! {
                received = self.socket.recv() => Next::Received(received),
                Some(task) = self.subscription.updates.recv() => Next::Update(task),
                _ = ping.tick() => Next::Tick,
                () = stop.cancelled() => Next::Stop,
                () = self.subscription.too_slow.cancelled() => Next::TooSlow,
            };
            match next {
                Next::Received(Some(Ok(message))) => self.receive(message).await?,
                Next::Received(_) => return Err(Closed),
                Next::Update(task) => self.send_update(&task, None).await?,
                Next::Tick if self.last_seen.elapsed() > SILENCE_LIMIT => return Err(Closed),
                Next::Tick => self.send(Message::Ping(Vec::new().into())).await?,
                Next::Stop => return self.close(close_code::AWAY, "the gateway is stopping").await,
                Next::TooSlow => return self.close(close_code::AGAIN, "updates are not read in time").await,
            }
        }
    }

    async fn close(&mut self, code: u16, reason: &'static str) -> Result<std::convert::Infallible, Closed> {
        let _ = self.send(Message::Close(Some(CloseFrame { code, reason: reason.into() }))).await;
        Err(Closed)
    }

    async fn send(&mut self, message: Message) -> Result<(), Closed> {
        match tokio::time::timeout(SEND_LIMIT, self.socket.send(message)).await {
            Ok(Ok(())) => Ok(()),
            _ => Err(Closed),
        }
    }

    async fn send_json(&mut self, message: &Value) -> Result<(), Closed> {
        self.send(Message::Text(message.to_string().into())).await
    }

    async fn receive(&mut self, message: Message) -> Result<(), Closed> {
        self.last_seen = Instant::now();
        let text = match message {
            Message::Text(text) => text,
            Message::Binary(_) => return self.send_json(&error("messages must be text", None, None)).await,
            Message::Close(_) => return Err(Closed),
            Message::Ping(_) | Message::Pong(_) => return Ok(()),
        };
        let (request, reference) = parse(&text);
        let reference = reference.as_deref();
        let task = match &request {
            Ok(Request::Decide { task, .. } | Request::Follow { task }) => Some(task.clone()),
            _ => None,
        };
        let done = match request {
            Ok(request) => self.perform(request).await,
            Err(reason) => Err(reason),
        };
        match done {
            Ok(found) => self.send_update(&found, Some(reference)).await,
            Err(reason) => self.send_json(&error(&reason, task.as_deref(), reference)).await,
        }
    }

    /// Performs the client's request, and returns the task that it is about.
    async fn perform(&mut self, request: Request) -> Result<TaskSnapshot, String> {
        let id = match request {
            Request::Create { data, title, id } => {
                self.check_room()?;
                self.gateway.create(data, title, id).await?
            }
            Request::Decide { task, plan, approve, comment } => {
                self.gateway.decide(&task, &plan, approve, comment).await?;
                task
            }
            Request::Follow { task } => task,
        };
        if !self.sent.contains_key(&id) {
            self.check_room()?;
        }
        self.subscription.follow(&id);
        self.gateway.read(&id).await
    }

    fn check_room(&self) -> Result<(), String> {
        match self.sent.len() < MAX_FOLLOWED {
            true => Ok(()),
            false => Err(format!("a connection follows at most {MAX_FOLLOWED} tasks; open another connection")),
        }
    }

    /// Sends the current state of a task, unless the client already has it. The answer to a request is always sent.
    async fn send_update(&mut self, task: &TaskSnapshot, answer: Option<Option<&str>>) -> Result<(), Closed> {
        let update = about(task, None);
        if answer.is_none() && self.sent.get(&task.id) == Some(&update) {
            return Ok(());
        }
        let message = about(task, answer.flatten());
        if task.has_ended() {
            self.subscription.unfollow(&task.id);
            let was_followed = self.sent.remove(&task.id).is_some();
            // The update was queued before this connection stopped following the task.
            if !was_followed && answer.is_none() {
                return Ok(());
            }
        } else {
            self.sent.insert(task.id.clone(), update);
        }
        self.send_json(&message).await
    }
}

impl Gateway {
    async fn read(&self, id: &str) -> Result<TaskSnapshot, String> {
        let found = task(&self.feed.client, id).await.map_err(|outage| outage.to_string())?;
        found.filter(|task| task.machine == self.machine).ok_or_else(|| format!("no task {id}"))
    }

    async fn create(&self, data: Value, title: Option<String>, message: Option<String>) -> Result<String, String> {
        let mut body = json!({"machine": self.machine, "data": data});
        if let Some(title) = title {
            body["title"] = json!(title);
        }
        if let Some(message) = message {
            body["idempotencyKey"] = json!(format!("gateway {message}"));
        }
        let request = self.feed.client.request(Method::POST, "/api/v1/tasks").json(&body);
        let created: TaskSnapshot = request.send().await.map_err(|error| error.with_causes())?;
        tracing::info!(task = created.id, "task created");
        Ok(created.id)
    }

    /// Approves or rejects exactly the plan that the client names.
    async fn decide(&self, id: &str, plan: &str, approve: bool, comment: Option<String>) -> Result<(), String> {
        let task = self.read(id).await?;
        let approval =
            task.approval.ok_or_else(|| format!("the task is not waiting for a decision; it is {}", task.state))?;
        if approval.subject["planId"] != *plan {
            return Err(format!("plan \"{plan}\" is not the plan of the task; read the task again"));
        }
        let mut body = json!({"hash": approval.hash});
        if let Some(comment) = comment {
            body["comment"] = json!(comment);
        }
        let path = format!("/api/v1/tasks/{id}/{}", if approve { "approve" } else { "reject" });
        let request = self.feed.client.request(Method::POST, &path).json(&body);
        request.send::<Value>().await.map(|_| ()).map_err(|error| error.with_causes())
    }
}
