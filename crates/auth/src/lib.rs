//! Decides who is calling and what the caller may do, for every transport.
//!
//! A caller is identified by an API key, by the token of a worker process that this server started ([`OwnToken`]), or by the
//! name of a person whom a trusted reverse proxy has authenticated. While there are no keys, every program on this machine may
//! call without one; with `--insecure-no-auth`, every program that can connect may. Handlers never see the key: they ask the
//! [`Access`] of the request.

mod access;
mod client_address;
mod policy;
mod secret;

pub use access::{Access, AccessError};
pub use policy::{Credentials, OwnToken, Policy};
pub use secret::{new_key_text, rotated_key_text};
