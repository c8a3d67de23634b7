//! Decides who is calling and what the caller may do, for every transport.
//!
//! A caller is an API key, a worker process that this server started ([`OwnToken`]), a person whom a trusted reverse proxy has
//! authenticated, or, without a key, any program on this machine while there are no keys, and anyone with
//! `--insecure-no-auth`. Handlers never see the key: they ask the [`Access`] of the request.

mod access;
mod client_address;
mod policy;
mod secret;

pub use access::{Access, AccessError};
pub use policy::{Credentials, OwnToken, Policy};
pub use secret::{new_key_text, rotated_key_text};
