//! `faena keys …`.

use std::{path::PathBuf, process::ExitCode};

use clap::{Args, Subcommand};
use faena_domain::ApiKey;
use faena_wire::{ApiKeyList, ShownApiKey};
use serde_json::json;

use crate::{Api, CommandError, Connection, api::segment, complete, ids, output::relative, table::table, whole_list};

#[derive(Subcommand)]
pub enum Command {
    /// Create an API key and show it once
    #[command(after_help = "Examples:\n  faena keys create ops --scopes admin\n  \
            faena keys create mailer --scopes worker --queues mail --expires-at 2027-12-31\n  \
            faena keys create carol --scopes write --group reviewers\n  \
            faena keys create support --scopes read --without-payloads\n  \
            faena keys create ops --scopes admin --offline --config /etc/faena/faena.toml")]
    Create(Create),
    /// List API keys, newest first
    #[command(after_help = "Example:\n  faena keys list")]
    List(Connection),
    /// Rotate the secret of an API key; the old secret stays valid for a while
    #[command(after_help = "Example:\n  faena keys rotate 0199a3c4-7e1b-7c51-9d3e-5a7c2f6b8d10 --overlap 1h")]
    Rotate(Rotate),
    /// Revoke an API key immediately and permanently
    #[command(after_help = "Example:\n  faena keys revoke 0199a3c4-7e1b-7c51-9d3e-5a7c2f6b8d10")]
    Revoke(Revoke),
}

#[derive(Args)]
pub struct Create {
    #[command(flatten)]
    pub key: NewKey,
    /// Write to the database instead of calling a server, for example if every admin key is lost; with SQLite, stop the
    /// server first
    #[arg(long)]
    pub offline: bool,
    /// With --offline: configuration file [default: faena.toml, if it exists]
    #[arg(long, value_name = "FILE", requires = "offline")]
    pub config: Option<PathBuf>,
    /// With --offline: database [default: that of the configuration]
    #[arg(long, value_name = "DATABASE", requires = "offline")]
    pub database_url: Option<String>,
    #[command(flatten)]
    pub connection: Connection,
}

/// What a new key may do.
#[derive(Args)]
pub struct NewKey {
    /// Name of the key, for lists and the audit log
    pub name: String,
    /// Scopes, separated by commas: read, write, worker, admin
    #[arg(long, value_delimiter = ',', required = true, value_name = "LIST")]
    pub scopes: Vec<String>,
    /// Restrict the key to these queues, separated by commas [default: all queues]
    #[arg(long, value_delimiter = ',', value_name = "LIST")]
    pub queues: Vec<String>,
    /// Group that the key belongs to, for approvals of tasks; repeat it, or separate several by commas
    #[arg(long = "group", value_delimiter = ',', value_name = "NAME")]
    pub groups: Vec<String>,
    /// Hide payloads, results, data, logs and errors from the key; only with --scopes read
    #[arg(long)]
    pub without_payloads: bool,
    /// When the key expires, such as 2027-12-31T00:00:00Z [default: never]
    #[arg(long, value_name = "TIME")]
    pub expires_at: Option<String>,
}

#[derive(Args)]
pub struct Rotate {
    /// Key id, or the beginning of one
    #[arg(add = complete::api_keys())]
    id: String,
    /// How long the old secret stays valid, up to 30d
    #[arg(long, default_value = "24h", value_name = "DURATION")]
    overlap: String,
    #[command(flatten)]
    connection: Connection,
}

#[derive(Args)]
pub struct Revoke {
    /// Key id, or the beginning of one
    #[arg(add = complete::api_keys())]
    id: String,
    #[command(flatten)]
    connection: Connection,
}

pub async fn run(command: Command) -> Result<ExitCode, CommandError> {
    match command {
        Command::Create(create) => {
            let api = Api::new(&create.connection)?.with_options(&[("name", "NAME"), ("groups", "--group")]);
            api.show(api.post("/api/v1/api-keys").json(&create.key.body()), created).await
        }
        Command::List(connection) => {
            let api = Api::new(&connection)?;
            whole_list::show(&api, whole_list::read_pages(&api, "/api/v1/api-keys", "apiKeys").await?, keys_table)
        }
        Command::Rotate(rotate) => {
            let api = Api::new(&rotate.connection)?;
            let id = ids::resolve_in_whole_list(&api, &ids::API_KEY, &rotate.id).await?;
            let request = api.post(&path(&id, "/rotate")).json(&json!({"overlap": rotate.overlap}));
            api.show(request, created).await
        }
        Command::Revoke(revoke) => {
            let api = Api::new(&revoke.connection)?;
            let describe = |key: &ApiKey| format!("key \"{}\" ({}) is revoked", key.name, key.id);
            let id = ids::resolve_in_whole_list(&api, &ids::API_KEY, &revoke.id).await?;
            api.show(api.delete(&path(&id, "")), describe).await
        }
    }
}

impl NewKey {
    /// Returns the body of `POST /api/v1/api-keys`.
    pub fn body(&self) -> serde_json::Value {
        let mut body = json!({"name": self.name, "scopes": self.scopes});
        if !self.queues.is_empty() {
            body["queues"] = json!(self.queues);
        }
        if !self.groups.is_empty() {
            body["groups"] = json!(self.groups);
        }
        if self.without_payloads {
            body["withoutPayloads"] = json!(true);
        }
        if let Some(expires_at) = &self.expires_at {
            body["expiresAt"] = json!(expires_at);
        }
        body
    }
}

fn path(id: &str, rest: &str) -> String {
    format!("/api/v1/api-keys/{}{rest}", segment(id))
}

/// Formats a key that was just created or rotated.
pub fn created(shown: &ShownApiKey) -> String {
    let key = &shown.details;
    let until =
        key.previous_valid_until.map(|at| format!("\nThe old secret is accepted until {at}.")).unwrap_or_default();
    format!(
        "{}\n\nKey \"{}\" ({}), scopes {}. Store it now: it is not shown again.{until}\nUse it with FAENA_TOKEN, or as \
         \"Authorization: Bearer …\".",
        shown.key,
        key.name,
        key.id,
        scopes(key),
    )
}

fn keys_table(list: &ApiKeyList) -> String {
    let mut table = table(["id", "name", "state", "scopes", "last used", "queues", "payloads", "groups", "created"]);
    for key in &list.api_keys {
        table.add_row([
            key.id.to_string(),
            key.name.clone(),
            state(key),
            scopes(key),
            key.last_used_at.map_or("never".into(), relative),
            key.queues.as_ref().map_or("all".into(), |queues| queues.join(",")),
            if key.without_payloads { "hidden" } else { "shown" }.into(),
            key.groups.join(","),
            relative(key.created_at),
        ]);
    }
    let empty = "no API keys, so every caller on this machine may do everything; create one with \"faena keys create NAME \
                 --scopes admin\"";
    table.or_text(empty)
}

fn scopes(key: &ApiKey) -> String {
    key.scopes.iter().map(|scope| scope.as_str()).collect::<Vec<_>>().join(",")
}

fn state(key: &ApiKey) -> String {
    let now = faena_domain::Timestamp::now();
    match key.expires_at {
        _ if key.revoked_at.is_some() => "revoked".into(),
        Some(at) if at <= now => "expired".into(),
        Some(at) => format!("expires {}", relative(at)),
        None => "active".into(),
    }
}
