//! Generates Rust from the `.proto` files, without an installed protoc.

#[cfg(feature = "grpc")]
const FILES: [&str; 6] = [
    "faena/v1/bulk_service.proto",
    "faena/v1/event_service.proto",
    "faena/v1/job_service.proto",
    "faena/v1/schedule_service.proto",
    "faena/v1/task_service.proto",
    "faena/v1/worker_service.proto",
];

fn main() -> Result<(), Box<dyn std::error::Error>> {
    #[cfg(feature = "grpc")]
    {
        use prost::Message;
        let descriptors = protox::compile(FILES, ["proto"])?;
        let out = std::path::PathBuf::from(std::env::var("OUT_DIR")?);
        // For server reflection.
        std::fs::write(out.join("faena_descriptor.bin"), descriptors.encode_to_vec())?;
        // `build_transport(false)` leaves out the constructor `connect`, which would clash with the RPC of that name.
        tonic_prost_build::configure()
            .build_client(true)
            .build_server(true)
            .build_transport(false)
            // These messages contain secrets; `lib.rs` implements a `Debug` that does not show them.
            .skip_debug([".faena.v1.Register", ".faena.v1.Registered"])
            .compile_fds(descriptors)?;
    }
    println!("cargo:rerun-if-changed=proto");
    Ok(())
}
