//! `faena audit`.

use std::process::ExitCode;

use clap::Args;
use faena_wire::AuditList;

use crate::{
    Api, CommandError, Connection,
    output::{relative, shorten},
    table::table,
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
    #[arg(long)]
    cursor: Option<String>,
    /// Maximum number of actions, up to 100
    #[arg(long, default_value_t = 50, value_name = "N")]
    limit: u32,
    #[command(flatten)]
    connection: Connection,
}

pub async fn run(arguments: Arguments) -> Result<ExitCode, CommandError> {
    let api = Api::new(&arguments.connection)?;
    let filter = [&arguments.actor, &arguments.action, &arguments.target, &arguments.cursor];
    let empty = if filter.into_iter().any(Option::is_some) { "no actions match" } else { "no actions yet" };
    let request = api
        .get("/api/v1/audit")
        .query("limit", arguments.limit)
        .query_opt("actor", arguments.actor)
        .query_opt("action", arguments.action)
        .query_opt("target", arguments.target)
        .query_opt("cursor", arguments.cursor);
    api.show(request, |list| listed(list, empty)).await
}

fn listed(list: &AuditList, empty: &str) -> String {
    let mut table = table(["when", "actor", "action", "target", "jobs", "details"]);
    for entry in &list.entries {
        let details = entry.details.to_string();
        table.add_row([
            relative(entry.at),
            entry.actor.clone(),
            entry.action.clone(),
            entry.target.clone(),
            if is_about_jobs(&entry.action) { entry.count.to_string() } else { String::new() },
            if details == "{}" { String::new() } else { shorten(&details, 60) },
        ]);
    }
    let more = list.next_cursor.as_ref().map(|cursor| format!("\nnext page: --cursor {cursor}")).unwrap_or_default();
    format!("{}{more}", table.or_text(empty))
}

/// Returns whether an action changes jobs, so that its count is a number of jobs.
fn is_about_jobs(action: &str) -> bool {
    ["job.", "bulk.", "dead_letter."].iter().any(|prefix| action.starts_with(prefix))
}
