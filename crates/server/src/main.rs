//! The `faena` binary.

mod bench;
mod commands;
mod config;
mod doctor;
mod guard;
mod health;
mod http;
mod keys;
mod listen;
mod reference;
mod serve;

fn main() -> std::process::ExitCode {
    // Chooses one crypto library for the whole process, before anything uses TLS.
    let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
    commands::main()
}
