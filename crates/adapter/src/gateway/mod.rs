//! `faena adapter gateway`: the WebSocket server for web pages.
//!
//! A connection creates tasks, decides on plans, and receives the progress and the end of the tasks that it follows. One event
//! stream of the server feeds all connections; a task is read again whenever something about it changed.

mod connection;
mod feed;
mod messages;

use std::{net::SocketAddr, sync::Arc, time::Duration};

use axum::{
    Router,
    extract::{State, WebSocketUpgrade},
    http::{HeaderMap, StatusCode, header},
    response::{IntoResponse, Response},
    routing::get,
};
use subtle::ConstantTimeEq;
use tokio::{net::TcpListener, sync::Semaphore};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use crate::{CannotStart, options::duration, transport::http::client};
use feed::Feed;

pub const HELP: &str = "\
Clients connect to ws://HOST:PORT/ws and exchange JSON messages.
They send CREAR_TAREA, APROBAR_PLAN and SEGUIR_TAREA, and receive ACTUALIZACION_PROGRESO, TAREA_FINALIZADA and ERROR.
If FAENA_GATEWAY_TOKEN is set, clients need that token: as bearer token, or in a browser as the subprotocol \"bearer.TOKEN\".

Example:
  faena adapter gateway --listen 127.0.0.1:3001 \\
    --allow-origin http://localhost:8080";

pub const TOKEN_VARIABLE: &str = "FAENA_GATEWAY_TOKEN";
/// Prefix of the subprotocol that contains the token.
const BEARER: &str = "bearer.";
/// How long connections may take to close.
const STOP_LIMIT: Duration = Duration::from_secs(5);

#[derive(clap::Args)]
pub struct Arguments {
    /// Server URL; the API key is read from FAENA_TOKEN [default: FAENA_URL, or http://127.0.0.1:3000]
    #[arg(long, value_name = "URL")]
    url: Option<String>,
    /// Address to listen on; port 0 picks a free port
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:3001")]
    listen: SocketAddr,
    /// Machine of the tasks that clients create
    #[arg(long, value_name = "NAME", default_value = "coding-task")]
    machine: String,
    /// Origin of a web page that may connect, like https://front.example; repeat for several
    #[arg(long = "allow-origin", value_name = "ORIGIN")]
    allow_origins: Vec<String>,
    /// Maximum number of connections
    #[arg(long, value_name = "N", default_value_t = 100, value_parser = clap::value_parser!(u16).range(1..))]
    max_connections: u16,
    /// Interval between progress checks of tasks that clients follow
    #[arg(long, value_name = "DURATION", default_value = "5s", value_parser = duration)]
    progress: Duration,
}

struct Gateway {
    feed: Feed,
    machine: String,
    origins: Vec<String>,
    token: Option<String>,
    slots: Arc<Semaphore>,
    tracker: TaskTracker,
    stop: CancellationToken,
}

pub async fn run(arguments: Arguments, stop: CancellationToken) -> Result<(), CannotStart> {
    let token = std::env::var(TOKEN_VARIABLE).ok().filter(|token| !token.is_empty());
    if token.is_none() && !arguments.listen.ip().is_loopback() {
        return Err(CannotStart(format!(
            "--listen {}: set {TOKEN_VARIABLE} to listen on an address that other machines can reach",
            arguments.listen
        )));
    }
    if token
        .as_ref()
        .is_some_and(|token| !token.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_.~".contains(&byte)))
    {
        return Err(CannotStart(format!("{TOKEN_VARIABLE}: use letters, digits and -_.~ only")));
    }
    let client = client(arguments.url.as_deref(), "gateway")?;
    let cannot_listen = |error| CannotStart(format!("--listen {}: {error}", arguments.listen));
    let listener = TcpListener::bind(arguments.listen).await.map_err(cannot_listen)?;
    let address = listener.local_addr().map_err(cannot_listen)?;
    let gateway = Arc::new(Gateway {
        feed: Feed::new(client, arguments.progress),
        machine: arguments.machine,
        origins: arguments.allow_origins.iter().map(|origin| origin.trim_end_matches('/').to_owned()).collect(),
        token,
        slots: Arc::new(Semaphore::new(arguments.max_connections.into())),
        tracker: TaskTracker::new(),
        stop: stop.clone(),
    });
    let routes = Router::new().route("/ws", get(connect)).with_state(gateway.clone());
    tracing::info!(url = format!("ws://{address}/ws"), machine = gateway.machine, "gateway started");
    let serving = axum::serve(listener, routes).with_graceful_shutdown(stop.clone().cancelled_owned());
    tokio::select! {
        result = serving => result.map_err(|error| CannotStart(error.to_string()))?,
        () = gateway.feed.follow(&stop) => {}
    }
    gateway.tracker.close();
    if tokio::time::timeout(STOP_LIMIT, gateway.tracker.wait()).await.is_err() {
        tracing::warn!("some connections did not close in time");
    }
    Ok(())
}

async fn connect(State(gateway): State<Arc<Gateway>>, headers: HeaderMap, upgrade: WebSocketUpgrade) -> Response {
    if !gateway.admits_origin(&headers) {
        return (StatusCode::FORBIDDEN, "this origin is not allowed; add it with --allow-origin\n").into_response();
    }
    if !gateway.admits_token(&headers) {
        return (StatusCode::UNAUTHORIZED, "the token is missing or wrong\n").into_response();
    }
    let Ok(slot) = gateway.slots.clone().try_acquire_owned() else {
        return (StatusCode::SERVICE_UNAVAILABLE, "too many connections; try again later\n").into_response();
    };
    let protocol = offered_protocols(&headers).find(|protocol| protocol.starts_with(BEARER)).map(str::to_owned);
    let upgrade = upgrade.max_message_size(messages::MAX_BYTES).max_frame_size(messages::MAX_BYTES);
    // A browser closes the connection unless the server accepts one of its subprotocols.
    let upgrade = upgrade.protocols(protocol);
    upgrade.on_upgrade(move |socket| async move {
        let serve = gateway.tracker.track_future(connection::serve(gateway.clone(), socket));
        serve.await;
        drop(slot);
    })
}

impl Gateway {
    /// Returns whether a client may connect. Programs send no origin. The origin of a web page must be listed with
    /// `--allow-origin`.
    fn admits_origin(&self, headers: &HeaderMap) -> bool {
        match headers.get(header::ORIGIN) {
            None => true,
            Some(origin) => self.origins.iter().any(|allowed| allowed.as_bytes() == origin.as_bytes()),
        }
    }

    fn admits_token(&self, headers: &HeaderMap) -> bool {
        let Some(token) = &self.token else { return true };
        let bearer = headers.get(header::AUTHORIZATION).and_then(|value| value.to_str().ok()?.strip_prefix("Bearer "));
        let mut presented =
            bearer.into_iter().chain(offered_protocols(headers).filter_map(|name| name.strip_prefix(BEARER)));
        presented.any(|presented| presented.as_bytes().ct_eq(token.as_bytes()).into())
    }
}

fn offered_protocols(headers: &HeaderMap) -> impl Iterator<Item = &str> {
    let values = headers.get_all(header::SEC_WEBSOCKET_PROTOCOL).into_iter().filter_map(|value| value.to_str().ok());
    values.flat_map(|value| value.split(',')).map(str::trim)
}
