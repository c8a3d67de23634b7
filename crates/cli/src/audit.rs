//! `faena audit`.

use std::process::ExitCode;

use clap::Args;
use faena_wire::AuditList;

use crate::{
    Api, CommandError, Connection,
    output::{shorten, table},
};

#[derive(Args)]
pub struct Arguments {
    /// Only actions of this API key or address
    #[arg(long)]
    actor: Option<String>,
    /// Only this action: job.cancel, queue.pause, bulk.retry …
    #[arg(long)]
    action: Option<String>,
    /// Only actions on this job id, queue name …
    #[arg(long)]
    target: Option<String>,
    /// Cursor from the previous page
    #[arg(long, value_name = "CURSOR")]
    before: Option<i64>,
    /// Maximum number of actions
    #[arg(long, default_value_t = 50, value_name = "N")]
    limit: u32,
    #[command(flatten)]
    connection: Connection,
}

pub async fn run(arguments: Arguments) -> Result<ExitCode, CommandError> {
    let api = Api::new(&arguments.connection)?;
    let request = api
        .get("/api/v1/audit")
        .query("limit", arguments.limit)
        .query_opt("actor", arguments.actor)
        .query_opt("action", arguments.action)
        .query_opt("target", arguments.target)
        .query_opt("before", arguments.before);
    api.show(request, listed).await
}

fn listed(list: &AuditList) -> String {
    let mut table = table(["time", "actor", "action", "target", "jobs", "details"]);
    for entry in &list.entries {
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
    let more = list.next.map(|next| format!("\nnext page: --before {next}")).unwrap_or_default();
    format!("{table}{more}")
}
