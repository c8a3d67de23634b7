//! The `faena` binary.

mod bench;
mod commands;
mod config;
mod doctor;
mod guard;
mod http;
mod serve;

fn main() -> std::process::ExitCode {
    // Before anything touches TLS: one crypto library for the whole process.
    let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
    commands::main()
}
