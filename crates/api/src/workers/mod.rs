//! Transports for workers: WebSocket, gRPC and plain HTTP.
//!
//! Each transport decodes a worker's messages into the same reports and encodes the same commands.

mod encode;
pub mod http;
mod message_budget;
pub mod rest;
pub mod report;
pub mod session;
pub mod session_token;
pub mod websocket;
