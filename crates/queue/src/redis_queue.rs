//! The operations of the queue, and which method of the task scheduler service each of them replaces.
//!
//! | task scheduler service | here |
//! |---|---|
//! | `enqueue`, `requeue` without a delay, `promoteDelayedJobs` | [`Move::Put`] |
//! | `enqueueDelayed`, `requeue` | [`Move::Delay`] |
//! | `dequeue` | [`RedisQueue::take`] |
//! | `markProcessing` | [`RedisQueue::take`], then [`Move::Grant`] with the run number of the database |
//! | `markCompleted`, `moveToDLQ` | [`Move::Finish`] |
//! | `getStats` | [`RedisQueue::stats`] |

use std::{collections::HashMap, time::Duration};

use redis::{FromRedisValue, Value};
use uuid::Uuid;

use crate::{
    QueueError, RedisAddress,
    client::{Client, Command},
    connection::Connection,
    keys::Keys,
    scripts::{self, LuaScript},
};

/// Version of the keys and of their content.
pub const FORMAT: u32 = 1;

/// Maximum number of jobs in one script call: a script blocks the whole Redis server.
const JOBS_PER_CALL: usize = 500;

pub struct RedisQueueOptions {
    pub address: RedisAddress,
    pub prefix: String,
    /// Time limit for one round trip.
    pub timeout: Duration,
    /// Called with the duration of each round trip.
    pub round_trip: Box<dyn Fn(Duration) + Send + Sync>,
}

pub struct RedisQueue {
    pub(crate) client: Client,
}

/// A ready or delayed job in the queue. The score of a ready job is its ready time plus the offset of its priority; the
/// score of a delayed job is its due time.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ReadyEntry {
    pub id: Uuid,
    pub lane: i32,
    pub score: i64,
}

/// Request of one owner for ready jobs.
#[derive(Clone, Debug)]
pub struct TakeRequest {
    pub owner: Uuid,
    pub limit: usize,
    /// Rotates which queue is served first: callers add one with each request.
    pub first_queue: usize,
    pub lanes: Vec<LaneTake>,
}

/// A lane to take jobs from.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LaneTake {
    pub lane: i32,
    /// Lanes with the same number belong to one queue.
    pub queue: usize,
    /// Offset added to the scores of the lane, if its queue does not claim jobs in the order of their scores.
    pub bias: i64,
}

pub type TakenJob = ReadyEntry;

/// A change of the queue that follows one in the database.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Move {
    /// A job is ready.
    Put(ReadyEntry),
    /// A job waits for a time.
    Delay(ReadyEntry),
    /// The database has granted a run.
    Grant(GrantedJob),
    /// A run has ended.
    Finish(FinishedJob),
    /// A job is neither ready nor in flight.
    Remove { id: Uuid, lane: i32 },
}

/// Whether a new entry replaces the entry of a job in flight.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Placement {
    /// The job is moved from wherever it is.
    Now,
    /// The entry is restored from the database; a job that is in flight by now stays so.
    Fill,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct GrantedJob {
    pub id: Uuid,
    pub lane: i32,
    pub owner: Uuid,
    pub run: i64,
    /// Whether it was taken from Redis, so that its entries have moved already.
    pub was_taken: bool,
    /// Time until which the entry is valid without asking the database.
    pub lease_until_ms: i64,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FinishedJob {
    pub id: Uuid,
    pub run: i64,
    pub result: RunResult,
    pub at_ms: i64,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RunResult {
    Completed,
    /// It will not run again: a dead letter.
    Failed,
    Other,
}

impl RunResult {
    fn as_str(self) -> &'static str {
        match self {
            RunResult::Completed => "completed",
            RunResult::Failed => "failed",
            RunResult::Other => "other",
        }
    }
}

/// A sorted set of the queue.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum QueueSet {
    Priority,
    Delayed,
    DeadLetters,
    Lane(i32),
}

impl QueueSet {
    fn key(self, keys: &Keys) -> String {
        match self {
            QueueSet::Priority => keys.priority(),
            QueueSet::Delayed => keys.delayed(),
            QueueSet::DeadLetters => keys.dead_letters(),
            QueueSet::Lane(lane) => keys.lane(lane),
        }
    }
}

/// Number of entries in each set of the queue.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct QueueStats {
    pub priority: u64,
    pub delayed: u64,
    pub processing: u64,
    pub dead_letters: u64,
    pub lanes: HashMap<i32, u64>,
}

/// Result of [`RedisQueue::prepare`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PrepareResult {
    /// Format of the data that was there.
    pub found: Option<u32>,
    /// Whether keys had values of another type, which were deleted.
    pub had_foreign_keys: bool,
    /// Whether the queue is empty now and must be filled.
    pub must_fill: bool,
}

/// A worker as the registry shows it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct WorkerEntry {
    pub id: String,
    /// JSON with `lastHeartbeat`, `capabilities` and `currentJob`.
    pub description: String,
}

impl RedisQueue {
    pub fn new(options: RedisQueueOptions) -> RedisQueue {
        let RedisQueueOptions { address, prefix, timeout, round_trip } = options;
        RedisQueue { client: Client::new(address, prefix, timeout, round_trip) }
    }

    pub fn address(&self) -> &RedisAddress {
        self.client.address()
    }

    /// Returns the number of connections so far. After it has grown, Redis may have lost entries.
    pub fn connections(&self) -> u64 {
        self.client.connections()
    }

    /// Returns why there is no connection now, if there is none.
    pub fn outage(&self) -> Option<String> {
        self.client.outage()
    }

    /// Closes the connection. The next operation opens another.
    pub async fn disconnect(&self) {
        self.client.disconnect().await;
    }

    /// Checks that Redis answers.
    pub async fn ping(&self) -> Result<(), QueueError> {
        let mut connection = self.client.connection().await?;
        self.client.run(&mut connection, &[Command::Plain(redis::cmd("PING"))]).await.map(drop)
    }

    /// Prepares the keys: data of an older format and values of another type are deleted.
    pub async fn prepare(&self, lanes: &[i32], now_ms: i64) -> Result<PrepareResult, QueueError> {
        let mut connection = self.client.connection().await?;
        let arguments = vec![FORMAT.to_string(), now_ms.to_string()];
        let command = script(&scripts::PREPARE, &connection, lanes, arguments);
        let answers = self.client.run(&mut connection, &[command]).await?;
        let (found, must_fill): (i64, i64) = read(answers.into_iter().next())?;
        let format = u32::try_from(found).ok().filter(|format| *format > 0);
        match format {
            Some(found) if found > FORMAT => Err(QueueError::NewerFormat { found, known: FORMAT }),
            found_format => {
                Ok(PrepareResult { found: found_format, had_foreign_keys: found < 0, must_fill: must_fill == 1 })
            }
        }
    }

    /// Takes ready jobs for each request, one request after the other, in one round trip. The jobs are recorded as in flight until
    /// `lease_until_ms`, without a run number.
    pub async fn take(&self, requests: &[TakeRequest], lease_until_ms: i64) -> Result<Vec<Vec<TakenJob>>, QueueError> {
        let mut connection = self.client.connection().await?;
        let mut commands = Vec::with_capacity(requests.len());
        for request in requests {
            let lanes: Vec<i32> = request.lanes.iter().map(|lane| lane.lane).collect();
            let mut arguments = vec![
                FORMAT.to_string(),
                request.owner.to_string(),
                lease_until_ms.to_string(),
                request.limit.to_string(),
                request.first_queue.to_string(),
            ];
            arguments.extend(request.lanes.iter().flat_map(|lane| [lane.queue.to_string(), lane.bias.to_string()]));
            commands.push(script(&scripts::TAKE, &connection, &lanes, arguments));
        }
        let answers = self.client.run(&mut connection, &commands).await?;
        requests.iter().zip(answers).map(|(request, answer)| taken(request, answer)).collect()
    }

    /// Applies the moves in order, many in one round trip. Returns how many entries were new.
    pub async fn apply(&self, moves: &[Move], placement: Placement) -> Result<u64, QueueError> {
        if moves.is_empty() {
            return Ok(0);
        }
        let mut connection = self.client.connection().await?;
        let mut commands = Vec::new();
        for group in moves.chunk_by(|one, other| group_key(one) == group_key(other)) {
            for part in group.chunks(JOBS_PER_CALL) {
                commands.push(command(&connection, part, placement));
            }
        }
        let answers = self.client.run(&mut connection, &commands).await?;
        let mut new = 0;
        for (command, answer) in commands.iter().zip(answers) {
            if let Command::Script { script, .. } = command
                && (script.hash == scripts::PUT.hash || script.hash == scripts::DELAY.hash)
            {
                new += read::<u64>(Some(answer))?;
            }
        }
        Ok(new)
    }

    /// Counts the entries, all at one moment.
    pub async fn stats(&self, lanes: &[i32]) -> Result<QueueStats, QueueError> {
        let mut connection = self.client.connection().await?;
        let command = script(&scripts::STATS, &connection, lanes, vec![FORMAT.to_string()]);
        let answers = self.client.run(&mut connection, &[command]).await?;
        let counts: Vec<u64> = read(answers.into_iter().next())?;
        let [priority, delayed, processing, dead_letters, in_lanes @ ..] = counts.as_slice() else {
            return Ok(QueueStats::default());
        };
        Ok(QueueStats {
            priority: *priority,
            delayed: *delayed,
            processing: *processing,
            dead_letters: *dead_letters,
            lanes: lanes.iter().copied().zip(in_lanes.iter().copied()).collect(),
        })
    }

    /// Returns up to `count` members of a set with their scores, in order, starting at the position `from`. Foreign
    /// clients may have added any text.
    pub async fn page(&self, set: QueueSet, from: usize, count: usize) -> Result<Vec<(String, i64)>, QueueError> {
        let mut connection = self.client.connection().await?;
        let mut command = redis::cmd("ZRANGE");
        command.arg(set.key(&connection.keys)).arg(from).arg(from + count.max(1) - 1).arg("WITHSCORES");
        let answers = self.client.run(&mut connection, &[Command::Plain(command)]).await?;
        let flat: Vec<String> = read(answers.into_iter().next())?;
        Ok(flat.chunks_exact(2).map(|pair| (pair[0].clone(), score(&pair[1]))).collect())
    }

    /// Removes members from one set.
    pub async fn remove_members(&self, set: QueueSet, members: &[String]) -> Result<(), QueueError> {
        if members.is_empty() {
            return Ok(());
        }
        let mut connection = self.client.connection().await?;
        let mut command = redis::cmd("ZREM");
        command.arg(set.key(&connection.keys)).arg(members);
        self.client.run(&mut connection, &[Command::Plain(command)]).await.map(drop)
    }

    /// Adds failed jobs with the times of their failures to the dead letters.
    pub async fn add_dead_letters(&self, jobs: &[(Uuid, i64)]) -> Result<u64, QueueError> {
        if jobs.is_empty() {
            return Ok(0);
        }
        let mut connection = self.client.connection().await?;
        let mut command = redis::cmd("ZADD");
        command.arg(connection.keys.dead_letters());
        for (id, at) in jobs {
            command.arg(at).arg(id.to_string());
        }
        read(self.client.run(&mut connection, &[Command::Plain(command)]).await?.into_iter().next())
    }

    /// Returns jobs in flight whose lease has ended: their entries must be compared with the database.
    pub async fn expired(&self, now_ms: i64, limit: usize) -> Result<Vec<String>, QueueError> {
        let mut connection = self.client.connection().await?;
        let mut command = redis::cmd("ZRANGEBYSCORE");
        command.arg(connection.keys.leases()).arg("-inf").arg(now_ms).arg("LIMIT").arg(0).arg(limit);
        read(self.client.run(&mut connection, &[Command::Plain(command)]).await?.into_iter().next())
    }

    /// Extends the lease of the entries of jobs in flight.
    pub async fn renew(&self, jobs: &[Uuid], lease_until_ms: i64) -> Result<(), QueueError> {
        if jobs.is_empty() {
            return Ok(());
        }
        let mut connection = self.client.connection().await?;
        let mut command = redis::cmd("ZADD");
        command.arg(connection.keys.leases()).arg("XX");
        for id in jobs {
            command.arg(lease_until_ms).arg(id.to_string());
        }
        self.client.run(&mut connection, &[Command::Plain(command)]).await.map(drop)
    }

    /// Removes entries among the jobs in flight that are not job ids.
    pub async fn remove_processing(&self, members: &[String]) -> Result<(), QueueError> {
        if members.is_empty() {
            return Ok(());
        }
        let mut connection = self.client.connection().await?;
        let keys = &connection.keys;
        let with = |name: &str, key: String| Command::Plain(redis::cmd(name).arg(key).arg(members).clone());
        let commands = [with("HDEL", keys.processing()), with("ZREM", keys.leases()), with("HDEL", keys.runs())];
        self.client.run(&mut connection, &commands).await.map(drop)
    }

    /// Replaces the registry of workers.
    pub async fn set_workers(&self, workers: &[WorkerEntry]) -> Result<(), QueueError> {
        let mut connection = self.client.connection().await?;
        let arguments = workers.iter().flat_map(|worker| [worker.id.clone(), worker.description.clone()]).collect();
        let command = Command::Script { script: &scripts::WORKERS, keys: vec![connection.keys.workers()], arguments };
        self.client.run(&mut connection, &[command]).await.map(drop)
    }

    /// Tries to make this node the reconciler for `duration`. Returns `false` while another node is the reconciler.
    pub async fn become_reconciler(&self, node: Uuid, duration: Duration) -> Result<bool, QueueError> {
        let mut connection = self.client.connection().await?;
        let key = connection.keys.reconciler();
        let mut command = redis::cmd("SET");
        command.arg(&key).arg(node.to_string()).arg("NX").arg("PX").arg(duration.as_millis().max(1) as u64);
        let answers = self.client.run(&mut connection, &[Command::Plain(command), plain("GET", &key)]).await?;
        Ok(read::<Option<String>>(answers.into_iter().nth(1))?.as_deref() == Some(node.to_string().as_str()))
    }
}

pub(crate) fn plain(name: &str, key: &str) -> Command {
    Command::Plain(redis::cmd(name).arg(key).clone())
}

fn script(script: &'static LuaScript, connection: &Connection, lanes: &[i32], arguments: Vec<String>) -> Command {
    let mut keys = connection.keys.script_keys();
    keys.extend(lanes.iter().map(|lane| connection.keys.lane(*lane)));
    Command::Script { script, keys, arguments }
}

/// Returns the kind, lane and lease of a move. One script call applies moves for which they are equal.
fn group_key(queue_move: &Move) -> (u8, i32, i64) {
    match queue_move {
        Move::Put(entry) => (0, entry.lane, 0),
        Move::Delay(entry) => (1, entry.lane, 0),
        Move::Grant(job) => (if job.was_taken { 2 } else { 5 }, job.lane, job.lease_until_ms),
        Move::Finish(_) => (3, 0, 0),
        Move::Remove { lane, .. } => (4, *lane, 0),
    }
}

/// Returns the command for moves of one kind and lane.
fn command(connection: &Connection, moves: &[Move], placement: Placement) -> Command {
    let mode = if placement == Placement::Now { "now" } else { "fill" };
    let mut arguments = vec![FORMAT.to_string()];
    let (_, lane, lease_until_ms) = moves.first().map_or((0, 0, 0), group_key);
    match moves.first() {
        Some(Move::Put(_) | Move::Delay(_)) => arguments.push(mode.to_owned()),
        Some(Move::Grant(job)) => {
            arguments.push(lease_until_ms.to_string());
            arguments.push(if job.was_taken { "taken" } else { "chosen" }.to_owned());
        }
        _ => {}
    }
    for queue_move in moves {
        match queue_move {
            Move::Put(entry) | Move::Delay(entry) => arguments.extend([entry.score.to_string(), entry.id.to_string()]),
            Move::Grant(job) => arguments.extend([job.id.to_string(), job.owner.to_string(), job.run.to_string()]),
            Move::Finish(job) => arguments.extend([
                job.id.to_string(),
                job.run.to_string(),
                job.result.as_str().to_owned(),
                job.at_ms.to_string(),
            ]),
            Move::Remove { id, .. } => arguments.push(id.to_string()),
        }
    }
    let move_script: &'static LuaScript = match moves.first() {
        Some(Move::Put(_)) => &scripts::PUT,
        Some(Move::Delay(_)) => &scripts::DELAY,
        Some(Move::Grant(_)) => &scripts::GRANT,
        Some(Move::Remove { .. }) => &scripts::REMOVE,
        Some(Move::Finish(_)) | None => {
            let mut keys = connection.keys.script_keys();
            keys.extend([connection.keys.processed(), connection.keys.failed()]);
            return Command::Script { script: &scripts::FINISH, keys, arguments };
        }
    };
    script(move_script, connection, &[lane], arguments)
}

fn taken(request: &TakeRequest, answer: Value) -> Result<Vec<TakenJob>, QueueError> {
    let flat: Vec<String> = read(Some(answer))?;
    let jobs = flat.chunks_exact(3).filter_map(|job| {
        let lane = request.lanes.get(job[0].parse::<usize>().ok()?.checked_sub(1)?)?.lane;
        Some(TakenJob { id: job[1].parse().ok()?, lane, score: score(&job[2]) })
    });
    Ok(jobs.collect())
}

/// Parses a score. Scores are whole milliseconds, but a foreign client may have written anything.
fn score(text: &str) -> i64 {
    text.parse::<f64>().map_or(0, |score| score as i64)
}

pub(crate) fn read<T: FromRedisValue>(answer: Option<Value>) -> Result<T, QueueError> {
    let unexpected =
        |cause: String| QueueError::Rejected { address: String::new(), cause: format!("unexpected answer: {cause}") };
    redis::from_redis_value(answer.ok_or_else(|| unexpected("none".into()))?)
        .map_err(|error| unexpected(error.to_string()))
}
