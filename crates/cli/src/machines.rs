//! `faena machines …`.

use std::{io::Read, path::PathBuf, process::ExitCode};

use clap::{Args, Subcommand, ValueEnum};
use faena_machine::{BUILT_IN, Definition, Finding};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::{
    Api, CommandError, Connection,
    api::segment,
    complete,
    output::{print, relative},
    table::table,
    task_bulk,
};

/// Larger than the largest valid definition.
const MAX_BYTES: u64 = 2 << 20;

#[derive(Subcommand)]
pub enum Command {
    /// Check definitions without a server
    #[command(after_help = "Exits with 1 if a definition has an error.\n\nExample:\n  faena machines check order.yaml")]
    Check(Check),
    /// Draw a definition without a server
    #[command(after_help = "Example:\n  faena machines draw order.yaml --format svg >order.svg")]
    Draw(Draw),
    /// Print the JSON Schema of definitions, for editors
    #[command(after_help = "Example:\n  faena machines schema >machine.schema.json")]
    Schema,
    /// Register a version of a machine
    #[command(after_help = "Example:\n  faena machines register order.yaml")]
    Register(Register),
    /// List machines with their task counts
    #[command(after_help = "Example:\n  faena machines list")]
    List(Connection),
    /// Move tasks to another version of their machine
    #[command(
        after_help = "A state that is not mapped keeps its name. Tasks that cannot move keep their version.\n\nExample:\n  faena machines migrate order --from 1 --to 2 --map NEW=OPEN --dry-run"
    )]
    Migrate(task_bulk::Migrate),
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
    #[arg(add = complete::machines())]
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
        Command::Schema => {
            print(&serde_json::to_string_pretty(&faena_machine::schema()).unwrap_or_default());
            Ok(ExitCode::SUCCESS)
        }
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
        Command::Migrate(arguments) => task_bulk::migrate(arguments).await,
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

/// Reads a definition. Stops after `MAX_BYTES`, which the parser rejects as too large.
fn read(file: &PathBuf) -> Result<String, CommandError> {
    let refuse =
        |error: &dyn std::fmt::Display| CommandError::Usage(format!("cannot read {}: {error}", file.display()));
    let mut bytes = Vec::new();
    let opened = std::fs::File::open(file).map_err(|error| refuse(&error))?;
    opened.take(MAX_BYTES).read_to_end(&mut bytes).map_err(|error| refuse(&error))?;
    if bytes.len() as u64 == MAX_BYTES {
        return Ok(String::from_utf8_lossy(&bytes).into_owned());
    }
    String::from_utf8(bytes).map_err(|_| refuse(&"it is not UTF-8; save it as UTF-8"))
}

fn parse(text: &str) -> Result<Definition, Vec<Finding>> {
    Definition::parse(text)
}

/// Formats findings as editors and build tools read them: `file:line:column: text`.
fn describe(file: &str, findings: &[Finding]) -> String {
    let lines = findings.iter().map(|finding| {
        let path = if finding.path.is_empty() { String::new() } else { format!("{}: ", finding.path) };
        format!("{file}:{}:{}: {path}{}", finding.position.line.max(1), finding.position.column.max(1), finding.message)
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
    let mut table = table(["name", "version", "hash", "queued", "running", "paused", "ended", "registered"]);
    for machine in &list.machines {
        let count = |status: &str| machine.tasks.get(status).copied().unwrap_or(0);
        let ended = count("completed") + count("failed") + count("cancelled");
        table.add_row([
            machine.name.clone(),
            machine.version.to_string(),
            machine.hash.chars().take(12).collect(),
            count("queued").to_string(),
            count("running").to_string(),
            count("paused").to_string(),
            ended.to_string(),
            relative(machine.created_at),
        ]);
    }
    table.to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_is_not_a_definition_is_refused() {
        let folder = std::env::temp_dir().join(format!("faena-machines-{}", std::process::id()));
        std::fs::create_dir_all(&folder).expect("a folder");
        let file = folder.join("latin-1.yaml");
        std::fs::write(&file, b"machine: caf\xe9\n").expect("a file");
        let error = read(&file).expect_err("it is not UTF-8").to_string();
        assert!(error.contains("it is not UTF-8"), "{error}");
        assert!(read(&folder).is_err(), "a folder");
        let endless = PathBuf::from("/dev/zero");
        let text = read(&endless).expect("zeros are UTF-8");
        let findings = parse(&text).expect_err("it is too large");
        assert!(findings[0].message.contains("at most 1048576 bytes"), "{findings:?}");
        std::fs::remove_dir_all(&folder).expect("the folder is deleted");
    }
}
