//! NATS JetStream.
//!
//! The client library's own reconnection is disabled: it would send pending messages after reconnecting, long after the
//! caller has published them again. A broken connection is dropped with everything on it, and the next call opens another.

mod consumer;
mod sink;

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

use async_nats::{Client, ConnectErrorKind, ConnectOptions, Event, jetstream, jetstream::ErrorCode};
use tokio::sync::watch;

use crate::{BrokerError, BrokerUrl, CONNECT_TIMEOUT, Declare};

pub(crate) use consumer::AckHandle;
pub use consumer::{NatsConsumer, NatsConsumerOptions};
pub use sink::{NatsSink, NatsSinkOptions};

/// State of a connection, from the events that the client library emits.
#[derive(Clone, Debug, Default)]
struct Health {
    is_lost: bool,
    /// The latest error of the server that belongs to no request, such as a missing permission.
    server_error: Option<String>,
}

async fn connect(url: &BrokerUrl, name: &str) -> Result<(Client, watch::Receiver<Health>), BrokerError> {
    let (sender, health) = watch::channel(Health::default());
    let options = authenticate_once(url)
        .name(name)
        .connection_timeout(CONNECT_TIMEOUT)
        .max_reconnects(1)
        .ignore_discovered_servers();
    let options = options.event_callback(move |event| {
        match event {
            Event::Disconnected | Event::Closed => sender.send_modify(|health| health.is_lost = true),
            Event::ServerError(error) => sender.send_modify(|health| health.server_error = Some(error.to_string())),
            _ => {}
        }
        async {}
    });
    match tokio::time::timeout(CONNECT_TIMEOUT, options.connect(url.without_credentials())).await {
        Ok(Ok(client)) => Ok((client, health)),
        Ok(Err(error)) if error.kind() == ConnectErrorKind::AuthorizationViolation => {
            Err(BrokerError::new(format!("{url} denied access; check the user name and password")).with_source(&error))
        }
        Ok(Err(error)) => Err(BrokerError::new(format!("cannot connect to {url}")).with_source(&error)),
        Err(_) => Err(BrokerError::unanswered(url, CONNECT_TIMEOUT)),
    }
}

/// Provides the credentials for one connection only, so that the client library cannot reconnect.
fn authenticate_once(url: &BrokerUrl) -> ConnectOptions {
    let credentials = url.credentials();
    let is_used = Arc::new(AtomicBool::new(false));
    ConnectOptions::with_auth_callback(move |_nonce| {
        let (credentials, is_reconnect) = (credentials.clone(), is_used.swap(true, Ordering::Relaxed));
        async move {
            if is_reconnect {
                return Err(async_nats::AuthError::new("reconnecting is disabled"));
            }
            let mut auth = async_nats::Auth::new();
            match credentials {
                (Some(user), Some(password)) => {
                    auth.username = Some(user);
                    auth.password = Some(password);
                }
                (Some(token), None) => auth.token = Some(token),
                _ => {}
            }
            Ok(auth)
        }
    })
}

/// Creates the stream if it is missing and `declare` allows it.
async fn ensure_stream(
    context: &jetstream::Context,
    stream: &str,
    subjects: Vec<String>,
    declare: Declare,
) -> Result<(), BrokerError> {
    if stream_exists(context, stream).await? {
        return Ok(());
    }
    if declare == Declare::Never {
        return Err(missing_stream(stream));
    }
    let config =
        jetstream::stream::Config { name: stream.to_owned(), subjects: subjects.clone(), ..Default::default() };
    let created = context.create_stream(config).await;
    created.map(|_| ()).map_err(|error| {
        let message = format!("cannot create stream {stream:?} for subjects {:?}", subjects.join(", "));
        BrokerError::new(message).with_source(&error)
    })
}

async fn stream_exists(context: &jetstream::Context, stream: &str) -> Result<bool, BrokerError> {
    match context.get_stream(stream).await {
        Ok(_) => Ok(true),
        Err(error) => {
            match error.kind() {
                jetstream::context::GetStreamErrorKind::JetStream(error)
                    if error.error_code() == ErrorCode::STREAM_NOT_FOUND =>
                {
                    Ok(false)
                }
                _ => Err(BrokerError::new("JetStream does not answer; check that the server has it enabled")
                    .with_source(&error)),
            }
        }
    }
}

fn missing_stream(stream: &str) -> BrokerError {
    BrokerError::new(format!("stream {stream:?} does not exist; create it, or set declare = true"))
}
