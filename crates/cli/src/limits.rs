//! `faena limits …`.

use std::process::ExitCode;

use clap::{Args, Subcommand};
use faena_wire::LimitList;
use reqwest::Method;
use serde_json::{Map, Value, json};

use crate::{Client, Connection, Problem, print, queues::Numbers, table};

#[derive(Subcommand)]
pub enum Command {
    /// List limits, with where they come from and how much of them is used
    List(List),
    /// Set a limit, or take it away with none
    Set(Set),
    /// Forget what was set at run time; the server's configuration holds again
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
    whose: Whose,
    #[command(flatten)]
    numbers: Numbers,
    #[command(flatten)]
    connection: Connection,
}

#[derive(Args)]
pub struct Reset {
    #[command(flatten)]
    whose: Whose,
    #[command(flatten)]
    connection: Connection,
}

#[derive(Args)]
#[group(required = true, multiple = false)]
struct Whose {
    /// Of all jobs together
    #[arg(long)]
    system: bool,
    /// Of a queue
    #[arg(long)]
    queue: Option<String>,
    /// Of a type
    #[arg(long = "type", value_name = "TYPE")]
    kind: Option<String>,
    /// Of a concurrencyKey; with * at its end: of each key that begins so, by itself
    #[arg(long)]
    key: Option<String>,
}

impl Whose {
    fn body(&self) -> Map<String, Value> {
        let mut body = Map::new();
        for (scope, name) in [("queue", &self.queue), ("type", &self.kind), ("key", &self.key)] {
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

pub async fn run(command: Command) -> Result<ExitCode, Problem> {
    match command {
        Command::List(list) => {
            let client = Client::new(&list.connection)?;
            let request = client.request(Method::GET, "/api/v1/limits");
            show(&client, request, &list.connection).await?;
        }
        Command::Set(set) => {
            let mut body = set.whose.body();
            set.numbers.put_into(&mut body)?;
            let client = Client::new(&set.connection)?;
            let request = client.request(Method::PATCH, "/api/v1/limits").json(&Value::Object(body));
            show(&client, request, &set.connection).await?;
        }
        Command::Reset(reset) => {
            let client = Client::new(&reset.connection)?;
            let body = Value::Object(reset.whose.body());
            let request = client.request(Method::POST, "/api/v1/limits/reset").json(&body);
            show(&client, request, &reset.connection).await?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

async fn show(client: &Client, request: reqwest::RequestBuilder, connection: &Connection) -> Result<(), Problem> {
    if connection.json {
        print(&client.text(request).await?);
        return Ok(());
    }
    let found: LimitList = client.call(request).await?;
    let mut table = table(["of", "name", "at once", "now", "rate", "left", "from", "changed by"]);
    let none = || "none".to_owned();
    for limit in found.limits {
        table.add_row([
            limit.scope,
            limit.name.unwrap_or_default(),
            limit.concurrency.map_or_else(none, |n| n.to_string()),
            limit.in_flight.map(|n| n.to_string()).unwrap_or_default(),
            limit.rate.map_or_else(none, |rate| rate.to_string()),
            limit.tokens.map(|n| n.to_string()).unwrap_or_default(),
            limit.origin,
            limit.changed_by,
        ]);
    }
    print(&table.to_string());
    Ok(())
}
