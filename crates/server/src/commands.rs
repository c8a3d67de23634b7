//! The command line: what there is, and where it goes.

use std::{io::Write, path::PathBuf, process::ExitCode};

use clap::{CommandFactory, Parser, Subcommand};
use faena_store::ForeignMapping;

use crate::{
    bench,
    config::{self, Config},
    doctor, guard, serve,
};

/// Durable jobs in one binary: nothing is lost, nothing is stuck, everything explains itself.
#[derive(Parser)]
#[command(name = "faena", version, max_term_width = 110)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
#[expect(clippy::large_enum_variant, reason = "there is one, read once at the start")]
enum Command {
    /// Start the server
    Serve(ServeArguments),
    /// Bring the database's schema up to date and end
    Migrate(ConfigArguments),
    /// Print the effective configuration and where each value came from
    Config {
        #[command(flatten)]
        config: ConfigArguments,
        /// Print as JSON
        #[arg(long)]
        json: bool,
        /// Print faena.example.toml instead: every key with its default
        #[arg(long)]
        example: bool,
    },
    /// Prove that the whole database is sound and the set-up too; say what to do where they are not
    Doctor {
        #[command(flatten)]
        config: ConfigArguments,
        #[command(flatten)]
        arguments: doctor::Arguments,
    },
    /// Measure this machine's limit and Faena beside it
    Bench(bench::Arguments),
    /// Look at sinks of events and the messages they would not take, publish again; print the tables of an outbox of your own
    Outbox {
        #[command(subcommand)]
        command: OutboxCommand,
    },
    /// Run a command, and kill it with all its children when standard input ends
    #[command(hide = true)]
    Guard {
        #[arg(last = true, required = true)]
        argv: Vec<String>,
    },
    /// Print the completions for a shell
    Completions { shell: clap_complete::Shell },
    #[command(flatten)]
    Client(faena_cli::Command),
}

#[derive(Subcommand)]
enum OutboxCommand {
    /// Print the tables of an outbox, for an application's PostgreSQL database
    InitSql {
        /// How tables and columns are written: OutboxMessages or outbox_messages
        #[arg(long, value_enum, default_value = "pascal")]
        names: Names,
        /// The schema of the tables [default: where the search path leads]
        #[arg(long)]
        schema: Option<String>,
        /// Also a table for messages that were refused too often
        #[arg(long, value_name = "TABLE")]
        dead_table: Option<String>,
    },
    #[command(flatten)]
    Client(faena_cli::outbox::Command),
}

#[derive(Clone, Copy, clap::ValueEnum)]
enum Names {
    Pascal,
    Snake,
}

#[derive(clap::Args, Clone)]
struct ConfigArguments {
    /// The configuration file [default: faena.toml, if it is there]
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// sqlite:FILE or postgres://user:password@host/database [default: sqlite:faena-data/faena.db]
    #[arg(long, value_name = "URL")]
    database_url: Option<String>,
}

#[derive(clap::Args)]
struct ServeArguments {
    #[command(flatten)]
    config: ConfigArguments,
    /// The address to listen on [default: 127.0.0.1]
    #[arg(long)]
    host: Option<String>,
    /// The port to listen on; 0 takes a free one [default: 3000]
    #[arg(long)]
    port: Option<String>,
    /// What this process does [default: api,engine,worker]
    #[arg(long, value_name = "LIST")]
    roles: Option<String>,
    /// Refuse to start on an old schema instead of migrating it
    #[arg(long)]
    no_migrate: bool,
    /// Listen on other addresses than loopback although everybody may call
    #[arg(long)]
    insecure_no_auth: bool,
}

/// What scripts can tell from the exit code.
const FAILED: u8 = 1;
const MISTAKE: u8 = 2;

pub fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => {
            let _ = error.print();
            return if error.use_stderr() { ExitCode::from(MISTAKE) } else { ExitCode::SUCCESS };
        }
    };
    match run(cli.command) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("faena: {error:#}");
            let mistake = error.is::<config::ConfigError>()
                || matches!(error.downcast_ref(), Some(faena_store::StoreError::Setup(_)))
                || error.is::<serve::CannotStart>();
            ExitCode::from(if mistake { MISTAKE } else { FAILED })
        }
    }
}

fn run(command: Command) -> anyhow::Result<ExitCode> {
    match command {
        Command::Serve(arguments) => {
            let mut flags = arguments.config.flags();
            flags.extend(arguments.host.map(|value| ("server.host", value)));
            flags.extend(arguments.port.map(|value| ("server.port", value)));
            flags.extend(arguments.roles.map(|value| ("server.roles", value)));
            let config = arguments.config.load(&flags)?;
            runtime()?.block_on(serve::serve(config, !arguments.no_migrate, arguments.insecure_no_auth))?;
        }
        Command::Migrate(arguments) => {
            let config = arguments.load(&arguments.flags())?;
            runtime()?.block_on(async {
                let store = faena_store::open(config.text("database.url"), config.store(true)).await?;
                store.close().await;
                anyhow::Ok(())
            })?;
            println!("the schema is up to date");
        }
        Command::Config { config, json, example } => {
            if example {
                print(&config::example())?;
            } else {
                print_config(&config.load(&config.flags())?, json)?;
            }
        }
        Command::Doctor { config, arguments } => {
            let config = config.load(&config.flags())?;
            return runtime()?.block_on(doctor::run(&config, &arguments));
        }
        Command::Bench(arguments) => runtime()?.block_on(bench::run(arguments))?,
        Command::Outbox { command: OutboxCommand::Client(command) } => {
            return run(Command::Client(faena_cli::Command::Outbox { command }));
        }
        Command::Outbox { command: OutboxCommand::InitSql { names, schema, dead_table } } => {
            let mapping = match names {
                Names::Pascal => ForeignMapping::default(),
                Names::Snake => ForeignMapping::in_snake_case(),
            };
            print(&ForeignMapping { schema, dead_table, ..mapping }.init_sql())?;
        }
        Command::Guard { argv } => {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
            runtime.block_on(guard::run(argv));
        }
        Command::Completions { shell } => {
            let mut buffer = Vec::new();
            clap_complete::generate(shell, &mut Cli::command(), "faena", &mut buffer);
            print(&String::from_utf8_lossy(&buffer))?;
        }
        Command::Client(command) => {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
            return Ok(runtime.block_on(faena_cli::run(command)));
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn runtime() -> std::io::Result<tokio::runtime::Runtime> {
    tokio::runtime::Builder::new_multi_thread().enable_all().build()
}

/// A reader that went away (`faena config | head`) is no error.
fn print(text: &str) -> anyhow::Result<()> {
    match std::io::stdout().write_all(text.as_bytes()) {
        Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => Err(error.into()),
        _ => Ok(()),
    }
}

fn print_config(config: &Config, json: bool) -> anyhow::Result<()> {
    let rows = config.rows();
    if json {
        let map: serde_json::Map<String, serde_json::Value> = rows
            .into_iter()
            .map(|(path, value, origin)| (path, serde_json::json!({"value": value, "origin": origin})))
            .collect();
        return print(&format!("{}\n", serde_json::to_string_pretty(&map)?));
    }
    let mut table = comfy_table::Table::new();
    table.load_style(comfy_table::presets::UTF8_FULL_CONDENSED);
    table.set_header(["key", "value", "from"]);
    for (path, value, origin) in rows {
        table.add_row([path, value, origin]);
    }
    print(&format!("{table}\n"))
}

impl ConfigArguments {
    fn flags(&self) -> Vec<(&'static str, String)> {
        self.database_url.iter().map(|url| ("database.url", url.clone())).collect()
    }

    fn load(&self, flags: &[(&'static str, String)]) -> Result<Config, config::ConfigError> {
        let named = self.config.clone().or_else(|| std::env::var_os("FAENA_CONFIG").map(PathBuf::from));
        let required = named.is_some();
        let path = named.unwrap_or_else(|| "faena.toml".into());
        let environment =
            std::env::vars_os().filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)));
        Config::load((&path, required), environment, flags)
    }
}
