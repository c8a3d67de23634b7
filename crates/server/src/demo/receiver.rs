//! Receives the webhooks of the demo, on loopback ports.

use std::{net::Ipv4Addr, sync::Arc};

use axum::{Router, http::StatusCode, routing::post};
use tokio::net::TcpListener;

/// URLs of the receivers.
#[derive(Clone)]
pub struct Receiver {
    /// Accepts every webhook.
    pub working: Arc<str>,
    /// Answers with 500.
    pub broken: Arc<str>,
}

/// Starts two receivers on different ports. Each host has its own circuit, so only that of the broken one opens.
pub async fn start() -> std::io::Result<Receiver> {
    let working = serve(Router::new().route("/hooks", post(async || StatusCode::NO_CONTENT))).await?;
    let broken =
        serve(Router::new().route("/hooks", post(async || (StatusCode::INTERNAL_SERVER_ERROR, "out of order"))))
            .await?;
    Ok(Receiver { working, broken })
}

async fn serve(router: Router) -> std::io::Result<Arc<str>> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
    let url = format!("http://{}/hooks", listener.local_addr()?);
    tokio::spawn(axum::serve(listener, router).into_future());
    Ok(url.into())
}
