//! The `faena` binary.

mod bench;
mod commands;
mod config;
mod demo;
mod doctor;
mod health;
mod http;
mod keys;
mod listen;
mod manual;
mod memory;
mod moving;
mod reference;
mod serve;

fn main() -> std::process::ExitCode {
    // The environment contains keys and the password of the database.
    faena_process::forbid_inspection();
    // Chooses one crypto library for the whole process, before anything uses TLS.
    let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
    commands::main()
}
