//! `faena machines …`.

use std::{path::PathBuf, process::ExitCode};

use clap::{Args, Subcommand, ValueEnum};
use faena_machine::{BUILT_IN, Definition, Finding};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::{
    Api, CommandError, Connection,
    api::segment,
    output::{print, relative, table},
};

#[derive(Subcommand)]
pub enum Command {
    /// Check definitions without a server
    #[command(after_help = "Exit code 1 if a definition has a fault.\n\nExample:\n  faena machines check order.yaml")]
    Check(Check),
    /// Draw a definition without a server
    #[command(after_help = "Example:\n  faena machines draw order.yaml --format svg >order.svg")]
    Draw(Draw),
    /// Register a version of a machine
    #[command(after_help = "Example:\n  faena machines register order.yaml")]
    Register(Register),
    /// List machines with the number of their tasks
    #[command(after_help = "Example:\n  faena machines list")]
    List(Connection),
    /// Show the definition of a machine
    #[command(after_help = "Example:\n  faena machines show order --version 2")]
    Show(Show),
}

#[derive(Args)]
pub struct Check {
    /// Files in YAML or JSON
    #[arg(required = true)]
    files: Vec<PathBuf>,
    /// Output JSON
    #[arg(long)]
    json: bool,
}

#[derive(Args)]
pub struct Draw {
    /// File in YAML or JSON, or the name of a built-in machine
    file: PathBuf,
    /// Format of the drawing
    #[arg(long, value_enum, default_value_t = Format::Mermaid)]
    format: Format,
}

#[derive(Clone, Copy, ValueEnum)]
enum Format {
    Mermaid,
    Svg,
}

#[derive(Args)]
pub struct Register {
    /// File in YAML or JSON
    file: PathBuf,
    #[command(flatten)]
    connection: Connection,
}

#[derive(Args)]
pub struct Show {
    /// Machine name
    name: String,
    /// Version [default: the newest]
    #[arg(long)]
    version: Option<u32>,
    #[command(flatten)]
    connection: Connection,
}

#[derive(Deserialize)]
struct MachineList {
    machines: Vec<Machine>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Machine {
    name: String,
    version: u32,
    hash: String,
    created_at: faena_domain::Timestamp,
    tasks: std::collections::BTreeMap<String, u64>,
}

pub async fn run(command: Command) -> Result<ExitCode, CommandError> {
    match command {
        Command::Check(arguments) => check(&arguments),
        Command::Draw(arguments) => draw(&arguments),
        Command::Register(arguments) => {
            let text = read(&arguments.file)?;
            parse(&text)
                .map_err(|findings| CommandError::Other(describe(&arguments.file.display().to_string(), &findings)))?;
            let api = Api::new(&arguments.connection)?;
            let request = api.post("/api/v1/machines").json(&json!({"definition": text}));
            api.show(request, |answer: &Value| {
                let version = &answer["version"];
                format!("machine {} version {version} is registered", answer["name"].as_str().unwrap_or_default())
            })
            .await
        }
        Command::List(connection) => {
            let api = Api::new(&connection)?;
            api.show(api.get("/api/v1/machines"), machines_table).await
        }
        Command::Show(arguments) => {
            let api = Api::new(&arguments.connection)?;
            let query = arguments.version.map(|version| format!("?version={version}")).unwrap_or_default();
            let request = api.get(&format!("/api/v1/machines/{}{query}", segment(&arguments.name)));
            api.show(request, |answer: &Value| serde_json::to_string_pretty(&answer["definition"]).unwrap_or_default())
                .await
        }
    }
}

fn read(file: &PathBuf) -> Result<String, CommandError> {
    std::fs::read_to_string(file)
        .map_err(|error| CommandError::Usage(format!("cannot read {}: {error}", file.display())))
}

fn parse(text: &str) -> Result<Definition, Vec<Finding>> {
    Definition::parse(text)
}

/// Formats findings as editors and build tools read them: `file:line:column: text`.
fn describe(file: &str, findings: &[Finding]) -> String {
    let lines = findings.iter().map(|finding| {
        let path = if finding.path.is_empty() { String::new() } else { format!("{}: ", finding.path) };
        format!("{file}:{}:{}: {path}{}", finding.place.line.max(1), finding.place.column.max(1), finding.message)
    });
    lines.collect::<Vec<_>>().join("\n")
}

fn check(arguments: &Check) -> Result<ExitCode, CommandError> {
    let mut is_valid = true;
    let mut results = Vec::new();
    for file in &arguments.files {
        let name = file.display().to_string();
        match parse(&read(file)?) {
            Ok(definition) => {
                if !arguments.json {
                    let (machine, version) = (&definition.machine, definition.version);
                    print(&format!("{name}: machine {machine} version {version}, {} states", definition.states.len()));
                }
                results.push(json!({"file": name, "hash": definition.hash, "findings": []}));
            }
            Err(findings) => {
                is_valid = false;
                if !arguments.json {
                    print(&describe(&name, &findings));
                }
                results.push(json!({"file": name, "findings": findings}));
            }
        }
    }
    if arguments.json {
        print(&serde_json::to_string_pretty(&results).unwrap_or_default());
    }
    Ok(if is_valid { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn draw(arguments: &Draw) -> Result<ExitCode, CommandError> {
    let name = arguments.file.display().to_string();
    let built_in = BUILT_IN.iter().find(|(machine, _)| *machine == name).map(|(_, text)| (*text).to_owned());
    let text = match built_in {
        Some(text) => text,
        None => read(&arguments.file)?,
    };
    let definition = parse(&text).map_err(|findings| CommandError::Other(describe(&name, &findings)))?;
    let drawing = match arguments.format {
        Format::Mermaid => definition.to_mermaid(),
        Format::Svg => definition.to_svg(&[]),
    };
    print(drawing.trim_end());
    Ok(ExitCode::SUCCESS)
}

fn machines_table(list: &MachineList) -> String {
    let mut table = table(["name", "version", "hash", "running", "paused", "ended", "registered"]);
    for machine in &list.machines {
        let count = |status: &str| machine.tasks.get(status).copied().unwrap_or(0);
        let ended = count("completed") + count("failed") + count("cancelled");
        table.add_row([
            machine.name.clone(),
            machine.version.to_string(),
            machine.hash.chars().take(12).collect(),
            count("running").to_string(),
            count("paused").to_string(),
            ended.to_string(),
            relative(machine.created_at),
        ]);
    }
    table.to_string()
}
