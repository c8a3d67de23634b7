//! The HTTP server around a router.

use std::net::SocketAddr;

use axum::{Router, serve::ListenerExt};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

/// Serves until `closing`, then lets the requests under way finish.
pub async fn serve(listener: TcpListener, router: Router, closing: CancellationToken) {
    let listener = listener.tap_io(|stream| {
        // Answers are small and leave at once.
        let _ = stream.set_nodelay(true);
    });
    let served = axum::serve(listener, router.into_make_service_with_connect_info::<SocketAddr>())
        .with_graceful_shutdown(async move { closing.cancelled().await })
        .await;
    if let Err(error) = served {
        tracing::error!(%error, "the HTTP server ended");
    }
}
