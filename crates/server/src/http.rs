//! Serves a router over HTTP.

use std::net::SocketAddr;

use axum::{Router, serve::ListenerExt};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

/// Serves until `closing` is cancelled, then finishes the requests in flight.
pub async fn serve(listener: TcpListener, router: Router, closing: CancellationToken) {
    let listener = listener.tap_io(|stream| {
        // Responses are small and must not wait for more data.
        let _ = stream.set_nodelay(true);
    });
    let served = axum::serve(listener, router.into_make_service_with_connect_info::<SocketAddr>())
        .with_graceful_shutdown(async move { closing.cancelled().await })
        .await;
    if let Err(error) = served {
        tracing::error!(%error, "http server stopped");
    }
}
