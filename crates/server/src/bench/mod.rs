#[derive(clap::Args)]
pub struct Arguments {}
pub async fn run(_a: Arguments) -> anyhow::Result<()> { Ok(()) }
