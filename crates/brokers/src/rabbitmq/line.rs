//! A connection that is over when it is dropped.
//!
//! The library gives each connection a thread. Dropping the connection asks that thread to say goodbye to the broker and to wait for its answer: from a broker that
//! is silent, or that blocks publishers, none comes, and thread and socket would stay, one more with every attempt. So the socket is closed under it.

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

pub(super) struct Line {
    pub(super) connection: Connection,
    _cord: Cord,
}

/// Closes the socket when it is dropped, or as soon as there is one.
#[derive(Default)]
struct Cord(Arc<Mutex<Socket>>);

#[derive(Default)]
enum Socket {
    #[default]
    NotYet,
    Open(TcpStream),
    Over,
}

impl Line {
    /// May be dropped at any time; nothing stays behind.
    pub(super) async fn open(uri: AMQPUri, properties: ConnectionProperties) -> lapin::Result<Line> {
        let cord = Cord::default();
        let socket = cord.0.clone();
        let runtime = lapin::runtime::default_runtime()?;
        let own = runtime.clone();
        let connect = async move |uri: AMQPUri, _| {
            let plain = AMQPUri { scheme: AMQPScheme::AMQP, ..uri.clone() };
            let stream = plain.connect_async(&own).await?;
            let AsyncTcpStream::Plain(inner) = &stream else {
                return Err(std::io::Error::other("no plain stream").into());
            };
            hold(&socket, TcpStream::from(inner.get_ref().as_fd().try_clone_to_owned()?))?;
            match uri.scheme {
                AMQPScheme::AMQP => Ok(stream),
                AMQPScheme::AMQPS => {
                    Ok(stream.into_tls(&uri.authority.host, OwnedTLSConfig::default().as_ref()).await?)
                }
            }
        };
        let connection = Connection::connector(uri, runtime, connect, properties).await?;
        Ok(Line { connection, _cord: cord })
    }
}

fn hold(socket: &Mutex<Socket>, stream: TcpStream) -> std::io::Result<()> {
    let mut socket = socket.lock().unwrap_or_else(PoisonError::into_inner);
    if matches!(*socket, Socket::Over) {
        return Err(std::io::Error::other("nobody wants this connection any more"));
    }
    *socket = Socket::Open(stream);
    Ok(())
}

impl Drop for Cord {
    fn drop(&mut self) {
        let mut socket = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Socket::Open(stream) = &*socket {
            // It may be closed already, which is just as well.
            let _ = stream.shutdown(Shutdown::Both);
        }
        *socket = Socket::Over;
    }
}
