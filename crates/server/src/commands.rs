//! The command line of the `faena` binary.

use std::{ffi::OsString, path::PathBuf, pin::Pin, process::ExitCode};

use clap::{CommandFactory, Parser, Subcommand};
use faena_cli::{
    output::{print, print_error},
    table::table,
};
use faena_domain::printable;
use faena_store::ExternalMapping;

use crate::{
    bench,
    config::{self, Config},
    demo, doctor, health, keys, manual, moving, reference, serve,
};

/// Durable job server and task orchestrator
#[derive(Parser)]
#[command(name = "faena", version, max_term_width = 110)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Start the server
    #[command(
        after_help = "Examples:\n  faena serve\n  faena serve --database-url postgres://user:password@host/database \\\n    --roles engine,worker"
    )]
    Serve(ServeArguments),
    /// Start a server with sample data and a steady load, in a temporary folder; Ctrl-C removes everything
    #[command(after_help = "Example:\n  faena demo")]
    Demo(demo::Arguments),
    /// Migrate the database schema, then exit
    #[command(after_help = "Example:\n  faena migrate --database-url postgres://user:password@host/database")]
    Migrate(ConfigArguments),
    /// Move everything from SQLite to an empty PostgreSQL database; run it again to continue after an interruption
    #[command(
        after_help = "Examples:\n  faena move --from sqlite:faena-data/faena.db \\\n    --to postgres://user:password@host/database --dry-run\n  DATABASE_URL=postgres://user:password@host/database \\\n    faena move --from sqlite:faena-data/faena.db"
    )]
    Move {
        /// Configuration file with the target [default: faena.toml, if it exists]
        #[arg(long, value_name = "FILE")]
        config: Option<PathBuf>,
        #[command(flatten)]
        arguments: moving::Arguments,
    },
    /// Show the effective configuration and the source of each value
    #[command(after_help = "Example:\n  faena config --config /etc/faena/faena.toml")]
    Config {
        #[command(flatten)]
        config: ConfigArguments,
        /// Output JSON
        #[arg(long)]
        json: bool,
        /// Output faena.example.toml: every key with its default
        #[arg(long)]
        example: bool,
    },
    /// Check the database and the configuration for problems and suggest fixes
    #[command(after_help = "Example:\n  faena doctor --fix")]
    Doctor {
        #[command(flatten)]
        config: ConfigArguments,
        #[command(flatten)]
        arguments: doctor::Arguments,
    },
    /// Check the health of the server on this machine; exits with 1 if it is unhealthy or does not answer
    #[command(after_help = "Example:\n  faena health --live")]
    Health {
        #[command(flatten)]
        config: ConfigArguments,
        #[command(flatten)]
        arguments: health::Arguments,
    },
    /// Benchmark Faena against a baseline that is measured on this machine
    #[command(after_help = "Example:\n  faena bench --jobs 100000 --seconds 10")]
    Bench(bench::Arguments),
    /// Manage event sinks and rejected events, or print SQL for an outbox in your database
    Outbox {
        #[command(subcommand)]
        command: OutboxCommand,
    },
    /// Run a command and kill it with everything it has started when standard input closes
    #[command(hide = true)]
    Guard {
        /// File that becomes the standard input of the command
        #[arg(long)]
        input: Option<PathBuf>,
        /// Folder to create, to run the command in, and to remove at the end
        #[arg(long)]
        scratch: Option<PathBuf>,
        #[arg(last = true, required = true)]
        argv: Vec<OsString>,
    },
    /// Print a generated page of the reference documentation
    #[command(hide = true)]
    Reference {
        #[arg(value_enum)]
        page: reference::Page,
    },
    /// Run the services of coding tasks: make changes, test them, connect web pages
    Adapter {
        #[command(subcommand)]
        command: faena_adapter::Command,
    },
    /// Print shell completions
    #[command(
        after_help = "They complete commands and options, and the ids, queues, types and names that the server knows.\n\nExample:\n  faena completions bash > /etc/bash_completion.d/faena"
    )]
    Completions {
        /// Shell to generate completions for
        shell: clap_complete::Shell,
    },
    /// Write manual pages
    #[command(after_help = "Example:\n  faena man /usr/local/share/man/man1")]
    Man {
        /// Folder for the pages; it is created if it does not exist
        folder: PathBuf,
    },
    #[command(flatten)]
    Client(faena_cli::Command),
}

#[derive(Subcommand)]
enum OutboxCommand {
    /// Print the SQL of outbox tables for an application's PostgreSQL database
    #[command(after_help = "Example:\n  faena outbox init-sql --names snake | psql tickets")]
    InitSql {
        /// Naming style: OutboxMessages (pascal) or outbox_messages (snake)
        #[arg(long, value_enum, default_value = "pascal")]
        names: Names,
        /// Schema of the tables [default: the search path]
        #[arg(long)]
        schema: Option<String>,
        /// Also print a dead-letter table with this name
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
    /// Configuration file [default: faena.toml, if it exists]
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Database: sqlite:FILE or postgres://user:password@host/database [default: sqlite:faena-data/faena.db]
    #[arg(long, value_name = "URL")]
    database_url: Option<String>,
}

#[derive(clap::Args)]
struct ServeArguments {
    #[command(flatten)]
    config: ConfigArguments,
    /// Address to listen on [default: 127.0.0.1]
    #[arg(long)]
    host: Option<String>,
    /// Port to listen on; 0 picks a free port [default: 3000]
    #[arg(long)]
    port: Option<String>,
    /// Parts this process runs, separated by commas [default: api,engine,worker]
    #[arg(long, value_name = "LIST")]
    roles: Option<String>,
    /// Refuse to start on an old schema instead of migrating it
    #[arg(long)]
    no_migrate: bool,
    /// Allow addresses other than loopback although there are no API keys
    #[arg(long)]
    insecure_no_auth: bool,
}

/// Exit codes for scripts.
const FAILED: u8 = 1;
const USAGE: u8 = 2;
/// `EX_IOERR` of `sysexits.h`.
const STORAGE_FAILED: u8 = 74;

pub fn main() -> ExitCode {
    // A shell asks for completions with an environment variable.
    clap_complete::CompleteEnv::with_factory(Cli::command).var(manual::COMPLETE).complete();
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => {
            print_usage(&error);
            return if error.use_stderr() { ExitCode::from(USAGE) } else { ExitCode::SUCCESS };
        }
    };
    match run(cli.command) {
        Ok(code) => code,
        Err(error) => {
            print_error(&format!("{error:#}"));
            if error.is::<serve::StorageFailed>() {
                // Exits without waiting for calls to a disk that may hang.
                std::process::exit(i32::from(STORAGE_FAILED));
            }
            let usage = error.is::<config::ConfigError>()
                || matches!(error.downcast_ref(), Some(faena_store::StoreError::Setup(_)))
                || error.is::<serve::CannotStart>();
            ExitCode::from(if usage { USAGE } else { FAILED })
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
            block_on(serve::serve(config, !arguments.no_migrate, arguments.insecure_no_auth, None))?;
        }
        Command::Demo(arguments) => {
            demo::forget_environment()?;
            block_on(demo::run(arguments))?;
        }
        Command::Migrate(arguments) => {
            let config = arguments.load(&arguments.flags())?;
            block_on(async {
                let store = faena_store::open(config.text("database.url"), config.store(true)).await?;
                store.close().await;
                anyhow::Ok(())
            })?;
            print("schema is up to date");
        }
        Command::Move { config, arguments } => {
            let target = ConfigArguments { config, database_url: arguments.to.clone() };
            let config = target.load(&target.flags())?;
            return block_on(moving::run(&arguments, config.text("database.url")));
        }
        Command::Config { config, json, example } => {
            if example {
                print(config::example().trim_end());
            } else {
                print_config(&config.load(&config.flags())?, json);
            }
        }
        Command::Doctor { config, arguments } => {
            let config = config.load(&config.flags())?;
            return block_on(doctor::run(&config, &arguments));
        }
        Command::Health { config, arguments } => {
            let config = config.load(&config.flags())?;
            return block_on(health::run(&config, &arguments));
        }
        Command::Bench(arguments) => block_on(bench::run(arguments))?,
        Command::Outbox { command: OutboxCommand::Client(command) } => {
            return run(Command::Client(faena_cli::Command::Outbox { command }));
        }
        Command::Outbox { command: OutboxCommand::InitSql { names, schema, dead_table } } => {
            let mapping = match names {
                Names::Pascal => ExternalMapping::default(),
                Names::Snake => ExternalMapping::in_snake_case(),
            };
            print(ExternalMapping { schema, dead_table, ..mapping }.init_sql().trim_end_matches('\n'));
        }
        Command::Guard { input, scratch, argv } => {
            faena_process::run_guard(&argv, &faena_process::GuardOptions { input, scratch })
        }
        Command::Adapter { command } => return block_on(async { Ok(faena_adapter::run(command).await) }),
        Command::Reference { page } => print(page.render(Cli::command()).trim_end_matches('\n')),
        Command::Completions { shell } => {
            print(manual::completions(&shell.to_string())?.trim_end_matches('\n'));
        }
        Command::Man { folder } => {
            let pages = manual::write_pages(Cli::command(), &folder)?;
            print(&format!("{pages} manual pages in {}", folder.display()));
        }
        Command::Client(faena_cli::Command::Keys { command: faena_cli::keys::Command::Create(create) })
            if create.offline =>
        {
            let arguments =
                ConfigArguments { config: create.config.clone(), database_url: create.database_url.clone() };
            let config = arguments.load(&arguments.flags())?;
            let text = block_on(keys::create_offline(&config, &create))?;
            print(&text);
        }
        Command::Client(command) => {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
            return Ok(runtime.block_on(faena_cli::run(command)));
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Runs a command on a runtime with several threads.
///
/// The future is boxed because `Runtime::block_on` contains its code three times otherwise, together with that of every function
/// that it awaits: the binary was 4 MB larger.
fn block_on<'a, T>(command: impl Future<Output = anyhow::Result<T>> + 'a) -> anyhow::Result<T> {
    let command: Pin<Box<dyn Future<Output = anyhow::Result<T>> + 'a>> = Box::pin(command);
    tokio::runtime::Builder::new_multi_thread().enable_all().build()?.block_on(command)
}

/// Prints help, or what is wrong with the arguments. The message may repeat arguments with control characters.
fn print_usage(error: &clap::Error) {
    let text = error.render().to_string();
    if printable(&text) == text {
        // Prints the text with colours.
        let _ = error.print();
    } else {
        eprintln!("{}", printable(text.trim_end()));
    }
}

fn print_config(config: &Config, json: bool) {
    let rows = config.rows();
    if json {
        let map: serde_json::Map<String, serde_json::Value> = rows
            .into_iter()
            .map(|(path, value, origin)| (path, serde_json::json!({"value": value, "source": origin})))
            .collect();
        return print(&serde_json::to_string_pretty(&map).expect("texts are JSON"));
    }
    let mut table = table(["key", "value", "source"]);
    for (path, value, origin) in rows {
        table.add_row([path, value, origin]);
    }
    print(&table.to_string());
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
