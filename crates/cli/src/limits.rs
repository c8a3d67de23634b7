//! `faena limits …`.

use std::process::ExitCode;

use clap::{Args, Subcommand};
use faena_wire::LimitList;
use serde_json::{Map, Value, json};

use crate::{Api, CommandError, Connection, complete, queues::LimitOptions, table::table, whole_list};

#[derive(Subcommand)]
pub enum Command {
    /// List limits with their source and usage
    #[command(after_help = "Example:\n  faena limits list")]
    List(List),
    /// Set or remove a limit; the value "none" removes it
    #[command(after_help = "Example:\n  faena limits set --key 'tenant-*' --concurrency 3")]
    Set(Set),
    /// Remove a limit that was set at run time; the server's configuration applies again
    #[command(after_help = "Example:\n  faena limits reset --queue mail")]
    Reset(Reset),
}

#[derive(Args)]
pub struct List {
    #[command(flatten)]
    connection: Connection,
}

#[derive(Args)]
pub struct Set {
    #[command(flatten)]
    scope: Scope,
    #[command(flatten)]
    limit: LimitOptions,
    #[command(flatten)]
    connection: Connection,
}

#[derive(Args)]
pub struct Reset {
    #[command(flatten)]
    scope: Scope,
    #[command(flatten)]
    connection: Connection,
}

#[derive(Args)]
#[group(required = true, multiple = false)]
struct Scope {
    /// Limit for all jobs together
    #[arg(long)]
    system: bool,
    /// Limit for a queue
    #[arg(long, value_name = "NAME", add = complete::queues())]
    queue: Option<String>,
    /// Limit for a job type
    #[arg(long = "type", value_name = "TYPE", add = complete::types())]
    kind: Option<String>,
    /// Limit for a concurrency key; KEY* is a separate limit for each key with this prefix
    #[arg(long)]
    key: Option<String>,
    /// Limit for the running tasks of a machine; further tasks are queued
    #[arg(long, value_name = "NAME")]
    machine: Option<String>,
}

impl Scope {
    fn body(&self) -> Map<String, Value> {
        let mut body = Map::new();
        for (scope, name) in
            [("queue", &self.queue), ("type", &self.kind), ("key", &self.key), ("machine", &self.machine)]
        {
            if let Some(name) = name {
                body.insert("scope".into(), json!(scope));
                body.insert("name".into(), json!(name));
            }
        }
        if self.system {
            body.insert("scope".into(), json!("system"));
        }
        body
    }
}

pub async fn run(command: Command) -> Result<ExitCode, CommandError> {
    match command {
        Command::List(list) => {
            let api = Api::new(&list.connection)?;
            whole_list::show(&api, whole_list::read_pages(&api, "/api/v1/limits", "limits").await?, list_text)
        }
        Command::Set(set) => {
            let api = Api::new(&set.connection)?.with_options(&[("name", "scope")]);
            let mut limit = Map::new();
            set.limit.add_to(&mut limit)?;
            if limit.is_empty() {
                return Err(CommandError::Usage("nothing to change; pass --concurrency or --rate".into()));
            }
            limit.extend(set.scope.body());
            api.show(api.patch("/api/v1/limits").json(&limit), list_text).await
        }
        Command::Reset(reset) => {
            let api = Api::new(&reset.connection)?.with_options(&[("name", "scope")]);
            api.show(api.post("/api/v1/limits/reset").json(&reset.scope.body()), list_text).await
        }
    }
}

fn list_text(list: &LimitList) -> String {
    let mut table = table(["scope", "name", "concurrency", "in use", "rate", "remaining", "source", "changed by"]);
    let none = || "none".to_owned();
    for limit in &list.limits {
        table.add_row([
            limit.scope.clone(),
            limit.name.clone().unwrap_or_default(),
            limit.concurrency.map_or_else(none, |n| n.to_string()),
            limit.in_flight.map(|n| n.to_string()).unwrap_or_default(),
            limit.rate.map_or_else(none, |rate| rate.to_string()),
            limit.tokens.map(|n| n.to_string()).unwrap_or_default(),
            limit.origin.clone(),
            limit.changed_by.clone(),
        ]);
    }
    table.or_text("no limits; set one with \"faena limits set\"")
}
