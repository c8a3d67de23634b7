//! Sends and receives worker frames over a WebSocket.

use futures_util::{SinkExt, StreamExt};
use serde_json::{Value, json};
use tokio::sync::mpsc;
use tokio_tungstenite::{connect_async, tungstenite::Message};
use tokio_util::sync::CancellationToken;

use super::stream::{Connection, Transport};

pub struct WebSocket;

impl Transport for WebSocket {
    async fn open(url: &str) -> Connection {
        let url = format!("{}/api/v1/workers/connect", url.replacen("http", "ws", 1));
        let (mut socket, _) = connect_async(url).await.unwrap();
        let (sender, mut to_send) = mpsc::unbounded_channel::<Value>();
        let (received_sender, received) = mpsc::unbounded_channel();
        let mute = CancellationToken::new();
        let muted = mute.clone();
        let task = tokio::spawn(async move {
            loop {
                tokio::select! {
                    // A muted client does not answer pings either.
                    () = muted.cancelled() => std::future::pending().await,
                    frame = to_send.recv() => {
                        let Some(frame) = frame else { return };
                        if socket.send(Message::text(frame.to_string())).await.is_err() {
                            return;
                        }
                    }
                    message = socket.next() => match message {
                        Some(Ok(Message::Text(text))) => {
                            let _ = received_sender.send(serde_json::from_str(&text).unwrap());
                        }
                        Some(Ok(Message::Close(Some(end)))) => {
                            let _ = received_sender.send(json!({"type": "closed", "reason": end.reason.as_str()}));
                        }
                        Some(Ok(_)) => {}
                        Some(Err(_)) | None => return,
                    },
                }
            }
        });
        Connection { sender, received, task: task.abort_handle(), mute }
    }
}
