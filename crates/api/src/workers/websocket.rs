//! `GET /api/v1/workers/connect`: a worker on a WebSocket (SPEC 4.1).

use std::time::Duration;

use axum::{
    extract::{
        State, WebSocketUpgrade,
        ws::{CloseFrame, Message, Utf8Bytes, WebSocket, rejection::WebSocketUpgradeRejection},
    },
    response::{IntoResponse, Response},
};
use faena_domain::{ErrorCode, Timestamp};
use faena_engine::workers::{Connection, Order, Refusal, Registration, ReportKind, Transport};
use faena_wire::frames::WorkerFrame;
use futures_util::{SinkExt, StreamExt};

use super::{
    encode, report,
    session::{self, Ending, INTRODUCTION, Line, Next, READING, SERVER_STOPS, Said},
};
use crate::{Api, ApiError};

/// How long a connection that we have closed is listened to.
const FAREWELL: Duration = Duration::from_millis(500);
/// Larger frames are refused one by one; beyond this the connection ends.
const HARD_LIMIT: usize = 16 << 20;

const GOING_AWAY: u16 = 1001;
const POLICY: u16 = 1008;
const RESTART: u16 = 1012;

pub async fn connect(State(api): State<Api>, upgrade: Result<WebSocketUpgrade, WebSocketUpgradeRejection>) -> Response {
    match upgrade {
        Ok(upgrade) => upgrade
            .max_message_size(HARD_LIMIT)
            .max_frame_size(HARD_LIMIT)
            .read_buffer_size(4 << 10)
            .write_buffer_size(32 << 10)
            .max_write_buffer_size(64 << 20)
            .on_upgrade(move |socket| serve(api, socket)),
        Err(_) => ApiError::invalid_field("Upgrade", "this is a WebSocket; connect to it as one").into_response(),
    }
}

async fn serve(api: Api, mut socket: WebSocket) {
    if let Some(connection) = introduce(&api, &mut socket).await {
        let line = Frames { socket, limit: api.parser().limits.max_body_bytes };
        session::serve(api, connection.worker, line).await;
    }
}

/// A reason for closing has room for 123 bytes.
fn cut(reason: &str) -> String {
    reason.chars().take(100).filter(char::is_ascii).collect()
}

/// The first thing a worker says is who it is.
async fn introduce(api: &Api, socket: &mut WebSocket) -> Option<Connection> {
    let deadline = tokio::time::Instant::now() + INTRODUCTION;
    let mut tries = 0;
    loop {
        let message = match tokio::time::timeout_at(deadline, socket.next()).await {
            Ok(Some(Ok(message))) => message,
            Ok(_) => return None,
            Err(_) => {
                close(socket, POLICY, "no register frame came").await;
                return None;
            }
        };
        let said = match read(&message, api.parser().limits.max_body_bytes) {
            Some(Ok(Said::Register(registration))) => Ok(registration),
            Some(Ok(_)) => Err(Refusal::new(ErrorCode::ValidationError, "the first frame must be register")),
            Some(Err(refusal)) => Err(refusal),
            None => continue,
        };
        let answer = match said {
            Ok(registration) => {
                let admitted = api.engine.worker_connect(registration, Transport::WebSocket, Timestamp::now()).await;
                match admitted {
                    Ok(connection) => {
                        if send(socket, [registered(api, &connection)]).await {
                            return Some(connection);
                        }
                        api.engine.worker_gone(&connection.worker, false, Timestamp::now()).await;
                        return None;
                    }
                    Err(error) => {
                        let error = ApiError::from(error);
                        Refusal::new(error.code, error.message)
                    }
                }
            }
            Err(refusal) => refusal,
        };
        tries += 1;
        if tries > 20 {
            close(socket, POLICY, "too many frames that are no register frame").await;
            return None;
        }
        if !send(socket, [error_frame(&answer)]).await {
            return None;
        }
    }
}

fn registered(api: &Api, connection: &Connection) -> String {
    let id = serde_json::to_string(&connection.worker.key).expect("a string is JSON");
    let beat = api.engine.config.worker_heartbeat.as_millis();
    let resumed = connection.resumed;
    format!("{{\"type\":\"registered\",\"workerId\":{id},\"heartbeatIntervalMs\":{beat},\"resumed\":{resumed}}}")
}

fn error_frame(refusal: &Refusal) -> String {
    format!("{{\"type\":\"error\",\"error\":{}}}", encode::error(refusal))
}

async fn send(socket: &mut WebSocket, frames: impl IntoIterator<Item = String>) -> bool {
    let sending = async {
        for frame in frames {
            socket.feed(Message::Text(frame.into())).await?;
        }
        socket.flush().await
    };
    matches!(tokio::time::timeout(READING, sending).await, Ok(Ok(())))
}

async fn close(socket: &mut WebSocket, code: u16, reason: &str) {
    let frame = CloseFrame { code, reason: Utf8Bytes::from(cut(reason)) };
    let _ = tokio::time::timeout(Duration::from_secs(2), socket.send(Message::Close(Some(frame)))).await;
}

struct Frames {
    socket: WebSocket,
    /// The largest frame that is read.
    limit: usize,
}

impl Line for Frames {
    async fn next(&mut self) -> Next {
        match self.socket.next().await {
            None | Some(Err(_)) | Some(Ok(Message::Close(_))) => Next::Over,
            Some(Ok(message)) => match read(&message, self.limit) {
                None => Next::Alive,
                Some(Ok(said)) => Next::Said(said),
                Some(Err(refusal)) => Next::Refused(refusal),
            },
        }
    }

    async fn tell(&mut self, orders: Vec<Order>) -> bool {
        send(&mut self.socket, orders.iter().map(order_frame)).await
    }

    async fn refuse(&mut self, refusals: Vec<Refusal>) -> bool {
        send(&mut self.socket, refusals.iter().map(error_frame)).await
    }

    async fn beat(&mut self) -> bool {
        // A library answers a ping by itself, also for a worker that does not know heartbeats.
        let _ = self.socket.feed(Message::Ping(Default::default())).await;
        send(&mut self.socket, ["{\"type\":\"heartbeat\"}".to_owned()]).await
    }

    async fn close(mut self, ending: Ending) {
        let code = match &ending {
            Ending::Goodbye => GOING_AWAY,
            Ending::Closed(reason) if reason == SERVER_STOPS => RESTART,
            Ending::Closed(_) | Ending::Deaf | Ending::Flood => POLICY,
        };
        close(&mut self.socket, code, ending.reason()).await;
        // What is still on its way here is taken in: a socket closed over it would be reset, and the reason lost.
        let rest = async { while let Some(Ok(_)) = self.socket.next().await {} };
        let _ = tokio::time::timeout(FAREWELL, rest).await;
    }
}

fn order_frame(order: &Order) -> String {
    match order {
        Order::Job(delivery) => {
            let mut frame = String::from("{\"type\":\"job\",\"job\":");
            encode::job(&mut frame, delivery);
            frame.push('}');
            frame
        }
        Order::Ack(ack) => encode::ack(ack),
        Order::Cancel { job_id, run, reason } => {
            let reason = serde_json::to_string(reason).expect("a string is JSON");
            format!("{{\"type\":\"cancel\",\"jobId\":\"{job_id}\",\"run\":{run},\"reason\":{reason}}}")
        }
        Order::Drain => "{\"type\":\"drain\"}".into(),
        Order::Resume => "{\"type\":\"resume\"}".into(),
    }
}

/// What a message says; `None`: nothing that needs an answer.
fn read(message: &Message, limit: usize) -> Option<Result<Said, Refusal>> {
    match message {
        Message::Text(text) if text.len() > limit => {
            Some(Err(Refusal::new(ErrorCode::PayloadTooLarge, format!("the frame is larger than {limit} bytes"))))
        }
        Message::Text(text) => Some(parse(text)),
        Message::Binary(_) => Some(Err(Refusal::new(ErrorCode::ValidationError, "frames are JSON text, not binary"))),
        Message::Ping(_) | Message::Pong(_) | Message::Close(_) => None,
    }
}

fn parse(text: &str) -> Result<Said, Refusal> {
    let frame: WorkerFrame = serde_json::from_str(text).map_err(|error| {
        let said = error.to_string();
        let what = if said.contains("struct WorkerFrame") {
            "it must be a JSON object"
        } else {
            said.split(", expected one of").next().unwrap_or("not understood")
        };
        Refusal::new(ErrorCode::ValidationError, format!("the frame is not understood: {what}"))
    })?;
    let (job_id, run) = (frame.job_id, frame.run);
    let raw = |value: Option<&serde_json::value::RawValue>| value.map(|raw| raw.get().to_owned());
    let kind = match &*frame.kind {
        "heartbeat" => return Ok(Said::Heartbeat),
        "drain" => return Ok(Said::Drain),
        "leave" => return Ok(Said::Leave),
        "register" => {
            return Ok(Said::Register(Registration {
                worker_id: frame.worker_id.map(Into::into),
                name: frame.name.map(Into::into),
                capabilities: frame.capabilities.unwrap_or_default(),
                queues: frame.queues.unwrap_or_default(),
                concurrency: frame.concurrency,
                tells_starts: frame.tells_starts.unwrap_or(false),
                holds: frame.holds.map(|holds| holds.into_iter().map(|held| (held.job_id, held.run)).collect()),
            }));
        }
        "started" => ReportKind::Started,
        "progress" => report::progress(frame.progress)?,
        "log" => report::log(frame.message.map(Into::into))?,
        "step" => report::step(frame.name.map(Into::into), raw(frame.result).as_deref(), frame.total_steps)?,
        "complete" => report::complete(frame.result.map(|raw| raw.get()))?,
        "fail" => {
            report::fail(report::error_text(frame.error.map(|raw| raw.get())), frame.retryable, frame.retry_after_ms)
        }
        "release" => ReportKind::Release,
        other => {
            let known = "register, heartbeat, started, progress, log, step, complete, fail, release, drain and leave";
            let other: String = other.chars().take(50).collect();
            return Err(Refusal::new(
                ErrorCode::ValidationError,
                format!("type {other:?} is not known; there are {known}"),
            ));
        }
    };
    report::about(job_id, run, kind).map(Said::Report)
}

#[cfg(test)]
mod tests {
    use faena_engine::workers::Report;
    use proptest::prelude::*;

    use super::*;

    fn code(text: &str) -> Option<ErrorCode> {
        parse(text).err().map(|refusal| refusal.code)
    }

    #[test]
    fn what_is_no_frame_is_refused_and_says_why() {
        for text in ["", "nonsense", "[]", "7", "{}", "{\"type\":7}", "{\"type\":\"dance\"}", "{\"type\":\"complete\"}"]
        {
            assert_eq!(code(text), Some(ErrorCode::ValidationError), "{text}");
        }
        let unknown = parse(r#"{"type":"complete","jobId":"01a1e1b6-d8d7-7007-820a-3ff640398a18","resul":1}"#);
        let message = unknown.err().expect("refused").message;
        assert!(message.contains("resul") && !message.contains("expected one of"), "{message}");
    }

    #[test]
    fn a_client_that_knows_only_the_oldest_words_is_understood() {
        assert!(matches!(parse(r#"{"type":"register","workerId":"w","capabilities":["a"]}"#), Ok(Said::Register(_))));
        assert!(matches!(parse(r#"{"type":"heartbeat"}"#), Ok(Said::Heartbeat)));
        let id = "01a1e1b6-d8d7-7007-820a-3ff640398a18";
        let done = format!(r#"{{"type":"complete","jobId":"{id}","result":{{"a":1}}}}"#);
        assert!(matches!(parse(&done), Ok(Said::Report(Report { run: None, .. }))));
        let failed = format!(r#"{{"type":"fail","jobId":"{id}","error":"broken"}}"#);
        let Ok(Said::Report(Report { kind: ReportKind::Fail(failure), .. })) = parse(&failed) else { panic!() };
        assert_eq!((failure.message.as_str(), failure.retryable), ("broken", true));
    }

    fn json() -> impl Strategy<Value = serde_json::Value> {
        let leaf = prop_oneof![
            Just(serde_json::Value::Null),
            any::<bool>().prop_map(Into::into),
            any::<i64>().prop_map(Into::into),
            any::<f64>().prop_map(Into::into),
            ".*".prop_map(serde_json::Value::from),
        ];
        leaf.prop_recursive(4, 32, 6, |inner| {
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..6).prop_map(Into::into),
                prop::collection::btree_map(".*", inner, 0..6)
                    .prop_map(|map| serde_json::Value::Object(map.into_iter().collect())),
            ]
        })
    }

    const TYPES: &[&str] = &[
        "register",
        "heartbeat",
        "started",
        "progress",
        "log",
        "step",
        "complete",
        "fail",
        "release",
        "drain",
        "leave",
        "x",
    ];
    const FIELDS: &[&str] = &[
        "workerId",
        "name",
        "capabilities",
        "queues",
        "concurrency",
        "token",
        "tellsStarts",
        "holds",
        "jobId",
        "run",
        "progress",
        "message",
        "result",
        "totalSteps",
        "error",
        "retryable",
        "retryAfterMs",
        "other",
    ];

    proptest! {
        #[test]
        fn no_text_whatever_is_more_than_refused(text in ".*") {
            let _ = code(&text);
        }

        #[test]
        fn no_frame_whatever_is_more_than_refused(
            kind in prop::sample::select(TYPES),
            fields in prop::collection::btree_map(prop::sample::select(FIELDS), json(), 0..8),
            cut in any::<prop::sample::Index>(),
        ) {
            let mut frame: serde_json::Map<String, serde_json::Value> =
                fields.into_iter().map(|(name, value)| (name.to_owned(), value)).collect();
            frame.insert("type".into(), kind.into());
            let text = serde_json::Value::from(frame).to_string();
            if let Err(refusal) = parse(&text) {
                prop_assert_eq!(refusal.code, ErrorCode::ValidationError);
            }
            // And cut off anywhere.
            let end = (0..=cut.index(text.len())).rev().find(|at| text.is_char_boundary(*at)).unwrap_or(0);
            if end < text.len() {
                prop_assert!(parse(&text[..end]).is_err());
            }
        }
    }
}
