//! `GET /api/v1/workers/connect`: serves a worker over a WebSocket, with JSON text frames.

use std::{borrow::Cow, collections::BTreeMap, time::Duration};

use axum::{
    Extension,
    extract::{
        State, WebSocketUpgrade,
        ws::{CloseFrame, Message, Utf8Bytes, WebSocket, rejection::WebSocketUpgradeRejection},
    },
    response::{IntoResponse, Response},
};
use faena_domain::{ErrorCode, Timestamp};
use faena_engine::{
    EngineError,
    workers::{CloseReason, Connection, Registration, Rejection, ReportKind, Transport, WorkerCommand},
};
use faena_wire::frames::WorkerFrame;
use futures_util::{SinkExt, StreamExt};
use serde_json::value::RawValue;

use super::{
    encode, report,
    session::{self, REGISTER_TIMEOUT, Received, SEND_TIMEOUT, WorkerMessage, WorkerStream},
};
use crate::{
    Api, ApiError, ReadMeter, access,
    context::{self, Caller},
    traffic::MAX_UNREGISTERED_BYTES,
};

/// Longest time to read remaining frames after the server has closed a connection.
const CLOSE_TIMEOUT: Duration = Duration::from_millis(500);
/// A larger frame ends the connection. A frame above the body limit and up to this size is only rejected.
const MAX_FRAME_BYTES: usize = 16 << 20;
/// Number of frames within which a worker must send a valid `register`.
const MAX_REGISTER_ATTEMPTS: usize = 20;

// Close codes of RFC 6455 and of the IANA registry for WebSocket.
const GOING_AWAY: u16 = 1001;
const POLICY_VIOLATION: u16 = 1008;
const MESSAGE_TOO_BIG: u16 = 1009;
const SERVICE_RESTART: u16 = 1012;
const TRY_AGAIN_LATER: u16 = 1013;

/// Upgrades the connection to a WebSocket and serves a worker on it.
///
/// The key may be in the request or in the `register` frame, because not every client can set headers.
///
/// Until the worker has registered, it may send small frames only.
pub async fn connect(
    State(api): State<Api>,
    meter: Option<Extension<ReadMeter>>,
    upgrade: Result<WebSocketUpgrade, WebSocketUpgradeRejection>,
) -> Response {
    let meter = meter.map_or_else(|| ReadMeter::new(api.traffic.budget()), |Extension(meter)| meter);
    if api.engine.workers.is_closed() {
        return ApiError::from(EngineError::Stopping).into_response();
    }
    let caller = context::caller();
    match upgrade {
        Ok(upgrade) => {
            meter.restrict(MAX_UNREGISTERED_BYTES);
            upgrade
                .max_message_size(MAX_FRAME_BYTES)
                .max_frame_size(MAX_FRAME_BYTES)
                .read_buffer_size(4 << 10)
                .write_buffer_size(32 << 10)
                .max_write_buffer_size(64 << 20)
                .on_upgrade(move |socket| serve(api, caller, socket, meter))
        }
        Err(_) => ApiError::invalid_field("Upgrade", "must be websocket").into_response(),
    }
}

async fn serve(api: Api, caller: Caller, mut socket: WebSocket, meter: ReadMeter) {
    if let Some(connection) = register(&api, &caller, &mut socket, &meter).await {
        let max_bytes = api.parser().limits.max_body_bytes;
        meter.count_next_message();
        session::serve(api, connection.worker, WebSocketStream { socket, max_bytes, meter }).await;
    }
}

/// Waits for a valid `register` frame. Answers other frames with an error, up to a limit.
async fn register(api: &Api, caller: &Caller, socket: &mut WebSocket, meter: &ReadMeter) -> Option<Connection> {
    let deadline = tokio::time::Instant::now() + REGISTER_TIMEOUT;
    for _ in 0..MAX_REGISTER_ATTEMPTS {
        let message = match tokio::time::timeout_at(deadline, next_message(api, socket, meter)).await {
            Ok(message) => message?,
            Err(_) => {
                close(socket, POLICY_VIOLATION, "no register frame arrived in time").await;
                return None;
            }
        };
        let registration = message.and_then(|message| match message {
            WorkerMessage::Register(registration, token) => {
                let authorized = access::authorize_registration(api, caller, registration, token.as_ref());
                authorized.map_err(|error| Rejection::new(error.code, error.message))
            }
            _ => Err(invalid("the first frame must be register")),
        });
        let rejection = match registration {
            Ok(registration) => match admit(api, socket, registration).await {
                Ok(connection) => return connection,
                Err(rejection) => rejection,
            },
            Err(rejection) => rejection,
        };
        if !send(socket, [error_frame(&rejection)]).await {
            return None;
        }
        // Another attempt on this connection would fail too: the worker has to connect again.
        let close_code = match rejection.code {
            ErrorCode::Unavailable => SERVICE_RESTART,
            ErrorCode::RateLimited => TRY_AGAIN_LATER,
            _ => continue,
        };
        close(socket, close_code, &rejection.message).await;
        return None;
    }
    close(socket, POLICY_VIOLATION, "too many frames before register").await;
    None
}

/// Returns the next message of a worker, or `None` if the connection is closed.
async fn next_message(
    api: &Api,
    socket: &mut WebSocket,
    meter: &ReadMeter,
) -> Option<Result<WorkerMessage, Rejection>> {
    loop {
        let Ok(message) = socket.next().await? else {
            if meter.is_exceeded() {
                let reason = format!("a frame before register must not be larger than {MAX_UNREGISTERED_BYTES} bytes");
                close(socket, MESSAGE_TOO_BIG, &reason).await;
            }
            return None;
        };
        meter.restrict(MAX_UNREGISTERED_BYTES);
        if let Some(message) = decode(&message, api.parser().limits.max_body_bytes) {
            return Some(message);
        }
    }
}

/// Registers the worker. Returns `None` if the answer cannot be sent because the worker has disconnected.
async fn admit(api: &Api, socket: &mut WebSocket, registration: Registration) -> Result<Option<Connection>, Rejection> {
    let connected = api.engine.register_worker(registration, Transport::WebSocket, Timestamp::now()).await;
    let connection = connected.map_err(|error| {
        let error = ApiError::from(error);
        Rejection::new(error.code, error.message)
    })?;
    if send(socket, [registered_frame(api, &connection)]).await {
        return Ok(Some(connection));
    }
    api.engine.disconnect_worker(&connection.worker, false, Timestamp::now()).await;
    Ok(None)
}

fn registered_frame(api: &Api, connection: &Connection) -> String {
    let id = serde_json::to_string(&connection.worker.key).expect("a string is JSON");
    let interval_ms = api.engine.config.worker_heartbeat.as_millis();
    let resumed = connection.resumed;
    let token = serde_json::to_string(&connection.session_token).expect("a string is JSON");
    format!(
        "{{\"type\":\"registered\",\"workerId\":{id},\"sessionToken\":{token},\"heartbeatIntervalMs\":{interval_ms},\
         \"resumed\":{resumed}}}"
    )
}

fn invalid(message: impl Into<String>) -> Rejection {
    Rejection::new(ErrorCode::ValidationError, message)
}

fn error_frame(rejection: &Rejection) -> String {
    format!("{{\"type\":\"error\",\"error\":{}}}", encode::error(rejection))
}

/// Sends frames. Returns `false` if the connection is closed or the worker does not read within `SEND_TIMEOUT`.
async fn send(socket: &mut WebSocket, frames: impl IntoIterator<Item = String>) -> bool {
    let sending = async {
        for frame in frames {
            socket.feed(Message::Text(frame.into())).await?;
        }
        socket.flush().await
    };
    matches!(tokio::time::timeout(SEND_TIMEOUT, sending).await, Ok(Ok(())))
}

async fn close(socket: &mut WebSocket, code: u16, reason: &str) {
    // The protocol limits a reason to 123 bytes.
    let reason: String = reason.chars().take(100).filter(char::is_ascii).collect();
    let frame = CloseFrame { code, reason: Utf8Bytes::from(reason) };
    let _ = tokio::time::timeout(Duration::from_secs(2), socket.send(Message::Close(Some(frame)))).await;
}

struct WebSocketStream {
    socket: WebSocket,
    /// Size above which a frame is rejected.
    max_bytes: usize,
    meter: ReadMeter,
}

impl WorkerStream for WebSocketStream {
    async fn receive(&mut self) -> Received {
        match self.socket.next().await {
            None | Some(Err(_)) | Some(Ok(Message::Close(_))) => Received::Closed,
            Some(Ok(message)) => {
                self.meter.count_next_message();
                match decode(&message, self.max_bytes) {
                    None => Received::KeepAlive,
                    Some(Ok(message)) => Received::Message(message),
                    Some(Err(rejection)) => Received::Rejected(rejection),
                }
            }
        }
    }

    async fn send_commands(&mut self, commands: Vec<WorkerCommand>) -> bool {
        send(&mut self.socket, commands.iter().map(command_frame)).await
    }

    async fn send_errors(&mut self, rejections: Vec<Rejection>) -> bool {
        send(&mut self.socket, rejections.iter().map(error_frame)).await
    }

    async fn send_heartbeat(&mut self) -> bool {
        // A WebSocket library answers a ping by itself, so this also works for a worker that does not know heartbeats.
        let _ = self.socket.feed(Message::Ping(Default::default())).await;
        send(&mut self.socket, ["{\"type\":\"heartbeat\"}".to_owned()]).await
    }

    async fn close(mut self, reason: CloseReason) {
        let code = match reason {
            CloseReason::Left => GOING_AWAY,
            CloseReason::ServerStopping => SERVICE_RESTART,
            _ => POLICY_VIOLATION,
        };
        close(&mut self.socket, code, reason.as_str()).await;
        // Reads remaining frames: closing a socket with unread data resets it, and the worker would not see the reason.
        let rest = async { while let Some(Ok(_)) = self.socket.next().await {} };
        let _ = tokio::time::timeout(CLOSE_TIMEOUT, rest).await;
    }
}

fn command_frame(command: &WorkerCommand) -> String {
    match command {
        WorkerCommand::Job(delivery) => {
            let mut frame = String::from("{\"type\":\"job\",\"job\":");
            encode::job(&mut frame, delivery);
            frame.push('}');
            frame
        }
        WorkerCommand::Ack(ack) => encode::ack(ack),
        WorkerCommand::Cancel { job_id, run, reason } => {
            let reason = serde_json::to_string(reason).expect("a string is JSON");
            format!("{{\"type\":\"cancel\",\"jobId\":\"{job_id}\",\"run\":{run},\"reason\":{reason}}}")
        }
        WorkerCommand::Drain => "{\"type\":\"drain\"}".into(),
        WorkerCommand::Resume => "{\"type\":\"resume\"}".into(),
    }
}

/// Decodes a message. Returns `None` for ping, pong and close, which need no processing.
fn decode(message: &Message, max_bytes: usize) -> Option<Result<WorkerMessage, Rejection>> {
    match message {
        Message::Text(text) if text.len() > max_bytes => {
            let message = format!("the frame is larger than {max_bytes} bytes");
            Some(Err(Rejection::new(ErrorCode::PayloadTooLarge, message)))
        }
        Message::Text(text) => Some(parse(text)),
        Message::Binary(_) => Some(Err(invalid("the frame must be JSON text, not binary"))),
        Message::Ping(_) | Message::Pong(_) | Message::Close(_) => None,
    }
}

fn parse(text: &str) -> Result<WorkerMessage, Rejection> {
    let frame: WorkerFrame =
        serde_json::from_str(text).map_err(|error| invalid(format!("invalid frame: {}", explain(text, &error))))?;
    let (job_id, run) = (frame.job_id, frame.run);
    let raw = |value: Option<&RawValue>| value.map(|raw| raw.get().to_owned());
    let kind = match &*frame.kind {
        "heartbeat" => return Ok(WorkerMessage::Heartbeat),
        "drain" => return Ok(WorkerMessage::Drain),
        "leave" => return Ok(WorkerMessage::Leave),
        "register" => {
            let token = frame.token.clone().filter(|token| !token.reveal().is_empty());
            return Ok(WorkerMessage::Register(registration(frame), token));
        }
        "started" => ReportKind::Started,
        "progress" => report::progress(frame.progress)?,
        "log" => report::log(frame.message.map(Into::into), frame.event.as_deref())?,
        "step" => report::step(frame.name.map(Into::into), raw(frame.result).as_deref(), frame.total_steps)?,
        "complete" => report::complete(frame.result.map(|raw| raw.get()))?,
        "fail" => {
            report::fail(report::error_text(frame.error.map(|raw| raw.get())), frame.retryable, frame.retry_after_ms)
        }
        "release" => ReportKind::Release,
        other => {
            let known = "register, heartbeat, started, progress, log, step, complete, fail, release, drain or leave";
            let other: String = other.chars().take(50).collect();
            return Err(invalid(format!("type: must be {known}, is {other:?}")));
        }
    };
    report::new(job_id, run, kind).map(WorkerMessage::Report)
}

/// Explains why a frame could not be parsed. Names an unknown field without listing all known fields.
fn explain(text: &str, error: &serde_json::Error) -> String {
    match serde_json::from_str::<BTreeMap<Cow<'_, str>, &RawValue>>(text) {
        Err(error) if error.is_data() => "must be a JSON object".into(),
        Err(error) => format!("is not valid JSON: {error}"),
        Ok(fields) => match fields.keys().find(|name| !WorkerFrame::FIELDS.contains(&name.as_ref())) {
            Some(name) => format!("unknown field \"{name}\""),
            None => error.to_string(),
        },
    }
}

fn registration(frame: WorkerFrame<'_>) -> Registration {
    Registration {
        worker_id: frame.worker_id.map(Into::into),
        session_token: frame.session_token.filter(|token| !token.reveal().is_empty()),
        name: frame.name.map(Into::into),
        version: frame.version.map(Into::into),
        capabilities: frame.capabilities.unwrap_or_default(),
        queues: frame.queues.unwrap_or_default(),
        concurrency: frame.concurrency,
        reports_starts: frame.reports_starts.unwrap_or(false),
        api_key: None,
        in_flight: frame.in_flight.map(|runs| runs.into_iter().map(|run| (run.job_id, run.run)).collect()),
    }
}

#[cfg(test)]
mod tests {
    use faena_engine::workers::Report;
    use proptest::prelude::*;

    use super::*;

    fn code(text: &str) -> Option<ErrorCode> {
        parse(text).err().map(|rejection| rejection.code)
    }

    #[test]
    fn an_invalid_frame_is_rejected_with_a_reason() {
        for text in ["", "nonsense", "[]", "7", "{}", "{\"type\":7}", "{\"type\":\"dance\"}", "{\"type\":\"complete\"}"]
        {
            assert_eq!(code(text), Some(ErrorCode::ValidationError), "{text}");
        }
        let unknown = parse(r#"{"type":"complete","jobId":"01a1e1b6-d8d7-7007-820a-3ff640398a18","resul":1}"#);
        let message = unknown.err().expect("rejected").message;
        assert_eq!(message, "invalid frame: unknown field \"resul\"");
        assert_eq!(parse("[]").err().expect("rejected").message, "invalid frame: must be a JSON object");
    }

    #[test]
    fn frames_without_optional_fields_are_accepted() {
        assert!(matches!(
            parse(r#"{"type":"register","workerId":"w","capabilities":["a"]}"#),
            Ok(WorkerMessage::Register(..))
        ));
        assert!(matches!(parse(r#"{"type":"heartbeat"}"#), Ok(WorkerMessage::Heartbeat)));
        let id = "01a1e1b6-d8d7-7007-820a-3ff640398a18";
        let done = format!(r#"{{"type":"complete","jobId":"{id}","result":{{"a":1}}}}"#);
        assert!(matches!(parse(&done), Ok(WorkerMessage::Report(Report { run: None, .. }))));
        let failed = format!(r#"{{"type":"fail","jobId":"{id}","error":"broken"}}"#);
        let Ok(WorkerMessage::Report(Report { kind: ReportKind::Fail(failure), .. })) = parse(&failed) else {
            panic!()
        };
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
    fn field_names() -> Vec<&'static str> {
        WorkerFrame::FIELDS.into_iter().chain(["other"]).collect()
    }

    proptest! {
        #[test]
        fn any_text_is_parsed_or_rejected(text in ".*") {
            let _ = code(&text);
        }

        #[test]
        fn any_frame_is_parsed_or_rejected_as_invalid(
            kind in prop::sample::select(TYPES),
            fields in prop::collection::btree_map(prop::sample::select(field_names()), json(), 0..8),
            cut in any::<prop::sample::Index>(),
        ) {
            let mut frame: serde_json::Map<String, serde_json::Value> =
                fields.into_iter().map(|(name, value)| (name.to_owned(), value)).collect();
            frame.insert("type".into(), kind.into());
            let text = serde_json::Value::from(frame).to_string();
            if let Err(rejection) = parse(&text) {
                prop_assert_eq!(rejection.code, ErrorCode::ValidationError);
            }
            // The same frame, cut off anywhere.
            let end = (0..=cut.index(text.len())).rev().find(|at| text.is_char_boundary(*at)).unwrap_or(0);
            if end < text.len() {
                prop_assert!(parse(&text[..end]).is_err());
            }
        }
    }
}
