//! Runs the commands of the documentation as they are written.
//!
//! # How a page becomes runnable
//! Mark the part of the page that the test runs:
//!
//! ````markdown
//! <!-- test:start server -->
//! ```sh
//! faena enqueue sleep '{"ms": 100}' --watch
//! ```
//! <!-- test:end -->
//! ````
//!
//! Then add the page to the list below. A listed page without marked blocks fails, and so does a marked page that is not listed.
//!
//! | in the page | effect |
//! |---|---|
//! | a block marked `sh` or `bash` | runs, in page order, all blocks in one shell that stops at the first failing command |
//! | `<!-- test:start WORDS -->` | opens a marked section; the words name what the page needs, see below |
//! | `<!-- test:end -->` | closes it |
//! | `<!-- test:skip -->` above a block | shows the block without running it |
//! | `<!-- test:file PATH -->` above a block | writes the block to this file in the working folder |
//! | `<!-- test:run COMMAND -->` | runs a command that the reader does not see, for a check or a wait |
//!
//! | word | provides |
//! |---|---|
//! | `server` | a running server with a fresh database; without it the page starts its own |
//! | `postgres` | an empty database in `$DATABASE_URL`, and `psql` |
//! | `rabbitmq`, `nats`, `redis` | a broker in `$RABBITMQ_URL`, `$NATS_URL`, `$REDIS_URL` |
//! | `python`, `node`, `jq` | the program |
//!
//! A page that needs more than `server` belongs to the list `with_services`, which `./test --fast` leaves out.
//!
//! # What differs from a reader's machine
//! - The working folder is empty except for `examples/` and `faena.example.toml`.
//! - `faena` and `cargo run --release --` run the binary under test: a release build would take minutes.
//! - A free port replaces every port that the marked blocks mention as `127.0.0.1:PORT` or `localhost:PORT`, wherever the number
//!   appears as a word of its own. Pages can run at the same time, and a page must not use such a number for anything else.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Write as _,
    fs::{self, File},
    net::TcpListener,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::Stdio,
    time::Duration,
};

use tokio::process::Command;

use crate::{ports, postgres::Database};

pub const REPOSITORY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");

/// The time a page may take. A page takes a few seconds; the limit only decides how long a hanging command takes to fail.
const TIMEOUT: Duration = Duration::from_secs(60);

/// Services and programs that a machine with only Rust lacks.
const SERVICES: &[&str] = &["postgres", "rabbitmq", "nats", "redis", "python", "node", "jq"];

/// Expands to one test per page and to the list of all pages.
macro_rules! pages {
    ($($group:ident { $($name:ident => $path:literal,)* })*) => {
        const PAGES: &[&str] = &[$($($path,)*)*];

        $(mod $group {
            $(#[tokio::test]
            async fn $name() {
                super::run_page($path, stringify!($group) == "with_services").await;
            })*
        })*
    };
}

pages! {
    without_services {
        readme => "README.md",
        built_in_worker => "docs/guides/built-in-worker.md",
        coding_tasks => "docs/guides/coding-tasks.md",
        dead_letters => "docs/guides/dead-letters.md",
        machine_examples => "docs/guides/machine-examples.md",
        migrating_from_sidekiq => "docs/guides/migrating-from-sidekiq.md",
        queues_and_limits => "docs/guides/queues-and-limits.md",
        tasks => "docs/guides/tasks.md",
        watching => "docs/guides/watching.md",
        a_worker_disappeared => "docs/operating/a-worker-disappeared.md",
        deploying => "docs/operating/deploying.md",
        monitoring => "docs/operating/monitoring.md",
        my_job_does_not_run => "docs/operating/my-job-does-not-run.md",
        my_queue_grows => "docs/operating/my-queue-grows.md",
        troubleshooting => "docs/operating/troubleshooting.md",
        first_jobs => "docs/start/README.md",
    }
    with_services {
        guarantees => "docs/concepts/guarantees.md",
        life_cycle => "docs/concepts/life-cycle.md",
        schedules => "docs/concepts/schedules.md",
        events => "docs/guides/events.md",
        migrating_from_bullmq => "docs/guides/migrating-from-bullmq.md",
        migrating_from_celery => "docs/guides/migrating-from-celery.md",
        moving_to_postgresql => "docs/guides/moving-to-postgresql.md",
        pools => "docs/guides/pools.md",
        submitting_jobs => "docs/guides/submitting-jobs.md",
        task_services => "docs/guides/task-services.md",
        webhooks => "docs/guides/webhooks.md",
        workers => "docs/guides/workers.md",
        your_own_outbox => "docs/guides/your-own-outbox.md",
        doctor => "docs/operating/doctor.md",
        production => "docs/operating/production.md",
        http => "docs/reference/http.md",
    }
}

#[test]
fn every_page_with_marked_blocks_is_listed() {
    let root = Path::new(REPOSITORY);
    let mut files = vec![root.join("README.md"), root.join("README.es.md")];
    files.extend(crate::markdown::files_below(&root.join("docs"), "md"));
    let marked: BTreeSet<String> = files
        .into_iter()
        .filter(|file| fs::read_to_string(file).unwrap().contains("<!-- test:start"))
        .map(|file| file.strip_prefix(root).unwrap().display().to_string())
        .collect();
    let listed: BTreeSet<String> = PAGES.iter().map(|page| (*page).to_owned()).collect();
    assert_eq!(
        marked, listed,
        "left: the pages with <!-- test:start -->, right: the list in crates/server/tests/it/pages.rs"
    );
}

/// The marked sections of a page.
#[derive(Debug, Default, PartialEq)]
struct Script {
    needs: BTreeSet<String>,
    steps: Vec<Step>,
}

/// A part of the script, with the line of the page it comes from.
#[derive(Debug, PartialEq)]
struct Step {
    line: usize,
    code: String,
}

/// A code block that is being read.
struct Block {
    first_line: usize,
    indent: usize,
    use_as: BlockUse,
    text: String,
}

enum BlockUse {
    Run,
    WriteTo(String),
    Skip,
}

impl Block {
    fn into_step(self) -> Option<Step> {
        let code = match self.use_as {
            BlockUse::Run => self.text,
            BlockUse::WriteTo(path) => {
                format!("mkdir -p \"$(dirname '{path}')\"\ncat >'{path}' <<'END_OF_BLOCK'\n{}END_OF_BLOCK\n", self.text)
            }
            BlockUse::Skip => return None,
        };
        Some(Step { line: self.first_line, code })
    }
}

/// Reads the marked sections. Panics if the marks are unknown or unbalanced.
fn parse(page: &str) -> Script {
    let mut script = Script::default();
    let mut is_marked = false;
    let mut block = None::<Block>;
    let mut next_use = None::<BlockUse>;
    for (line, text) in page.lines().enumerate().map(|(index, text)| (index + 1, text)) {
        if let Some(open) = &mut block {
            if text.trim() == "```" {
                script.steps.extend(block.take().and_then(Block::into_step));
            } else {
                open.text.push_str(text.get(open.indent..).unwrap_or_default());
                open.text.push('\n');
            }
        } else if let Some(language) = text.trim_start().strip_prefix("```") {
            let default = if matches!(language.trim(), "sh" | "bash") { BlockUse::Run } else { BlockUse::Skip };
            let use_as = if is_marked { next_use.take().unwrap_or(default) } else { BlockUse::Skip };
            let indent = text.len() - text.trim_start().len();
            block = Some(Block { first_line: line + 1, indent, use_as, text: String::new() });
        } else if let Some((name, value)) = mark(text) {
            match name {
                "start" => {
                    assert!(!is_marked, "line {line}: the section before has no <!-- test:end -->");
                    is_marked = true;
                    script.needs.extend(value.split_whitespace().map(str::to_owned));
                }
                "end" => is_marked = false,
                "skip" => next_use = Some(BlockUse::Skip),
                "file" => next_use = Some(BlockUse::WriteTo(value.to_owned())),
                "run" => script.steps.push(Step { line, code: format!("{value}\n") }),
                _ => panic!("line {line}: unknown mark \"test:{name}\""),
            }
            assert!(is_marked || name == "end", "line {line}: \"test:{name}\" is outside a marked section");
        }
    }
    assert!(!is_marked, "the last <!-- test:start --> has no <!-- test:end -->");
    assert!(block.is_none(), "the last code block has no end");
    script
}

/// Returns the name and the value of `<!-- test:NAME VALUE -->`.
fn mark(line: &str) -> Option<(&str, &str)> {
    let mark = line.trim().strip_prefix("<!-- test:")?.strip_suffix("-->")?.trim();
    Some(mark.split_once(' ').unwrap_or((mark, "")))
}

#[test]
fn only_shell_blocks_inside_the_marks_run() {
    let page = "```sh\nno\n```\n<!-- test:start -->\n```sh\none\ntwo\n```\n```json\nno\n```\n  ```bash\n  three\n  ```\n\
                <!-- test:end -->\n```sh\nno\n```\n";
    let steps = [Step { line: 6, code: "one\ntwo\n".to_owned() }, Step { line: 13, code: "three\n".to_owned() }];
    assert_eq!(parse(page), Script { needs: BTreeSet::new(), steps: steps.into() });
}

#[test]
fn marks_name_needs_files_hidden_commands_and_skipped_blocks() {
    let page = "<!-- test:start server jq -->\n<!-- test:file a/b.py -->\n```python\nprint(1)\n```\n<!-- test:skip -->\n\
                ```sh\nno\n```\n<!-- test:run true -->\n<!-- test:end -->\n";
    let script = parse(page);
    assert_eq!(script.needs.into_iter().collect::<Vec<_>>(), ["jq", "server"]);
    let code: Vec<&str> = script.steps.iter().map(|step| step.code.as_str()).collect();
    let file = "mkdir -p \"$(dirname 'a/b.py')\"\ncat >'a/b.py' <<'END_OF_BLOCK'\nprint(1)\nEND_OF_BLOCK\n";
    assert_eq!(code, [file, "true\n"]);
}

/// Maps each port that a page mentions to a free port.
struct Ports(BTreeMap<String, u16>);

impl Ports {
    /// Finds the ports behind `127.0.0.1:` and `localhost:`. Port 3000, the default of the server, is always among them.
    fn of(code: &str) -> Ports {
        let named = ["127.0.0.1:", "localhost:"].into_iter().flat_map(|host| code.split(host).skip(1));
        let digits = named.map(|rest| rest.chars().take_while(char::is_ascii_digit).collect::<String>());
        let names: BTreeSet<String> = digits.filter(|port| !port.is_empty()).chain(["3000".to_owned()]).collect();
        // All listeners stay open until every port is known, so that no port is found twice.
        let listeners: Vec<TcpListener> = names.iter().map(|_| ports::listen()).collect();
        let free = listeners.iter().map(|listener| listener.local_addr().unwrap().port());
        Ports(names.into_iter().zip(free).collect())
    }

    fn server(&self) -> u16 {
        self.0["3000"]
    }

    /// Replaces the ports where they are words of their own.
    fn replace(&self, code: &str) -> String {
        let mut replaced = String::new();
        let mut word = String::new();
        for character in code.chars().chain(['\0']) {
            if character.is_alphanumeric() || character == '_' {
                word.push(character);
                continue;
            }
            match self.0.get(&word) {
                Some(port) => replaced.push_str(&port.to_string()),
                None => replaced.push_str(&word),
            }
            word.clear();
            replaced.push(character);
        }
        replaced.pop();
        replaced
    }
}

#[test]
fn ports_are_replaced_as_whole_words() {
    let ports = Ports([("3000".to_owned(), 1), ("8080".to_owned(), 2)].into());
    assert_eq!(
        ports.replace("curl localhost:3000/a; nc -l 8080 # 30000 x3000"),
        "curl localhost:1/a; nc -l 2 # 30000 x3000"
    );
}

async fn run_page(path: &str, is_listed_with_services: bool) {
    let page = fs::read_to_string(Path::new(REPOSITORY).join(path)).unwrap_or_else(|error| panic!("{path}: {error}"));
    let script = parse(&page);
    assert!(!script.steps.is_empty(), "{path} has no block to run between <!-- test:start --> and <!-- test:end -->");
    for need in &script.needs {
        assert!(need == "server" || SERVICES.contains(&need.as_str()), "{path}: unknown word \"{need}\" in test:start");
    }
    let needs_services = script.needs.iter().any(|need| need != "server");
    assert_eq!(
        needs_services, is_listed_with_services,
        "{path} is in the wrong list: a page that needs more than \"server\" belongs in with_services, any other in without_services"
    );

    let folder = tempfile::tempdir().unwrap();
    let database = if script.needs.contains("postgres") { Some(Database::create().await) } else { None };
    let code: String = script.steps.iter().map(|step| step.code.as_str()).collect();
    let ports = Ports::of(&code);
    let log = folder.path().join("log");
    let mut shell = Command::new("bash");
    shell.arg("-c").arg(ports.replace(&shell_script(path, &script)));
    shell.current_dir(prepare(folder.path())).env_clear().envs(environment(folder.path(), &script, &ports));
    shell.envs(database.iter().map(|database| ("DATABASE_URL", &database.url)));
    let ended = run_with_timeout(shell, &log).await;
    let output = || fs::read_to_string(&log).unwrap_or_default();
    match ended {
        Some(status) => assert!(status.success(), "{path}: {status}\n{}", output()),
        None => panic!("{path} takes longer than {TIMEOUT:?}\n{}", output()),
    }
}

/// Returns the exit status, or `None` after the timeout. Kills every process that the script left running.
async fn run_with_timeout(mut shell: Command, log: &Path) -> Option<std::process::ExitStatus> {
    let output = File::create(log).unwrap();
    shell.stdin(Stdio::null()).stdout(output.try_clone().unwrap()).stderr(output).process_group(0);
    let mut child = shell.spawn().unwrap();
    let group = format!("-{}", child.id().unwrap());
    let ended = tokio::time::timeout(TIMEOUT, child.wait()).await;
    let _ = Command::new("kill").args(["-s", "KILL", "--", &group]).stderr(Stdio::null()).status().await;
    ended.ok().map(|status| status.unwrap())
}

/// Joins the steps. Each announces its page and line, so that a failure shows where it happened.
fn shell_script(path: &str, script: &Script) -> String {
    let mut text = String::from("set -eu -o pipefail\n");
    if script.needs.contains("server") {
        // `disown` keeps the server out of the shell's job list, so that the page's first background command is %1.
        text.push_str("faena serve & disown\n");
        text.push_str("until curl -sf http://127.0.0.1:3000/health/ready >/dev/null; do sleep 0.1; done\n");
    }
    for Step { line, code } in &script.steps {
        write!(text, "echo '--- {path}:{line}' >&2\n{code}").expect("writing to a string cannot fail");
    }
    text
}

fn environment(folder: &Path, script: &Script, ports: &Ports) -> Vec<(String, String)> {
    let variable =
        |name: &str| std::env::var(name).unwrap_or_else(|_| panic!("{name} is not set; run this test with ./test"));
    let mut path = format!("{}:{}", folder.join("bin").display(), variable("PATH"));
    let mut environment = vec![
        ("HOME".to_owned(), folder.display().to_string()),
        ("PORT".to_owned(), ports.server().to_string()),
        ("FAENA_URL".to_owned(), format!("http://127.0.0.1:{}", ports.server())),
    ];
    for need in &script.needs {
        match need.as_str() {
            "postgres" => path = format!("{path}:{}", std::env::var("FAENA_TEST_PG_BIN").unwrap_or_default()),
            "rabbitmq" => environment.push(("RABBITMQ_URL".into(), variable("FAENA_TEST_RABBITMQ"))),
            "nats" => environment.push(("NATS_URL".into(), variable("FAENA_TEST_NATS"))),
            "redis" => environment.push(("REDIS_URL".into(), variable("FAENA_TEST_REDIS"))),
            _ => {}
        }
    }
    environment.push(("PATH".into(), path));
    environment
}

/// Fills `bin` with the programs and the working folder with files of the repository. Returns the working folder.
fn prepare(folder: &Path) -> PathBuf {
    let bin = folder.join("bin");
    fs::create_dir(&bin).unwrap();
    let faena = env!("CARGO_BIN_EXE_faena");
    std::os::unix::fs::symlink(faena, bin.join("faena")).unwrap();
    let examples = Path::new(faena).with_file_name("examples");
    write_program(&bin.join("cargo"), &CARGO.replace("EXAMPLES", &examples.display().to_string()));
    if let Ok(python) = std::env::var("FAENA_TEST_PYTHON") {
        write_program(&bin.join("python3"), &format!("exec '{python}' \"$@\"\n"));
    }
    let work = folder.join("faena");
    fs::create_dir(&work).unwrap();
    for name in ["examples", "faena.example.toml"] {
        let copied =
            std::process::Command::new("cp").arg("-R").arg(Path::new(REPOSITORY).join(name)).arg(&work).status();
        assert!(copied.unwrap().success());
    }
    work
}

fn write_program(path: &Path, code: &str) {
    fs::write(path, format!("#!/usr/bin/env bash\nset -eu\n{code}")).unwrap();
    fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
}

/// Stands in for `cargo`: runs what `cargo` would build.
const CARGO: &str = r#"
faena="$(dirname "$0")/faena"
case "${1:-}" in
    run | r)
        example=
        while [ $# -gt 0 ] && [ "$1" != -- ]; do
            [ "$1" != --example ] || example=$2
            shift
        done
        [ $# -eq 0 ] || shift
        if [ -n "$example" ]; then exec "EXAMPLES/$example" "$@"; fi
        exec "$faena" "$@" ;;
    build | b)
        mkdir -p target/release && ln -sf "$faena" target/release/faena ;;
    install) ;;
    *)
        echo "the documentation test does not support: cargo $*" >&2
        exit 1 ;;
esac
"#;
