//! `faena audit`: who did what.

use std::process::ExitCode;

use clap::Args;
use faena_wire::AuditList;
use reqwest::Method;

use crate::{Client, Connection, Problem, print, table, workers::shorten};

#[derive(Args)]
pub struct Arguments {
    /// Who: a key, or from where it came
    #[arg(long)]
    actor: Option<String>,
    /// What: job.cancel, queue.pause, bulk.retry …
    #[arg(long)]
    action: Option<String>,
    /// To what: the id of a job, the name of a queue …
    #[arg(long)]
    target: Option<String>,
    /// Where another list ended
    #[arg(long)]
    before: Option<i64>,
    #[arg(long, default_value_t = 50)]
    limit: u32,
    #[command(flatten)]
    connection: Connection,
}

pub async fn run(arguments: Arguments) -> Result<ExitCode, Problem> {
    let client = Client::new(&arguments.connection)?;
    let mut query = vec![("limit", arguments.limit.to_string())];
    for (name, value) in [("actor", arguments.actor), ("action", arguments.action), ("target", arguments.target)] {
        query.extend(value.map(|value| (name, value)));
    }
    query.extend(arguments.before.map(|before| ("before", before.to_string())));
    let request = client.request(Method::GET, "/api/v1/audit").query(&query);
    if arguments.connection.json {
        print(&client.text(request).await?);
        return Ok(ExitCode::SUCCESS);
    }
    let found: AuditList = client.call(request).await?;
    let mut table = table(["at", "who", "what", "to what", "how many", "details"]);
    for entry in &found.entries {
        let details = entry.details.to_string();
        table.add_row([
            entry.at.to_string(),
            entry.actor.clone(),
            entry.action.clone(),
            entry.target.clone(),
            entry.count.to_string(),
            if details == "{}" { String::new() } else { shorten(&details, 60) },
        ]);
    }
    print(&table.to_string());
    if let Some(next) = found.next {
        print(&format!("more with --before {next}"));
    }
    Ok(ExitCode::SUCCESS)
}
