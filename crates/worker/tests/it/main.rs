//! The SDK against a far end that this suite plays itself.

mod client;
mod far_end;
mod handlers;
mod reconnecting;
mod stopping;
mod working;
