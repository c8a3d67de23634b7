//! `faena events`: follows what happens, through broken connections and restarts, without losing its place.

use std::{process::ExitCode, time::Duration};

use clap::Args;
use reqwest::Method;
use serde_json::Value;

use crate::{
    Client, Connection, Problem, print,
    sse::{Message, Messages},
};

#[derive(Args)]
pub struct Arguments {
    /// Only these types; * stands for anything [several with commas: job.*,schedule.missed]
    #[arg(long, value_delimiter = ',')]
    types: Vec<String>,
    /// Only of jobs in this queue
    #[arg(long)]
    queue: Option<String>,
    /// Only with this correlation id
    #[arg(long, value_name = "ID")]
    correlation: Option<String>,
    /// Only of this job
    #[arg(long, value_name = "ID")]
    job: Option<String>,
    /// Go on after this place; 0: from the first that is kept [default: from now on]
    #[arg(long, value_name = "PLACE")]
    from: Option<i64>,
    #[command(flatten)]
    connection: Connection,
}

const FIRST_PAUSE: Duration = Duration::from_secs(1);
const LONGEST_PAUSE: Duration = Duration::from_secs(60);
/// The server says something every 15 seconds.
const SILENCE: Duration = Duration::from_secs(45);

pub async fn run(arguments: Arguments) -> Result<ExitCode, Problem> {
    let client = Client::new(&arguments.connection)?;
    let mut follower = Follower {
        place: arguments.from.map(|place| place.to_string()),
        heard: false,
        json: arguments.connection.json,
    };
    let mut query: Vec<(&str, String)> = Vec::new();
    if !arguments.types.is_empty() {
        query.push(("types", arguments.types.join(",")));
    }
    for (name, value) in
        [("queue", arguments.queue), ("correlationId", arguments.correlation), ("jobId", arguments.job)]
    {
        query.extend(value.map(|value| (name, value)));
    }
    let mut pause = FIRST_PAUSE;
    let mut began = false;
    loop {
        let why = match follower.follow(&client, &query).await {
            Ok(()) => "the stream ended".to_owned(),
            // Asked wrongly, or never there: nothing gets better by waiting.
            Err(problem @ (Problem::Usage(_) | Problem::Other(_))) => return Err(problem),
            Err(Problem::Refused { code, message, details }) if code != "UNAVAILABLE" => {
                return Err(Problem::Refused { code, message, details });
            }
            Err(problem) if !began && !follower.heard => return Err(problem),
            Err(problem) => problem.to_string(),
        };
        if std::mem::take(&mut follower.heard) {
            (began, pause) = (true, FIRST_PAUSE);
        }
        eprintln!("faena: {why}; trying again in {} s", pause.as_secs());
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(LONGEST_PAUSE);
    }
}

struct Follower {
    /// Everything up to here was shown.
    place: Option<String>,
    /// Something came over this connection.
    heard: bool,
    json: bool,
}

impl Follower {
    /// Shows what comes until the stream breaks.
    async fn follow(&mut self, client: &Client, query: &[(&str, String)]) -> Result<(), Problem> {
        let mut request = client.request(Method::GET, "/api/v1/events").query(query);
        if let Some(place) = &self.place {
            request = request.header("Last-Event-ID", place);
        }
        let mut messages = Messages::new(client.send(request).await?.bytes_stream());
        while let Ok(Some(message)) = tokio::time::timeout(SILENCE, messages.next()).await {
            self.heard = true;
            if !message.data.is_empty() {
                print(&self.shown(&message));
            }
            // Afterwards: what was not shown comes again.
            self.place = message.id.or(self.place.take());
        }
        Ok(())
    }

    fn shown(&self, message: &Message) -> String {
        let is_gap = message.event.as_deref() == Some("gap");
        match serde_json::from_str::<Value>(&message.data) {
            Ok(gap) if is_gap && self.json => format!("{{\"gap\":{gap}}}"),
            Ok(gap) if is_gap => {
                format!("-- lost: what happened after place {} and before {} is not kept", gap["after"], gap["first"])
            }
            Ok(event) if !self.json => line(&event),
            _ => message.data.clone(),
        }
    }
}

fn line(event: &Value) -> String {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let data = &event["data"];
    let status = match (data["previousStatus"].as_str(), data["status"].as_str()) {
        (Some(from), Some(to)) if from != to => format!("{from} > {to}"),
        (_, Some(to)) => to.to_owned(),
        _ => text(&data["state"]) + &text(&data["outcome"]),
    };
    let name = [&data["name"], &data["workerId"]].into_iter().find_map(Value::as_str).unwrap_or_default();
    let subject = text(&event["subject"]);
    let mut line = format!("{}  {:<18} {subject}  {name}  {status}", text(&event["time"]), text(&event["type"]));
    if let Some(queue) = data["queue"].as_str() {
        line.push_str(&format!("  queue {queue}"));
    }
    line.push_str(&format!("  by {}", text(&event["actor"])));
    if let Some(error) = data["error"].as_str() {
        line.push_str(&format!("  {}", crate::workers::shorten(error, 80)));
    }
    line
}
