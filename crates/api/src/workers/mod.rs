//! The doors through which workers come in. Each decodes what a worker says into the same reports, and encodes what it is told.

mod encode;
mod flow;
pub mod http;
pub mod records;
pub mod report;
pub mod session;
pub mod websocket;
