//! Sends commands to Redis, many per round trip, over one connection that is reopened with backoff after a failure.

use std::{
    sync::atomic::{AtomicU64, Ordering},
    time::{Duration, Instant},
};

use parking_lot::Mutex;
use redis::{Cmd, ErrorKind, Pipeline, RedisError, ServerErrorKind, Value};

use crate::{
    QueueError, RedisAddress,
    connection::{Connection, connect},
    scripts::LuaScript,
};

const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(5);

pub struct Client {
    address: RedisAddress,
    prefix: String,
    timeout: Duration,
    state: tokio::sync::Mutex<State>,
    /// Counts connections, so that a new one is recognised.
    connections: AtomicU64,
    outage: Mutex<Option<String>>,
    /// Called with the duration of each round trip.
    round_trip: Box<dyn Fn(Duration) + Send + Sync>,
}

#[derive(Default)]
struct State {
    connection: Option<Connection>,
    /// When to connect again after a failure, and the length of the pause until then.
    retry: Option<(Instant, Duration)>,
}

/// A command, or a script with its keys and arguments.
pub enum Command {
    Plain(Cmd),
    Script { script: &'static LuaScript, keys: Vec<String>, arguments: Vec<String> },
}

impl Command {
    fn encode(&self, has_script: bool) -> Cmd {
        match self {
            Command::Plain(command) => command.clone(),
            Command::Script { script, keys, arguments } => {
                let mut command = redis::cmd(if has_script { "EVALSHA" } else { "EVAL" });
                command.arg(if has_script { script.hash.as_str() } else { script.code });
                command.arg(keys.len()).arg(keys).arg(arguments);
                command
            }
        }
    }
}

impl Client {
    pub fn new(
        address: RedisAddress,
        prefix: String,
        timeout: Duration,
        round_trip: Box<dyn Fn(Duration) + Send + Sync>,
    ) -> Client {
        Client {
            address,
            prefix,
            timeout,
            state: tokio::sync::Mutex::default(),
            connections: AtomicU64::new(0),
            outage: Mutex::default(),
            round_trip,
        }
    }

    pub fn address(&self) -> &RedisAddress {
        &self.address
    }

    /// Returns the number of connections so far. It grows after each reconnection.
    pub fn connections(&self) -> u64 {
        self.connections.load(Ordering::Acquire)
    }

    /// Returns why there is no connection now, if there is none.
    pub fn outage(&self) -> Option<String> {
        self.outage.lock().clone()
    }

    /// Returns the connection, and opens it if there is none. Fails immediately during the pause after a failed
    /// attempt.
    pub async fn connection(&self) -> Result<Connection, QueueError> {
        let mut state = self.state.lock().await;
        if let Some(connection) = &state.connection {
            return Ok(connection.clone());
        }
        if let Some((at, _)) = state.retry
            && Instant::now() < at
        {
            return Err(self.unavailable(self.outage().unwrap_or_default()));
        }
        match connect(&self.address, &self.prefix, self.timeout).await {
            Ok(connection) => {
                *state = State { connection: Some(connection.clone()), retry: None };
                self.connections.fetch_add(1, Ordering::AcqRel);
                if self.outage.lock().take().is_some() {
                    tracing::info!(address = %self.address, "reconnected to Redis");
                }
                Ok(connection)
            }
            Err(cause) => {
                let pause = state.retry.map_or(FIRST_PAUSE, |(_, pause)| (pause * 2).min(LONGEST_PAUSE));
                state.retry = Some((Instant::now() + pause, pause));
                Err(self.record_outage(cause))
            }
        }
    }

    /// Closes the connection, so that the next command opens another.
    pub async fn disconnect(&self) {
        self.state.lock().await.connection = None;
    }

    /// Runs the commands in order, in one round trip. Scripts that the server does not know yet are sent again in a second one.
    pub async fn run(&self, connection: &mut Connection, commands: &[Command]) -> Result<Vec<Value>, QueueError> {
        let began = Instant::now();
        let mut answers = self.send(connection, commands.iter().map(|command| command.encode(true))).await?;
        (self.round_trip)(began.elapsed());
        let unknown: Vec<usize> = answers
            .iter()
            .enumerate()
            .filter(|(_, answer)| matches!(answer, Err(error) if is_unknown_script(error)))
            .map(|(at, _)| at)
            .collect();
        if !unknown.is_empty() {
            let again = unknown.iter().map(|at| commands[*at].encode(false));
            for (at, answer) in unknown.iter().zip(self.send(connection, again).await?) {
                answers[*at] = answer;
            }
        }
        let mut values = Vec::with_capacity(answers.len());
        for answer in answers {
            match answer {
                Ok(value) => values.push(value),
                Err(error) => return Err(self.handle_error(&error).await),
            }
        }
        Ok(values)
    }

    async fn send(
        &self,
        connection: &mut Connection,
        commands: impl Iterator<Item = Cmd>,
    ) -> Result<Vec<Result<Value, RedisError>>, QueueError> {
        let mut pipeline = Pipeline::new();
        for command in commands {
            pipeline.add_command(command);
        }
        pipeline.ignore_errors();
        match pipeline.query_async(&mut connection.redis).await {
            Ok(answers) => Ok(answers),
            Err(error) => Err(self.handle_error(&error).await),
        }
    }

    /// Converts an error of Redis, and closes a connection that has become unusable.
    async fn handle_error(&self, error: &RedisError) -> QueueError {
        let cause = self.address.redact(&error.to_string());
        if error.code() == Some("NOTFILLED") || cause.contains("NOTFILLED") {
            return QueueError::NotFilled;
        }
        if error.code() == Some("WRONGTYPE") || cause.contains("WRONGTYPE") {
            return QueueError::ForeignKey { prefix: self.prefix.clone(), cause };
        }
        if needs_new_connection(error) {
            let mut state = self.state.lock().await;
            state.connection = None;
            state.retry.get_or_insert((Instant::now(), FIRST_PAUSE));
            return self.record_outage(cause);
        }
        QueueError::Rejected { address: self.address.to_string(), cause }
    }

    fn record_outage(&self, cause: String) -> QueueError {
        let before = self.outage.lock().replace(cause.clone());
        if before.is_none() {
            tracing::warn!(address = %self.address, error = cause, "Redis is not available, reconnecting");
        }
        self.unavailable(cause)
    }

    fn unavailable(&self, cause: String) -> QueueError {
        QueueError::Unavailable { address: self.address.to_string(), cause }
    }
}

fn is_unknown_script(error: &RedisError) -> bool {
    error.kind() == ErrorKind::Server(ServerErrorKind::NoScript)
}

/// Returns whether a new connection may help: this one is broken, or this server no longer has the keys or does not
/// accept writes.
fn needs_new_connection(error: &RedisError) -> bool {
    let server = match error.kind() {
        ErrorKind::Server(kind) => kind,
        ErrorKind::Extension => {
            // Out of memory, a failing disk, too few replicas: the same server may recover, another may be master by now.
            return matches!(
                error.code(),
                Some("OOM" | "MISCONF" | "NOREPLICAS" | "NOAUTH" | "WRONGPASS" | "UNBLOCKED" | "BUSY")
            );
        }
        ErrorKind::UnexpectedReturnType | ErrorKind::InvalidClientConfig => return false,
        _ => return true,
    };
    match server {
        // Before Redis 7, the reason why a script failed is only in the text.
        ServerErrorKind::ResponseError => {
            ["READONLY", "OOM command", "MISCONF"].iter().any(|code| error.to_string().contains(code))
        }
        ServerErrorKind::NoPerm | ServerErrorKind::CrossSlot => false,
        _ => true,
    }
}
