//! `faena demo`: a server with sample data and a steady load, in a temporary folder that is removed at the end.
//!
//! It is the real server with a configuration of its own, which the caller's environment does not affect. `content.rs`
//! creates the initial data, `load.rs` submits a few jobs a second, `workers.rs` runs them, `receiver.rs` receives the
//! webhooks.

mod api;
mod content;
mod load;
mod receiver;
mod workers;

use std::{
    ffi::OsString, fs, net::Ipv4Addr, os::unix::process::CommandExt, path::PathBuf, process::Command, time::Duration,
};

use anyhow::Context;
use faena_cli::output::print;
use tokio::{net::TcpListener, sync::oneshot};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use crate::{
    config::Config,
    serve::{self, StopSignals},
};
use api::Api;
use receiver::Receiver;

#[derive(clap::Args)]
pub struct Arguments {
    /// Port to listen on; 0 picks a free port [default: 3000 if it is free, otherwise a free port]
    #[arg(long)]
    port: Option<u16>,
}

const PREFERRED_PORT: u16 = 3_000;
/// How long the parts of the demo may take to end.
const STOP_TIMEOUT: Duration = Duration::from_secs(5);

/// Replaces this process with one without Faena's variables: otherwise the workers would send the caller's API key.
pub fn forget_environment() -> anyhow::Result<()> {
    let is_ours = |name: &OsString| name.to_string_lossy().starts_with("FAENA_");
    if !std::env::vars_os().any(|(name, _)| is_ours(&name)) {
        return Ok(());
    }
    let program = std::env::current_exe().context("the path of this program")?;
    let kept = std::env::vars_os().filter(|(name, _)| !is_ours(name));
    let error = Command::new(program).args(std::env::args_os().skip(1)).env_clear().envs(kept).exec();
    Err(error).context("cannot start without the variables FAENA_…")
}

pub async fn run(arguments: Arguments) -> anyhow::Result<()> {
    // Installed before the folder exists, so that a signal cannot leave it behind.
    let mut interrupted = StopSignals::new()?;
    let folder = Folder::create().context("cannot create a temporary folder; set TMPDIR to one that can be written")?;
    let receiver = receiver::start().await.context("cannot open a loopback port for the webhooks")?;
    let config = configure(&folder, port(arguments.port).await)?;
    let (started, address) = oneshot::channel();
    let server = tokio::spawn(serve::serve(config, true, false, Some(started)));
    let address = tokio::select! {
        biased;
        () = interrupted.received() => {
            server.abort();
            let _ = server.await;
            return Ok(());
        }
        address = address => address,
    };
    let Ok(address) = address else {
        return server.await.context("the server")?;
    };
    let url = format!("http://{address}");
    let parts = Parts::start(&url, &receiver)?;
    print(&introduction(&url));
    // The server ends on Ctrl-C.
    let ended = server.await.context("the server");
    parts.stop().await;
    let path = folder.0.clone();
    drop(folder);
    ended??;
    print(&if path.exists() { format!("stopped; remove {}", path.display()) } else { REMOVED.to_owned() });
    Ok(())
}

const REMOVED: &str = "stopped; everything was removed";

/// What runs alongside the server: workers, content and load.
struct Parts {
    tasks: TaskTracker,
    stop: CancellationToken,
}

impl Parts {
    fn start(url: &str, receiver: &Receiver) -> anyhow::Result<Parts> {
        let parts = Parts { tasks: TaskTracker::new(), stop: CancellationToken::new() };
        for worker in workers::all(url) {
            // The worker is dropped at the end without waiting for its jobs, because the database is about to be removed.
            parts.spawn(async move { worker.run_until(std::future::pending()).await.map_err(Into::into) });
        }
        let api = Api::new(url, receiver)?;
        parts.spawn({
            let api = api.clone();
            async move { content::create(&api).await }
        });
        parts.spawn(async move { load::run(&api).await });
        Ok(parts)
    }

    fn spawn(&self, part: impl Future<Output = anyhow::Result<()>> + Send + 'static) {
        let stop = self.stop.clone();
        self.tasks.spawn(async move {
            if let Some(Err(error)) = stop.run_until_cancelled(part).await {
                tracing::error!(error = format!("{error:#}"), "the demo is incomplete");
            }
        });
    }

    async fn stop(self) {
        self.stop.cancel();
        self.tasks.close();
        let _ = tokio::time::timeout(STOP_TIMEOUT, self.tasks.wait()).await;
    }
}

async fn port(wanted: Option<u16>) -> u16 {
    match wanted {
        Some(port) => port,
        None if TcpListener::bind((Ipv4Addr::LOCALHOST, PREFERRED_PORT)).await.is_ok() => PREFERRED_PORT,
        None => 0,
    }
}

/// Returns the configuration of the demo. It does not depend on the environment, so it never touches another database.
fn configure(folder: &Folder, port: u16) -> anyhow::Result<Config> {
    let path = folder.0.join("faena.toml");
    let sink = format!(
        "[[sink]]\nname = \"archive\"\nkind = \"file\"\npath = {:?}\ntypes = [\"*\"]\nrotate_bytes = 10000000\nrotate_files = 1\n",
        folder.0.join("events.log")
    );
    fs::write(&path, format!("{CONFIGURATION}{sink}")).context("cannot write the configuration of the demo")?;
    let flags = [
        ("database.url", format!("sqlite:{}", folder.0.join("faena.db").display())),
        ("server.host", Ipv4Addr::LOCALHOST.to_string()),
        ("server.port", port.to_string()),
    ];
    Ok(Config::load((&path, true), [], &flags)?)
}

/// Short retention bounds the database, and rotation the events, however long the demo runs. Only errors are logged.
const CONFIGURATION: &str = "
[log]
level = \"error\"
[drain]
grace = \"1s\"
[retention]
completed = \"1h\"
cancelled = \"1h\"
failed = \"1h\"
[webhook]
allow = \"127.0.0.0/8\"
attempts = 4
";

fn introduction(url: &str) -> String {
    format!(
        "Faena's demo runs at {url}
All its data is made up. Within a minute every page has something to show:

  {url}/               what needs attention, throughput, waiting times, queues
  {url}/jobs           jobs in every state; open a \"video.render\" to see progress and steps
  {url}/dead-letters   payments that failed, grouped by error; retry them
  {url}/approvals      refunds that wait for your decision
  {url}/schedules      schedules with their next runs; one follows daylight saving time
  {url}/limits         one render job at a time, one email per customer
  {url}/queues         a paused queue; resume it
  {url}/webhooks       deliveries to a receiver that works and to one that does not
  {url}/trace?id=report-1   a graph of jobs on one time axis

The command line works too: FAENA_URL={url} faena jobs list
Press Ctrl-C to stop; the demo then removes its data."
    )
}

/// A private temporary folder. Dropping it removes it.
struct Folder(PathBuf);

impl Folder {
    fn create() -> std::io::Result<Folder> {
        let path = std::env::temp_dir().join(format!("faena-demo-{}", uuid::Uuid::new_v4().simple()));
        faena_process::create_folder(&path)?;
        Ok(Folder(path))
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        faena_process::remove_folder(&self.0);
    }
}
