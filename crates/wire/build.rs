//! Turns the `.proto` into Rust, without a protoc that somebody would have to install.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    #[cfg(feature = "grpc")]
    {
        use prost::Message;
        let descriptors = protox::compile(["proto/faena/v1/faena.proto"], ["proto"])?;
        let out = std::path::PathBuf::from(std::env::var("OUT_DIR")?);
        // For server reflection.
        std::fs::write(out.join("faena_descriptor.bin"), descriptors.encode_to_vec())?;
        // Without the constructors `connect`: the call of that name needs it.
        tonic_prost_build::configure()
            .build_client(true)
            .build_server(true)
            .build_transport(false)
            .compile_fds(descriptors)?;
    }
    println!("cargo:rerun-if-changed=proto");
    Ok(())
}
