//! A connection whose socket is closed on drop.
//!
//! The client library runs a thread per connection. Dropping the connection asks that thread to close it and to wait for
//! the broker's answer. A broker that is silent, or that blocks publishers, never answers; thread and socket would leak,
//! one more with every attempt. Shutting the socket down ends both.

use std::{
    net::{Shutdown, TcpStream},
    os::fd::AsFd,
    sync::{Arc, Mutex, PoisonError},
};

use lapin::{
    Connection, ConnectionProperties,
    tcp::{AMQPUriTcpExt, AsyncTcpStream, OwnedTLSConfig},
    uri::{AMQPScheme, AMQPUri},
};

/// A connection with a guard on its socket.
pub(super) struct GuardedConnection {
    pub(super) inner: Connection,
    _guard: SocketGuard,
}

/// Shuts the socket down on drop, even if the socket is opened only later.
#[derive(Default)]
struct SocketGuard(Arc<Mutex<GuardedSocket>>);

#[derive(Default)]
enum GuardedSocket {
    #[default]
    Connecting,
    Open(TcpStream),
    Closed,
}

impl GuardedConnection {
    /// Connects to the broker. Dropping the future at any point leaves no thread or socket behind.
    pub(super) async fn open(uri: AMQPUri, properties: ConnectionProperties) -> lapin::Result<GuardedConnection> {
        let guard = SocketGuard::default();
        let socket = guard.0.clone();
        let runtime = lapin::runtime::default_runtime()?;
        let connect_runtime = runtime.clone();
        let connect = async move |uri: AMQPUri, _| {
            let plain = AMQPUri { scheme: AMQPScheme::AMQP, ..uri.clone() };
            let stream = plain.connect_async(&connect_runtime).await?;
            let AsyncTcpStream::Plain(socket_stream) = &stream else {
                return Err(std::io::Error::other("not a plain TCP stream").into());
            };
            guard_socket(&socket, TcpStream::from(socket_stream.get_ref().as_fd().try_clone_to_owned()?))?;
            match uri.scheme {
                AMQPScheme::AMQP => Ok(stream),
                AMQPScheme::AMQPS => {
                    Ok(stream.into_tls(&uri.authority.host, OwnedTLSConfig::default().as_ref()).await?)
                }
            }
        };
        let inner = Connection::connector(uri, runtime, connect, properties).await?;
        Ok(GuardedConnection { inner, _guard: guard })
    }
}

fn guard_socket(socket: &Mutex<GuardedSocket>, stream: TcpStream) -> std::io::Result<()> {
    let mut socket = socket.lock().unwrap_or_else(PoisonError::into_inner);
    if matches!(*socket, GuardedSocket::Closed) {
        return Err(std::io::Error::other("the connection attempt was cancelled"));
    }
    *socket = GuardedSocket::Open(stream);
    Ok(())
}

impl Drop for SocketGuard {
    fn drop(&mut self) {
        let mut socket = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let GuardedSocket::Open(stream) = &*socket {
            // The socket may be closed already; then there is nothing to shut down.
            let _ = stream.shutdown(Shutdown::Both);
        }
        *socket = GuardedSocket::Closed;
    }
}
