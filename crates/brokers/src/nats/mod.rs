//! NATS JetStream.
//!
//! The client's own reconnection is shut off: it would send what was on its way whenever it gets through again, long after the caller has published it anew. A
//! connection that broke is dropped with everything on it, and the next call makes another.

mod consumer;
mod sink;

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

use async_nats::{Client, ConnectErrorKind, ConnectOptions, Event, jetstream, jetstream::ErrorCode};
use tokio::sync::watch;

use crate::{BrokerUrl, CONNECT_TIMEOUT, Declare};

pub(crate) use consumer::Handle;
pub use consumer::{NatsConsumer, NatsConsumerOptions};
pub use sink::{NatsSink, NatsSinkOptions};

/// What the connection has told on its own account.
#[derive(Clone, Debug, Default)]
struct Health {
    lost: bool,
    /// A complaint of the server that belongs to no request, such as a missing permission.
    complaint: Option<String>,
}

async fn connect(url: &BrokerUrl, name: &str) -> Result<(Client, watch::Receiver<Health>), String> {
    let (tell, health) = watch::channel(Health::default());
    let options =
        sign_in_once(url).name(name).connection_timeout(CONNECT_TIMEOUT).max_reconnects(1).ignore_discovered_servers();
    let options = options.event_callback(move |event| {
        match event {
            Event::Disconnected | Event::Closed => tell.send_modify(|health| health.lost = true),
            Event::ServerError(error) => tell.send_modify(|health| health.complaint = Some(error.to_string())),
            _ => {}
        }
        async {}
    });
    match tokio::time::timeout(CONNECT_TIMEOUT, options.connect(url.without_credentials())).await {
        Ok(Ok(client)) => Ok((client, health)),
        Ok(Err(error)) if error.kind() == ConnectErrorKind::AuthorizationViolation => {
            Err(format!("NATS at {url} does not let us in, check name and password"))
        }
        Ok(Err(error)) => Err(url.clean(format!("cannot connect to {url}: {error}"))),
        Err(_) => Err(format!("{url} did not answer within {} s", CONNECT_TIMEOUT.as_secs())),
    }
}

/// Name, password or token, given out for one connection: the library's attempt at another fails.
fn sign_in_once(url: &BrokerUrl) -> ConnectOptions {
    let credentials = url.credentials();
    let used = Arc::new(AtomicBool::new(false));
    ConnectOptions::with_auth_callback(move |_nonce| {
        let (credentials, again) = (credentials.clone(), used.swap(true, Ordering::Relaxed));
        async move {
            if again {
                return Err(async_nats::AuthError::new("this connection is over"));
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

/// Makes sure that the stream is there.
async fn prepare_stream(
    context: &jetstream::Context,
    stream: &str,
    subjects: Vec<String>,
    declare: Declare,
) -> Result<(), String> {
    if stream_exists(context, stream).await? {
        return Ok(());
    }
    if declare == Declare::Never {
        return Err(missing(stream));
    }
    let config =
        jetstream::stream::Config { name: stream.to_owned(), subjects: subjects.clone(), ..Default::default() };
    let made = context.create_stream(config).await;
    made.map(|_| ())
        .map_err(|error| format!("cannot make the stream {stream:?} for {}: {}", subjects.join(", "), chain(&error)))
}

async fn stream_exists(context: &jetstream::Context, stream: &str) -> Result<bool, String> {
    match context.get_stream(stream).await {
        Ok(_) => Ok(true),
        Err(error) => match error.kind() {
            jetstream::context::GetStreamErrorKind::JetStream(error)
                if error.error_code() == ErrorCode::STREAM_NOT_FOUND =>
            {
                Ok(false)
            }
            _ => Err(format!("JetStream does not answer, is it on? {}", chain(&error))),
        },
    }
}

fn missing(stream: &str) -> String {
    format!("the stream {stream:?} does not exist and may not be declared: make it, or allow it with declare = true")
}

/// The error and its causes: the library's texts leave them out.
fn chain(error: &(dyn std::error::Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(inner) = cause {
        let more = inner.to_string();
        if !text.contains(&more) {
            text = format!("{text}: {more}");
        }
        cause = inner.source();
    }
    text
}
