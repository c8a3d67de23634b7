//! Frames on a WebSocket.

use futures_util::{SinkExt, StreamExt};
use serde_json::{Value, json};
use tokio::sync::mpsc;
use tokio_tungstenite::{connect_async, tungstenite::Message};
use tokio_util::sync::CancellationToken;

use super::stream::{Transport, Wire};

pub struct WebSocket;

impl Transport for WebSocket {
    async fn open(url: &str) -> Wire {
        let url = format!("{}/api/v1/workers/connect", url.replacen("http", "ws", 1));
        let (mut socket, _) = connect_async(url).await.unwrap();
        let (say, mut to_say) = mpsc::unbounded_channel::<Value>();
        let (hear, heard) = mpsc::unbounded_channel();
        let hush = CancellationToken::new();
        let quiet = hush.clone();
        let task = tokio::spawn(async move {
            loop {
                tokio::select! {
                    // Not even a ping is answered.
                    () = quiet.cancelled() => std::future::pending().await,
                    frame = to_say.recv() => {
                        let Some(frame) = frame else { return };
                        if socket.send(Message::text(frame.to_string())).await.is_err() {
                            return;
                        }
                    }
                    message = socket.next() => match message {
                        Some(Ok(Message::Text(text))) => {
                            let _ = hear.send(serde_json::from_str(&text).unwrap());
                        }
                        Some(Ok(Message::Close(Some(end)))) => {
                            let _ = hear.send(json!({"type": "closed", "reason": end.reason.as_str()}));
                        }
                        Some(Ok(_)) => {}
                        Some(Err(_)) | None => return,
                    },
                }
            }
        });
        Wire { say, heard, task: task.abort_handle(), hush }
    }
}
