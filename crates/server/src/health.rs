//! `faena health`: asks the server of this machine for its health, for scripts and container health checks.

use std::{process::ExitCode, time::Duration};

use anyhow::Context;
use faena_cli::output::print;
use faena_domain::{masked_url, outage};
use faena_wire::{Health, Ready};

use crate::{config::Config, serve::CannotStart};

const TIMEOUT: Duration = Duration::from_secs(5);
const UNHEALTHY: u8 = 1;

#[derive(clap::Args)]
pub struct Arguments {
    /// Check only that the process answers, not that it can process jobs
    #[arg(long)]
    live: bool,
    /// Server to ask instead of the one that the configuration describes
    #[arg(long, value_name = "URL")]
    url: Option<String>,
    /// Output JSON
    #[arg(long)]
    json: bool,
}

/// Runs the command. Exit code: 0 healthy or degraded, 1 unhealthy or no answer, 2 this server does not serve health
/// checks.
pub async fn run(config: &Config, arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let configured = arguments.url.as_ref().map(|url| url.trim_end_matches('/').to_owned());
    let base = configured.or_else(|| config.health_url()).ok_or_else(|| {
        CannotStart::new("health.mode: this server has no port for health checks; set it to auto or always".into())
    })?;
    if arguments.live {
        let url = format!("{base}/health/live");
        let answer = call(&url).await?;
        anyhow::ensure!(answer.status().is_success(), "{} answers {}", masked_url(&url), answer.status());
        print(if arguments.json { "{\"status\":\"ok\"}" } else { "alive" });
        return Ok(ExitCode::SUCCESS);
    }
    let ready = fetch(&base).await?;
    if arguments.json {
        print(&serde_json::to_string(&ready)?);
    } else {
        print(describe(&ready).trim_end_matches('\n'));
    }
    Ok(if ready.status == Health::Unhealthy { ExitCode::from(UNHEALTHY) } else { ExitCode::SUCCESS })
}

/// Returns the readiness of the server at `base`. Fails if it does not answer, or another program does.
pub async fn fetch(base: &str) -> anyhow::Result<Ready> {
    let url = format!("{base}/health/ready");
    let body = call(&url).await?.json().await.map_err(reqwest::Error::without_url);
    body.with_context(|| format!("{} is not a Faena server", masked_url(&url)))
}

async fn call(url: &str) -> anyhow::Result<reqwest::Response> {
    client()?.get(url).send().await.map_err(|error| {
        let error = error.without_url();
        let reason = if error.is_timeout() { "no answer in time".to_owned() } else { outage(&error) };
        anyhow::anyhow!("cannot reach {}: {reason}", masked_url(url))
    })
}

/// Returns a client that accepts any certificate: the server is usually on this machine, where its certificate is for
/// another name, and no secret is sent.
fn client() -> anyhow::Result<reqwest::Client> {
    let builder = reqwest::Client::builder().no_proxy().timeout(TIMEOUT).tls_danger_accept_invalid_certs(true);
    builder.build().context("the HTTP client")
}

/// Returns the status, and a line for each check that is not healthy.
fn describe(ready: &Ready) -> String {
    let checks = &ready.checks;
    let mut text = format!("{}\n", name(ready.status));
    let mut add = |what: &str, status: Health, reason: Option<&str>| {
        if status != Health::Healthy {
            let reason = reason.map_or(String::new(), |reason| format!(": {reason}"));
            text.push_str(&format!("{what} {}{reason}\n", name(status)));
        }
    };
    add("database", checks.database.status, checks.database.error.as_deref());
    if let Some(redis) = &checks.redis {
        add("redis", redis.status, redis.error.as_deref());
    }
    add("workers", checks.workers.status, checks.workers.message.as_deref());
    for check in &checks.loops {
        add(&format!("loop:{}", check.name), check.status, check.error.as_deref());
    }
    for check in checks.inputs.iter().chain(&checks.sinks) {
        add(&check.name, check.status, check.error.as_deref());
    }
    text
}

fn name(status: Health) -> &'static str {
    match status {
        Health::Healthy => "healthy",
        Health::Degraded => "degraded",
        Health::Unhealthy => "unhealthy",
    }
}
