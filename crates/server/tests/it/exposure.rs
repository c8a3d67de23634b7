//! What other users of the machine can read: files, and secrets in what the binary prints.

use std::{
    fs::{self, Permissions},
    os::unix::fs::PermissionsExt,
    path::Path,
    process::Command,
};

use crate::{
    faena::{Faena, command, run},
    shell::output_parts,
};

fn mode(path: &Path) -> u32 {
    fs::metadata(path).unwrap().permissions().mode() & 0o7777
}

/// Starts a server with umask 0, so that other users can access every file whose permissions the server does not
/// restrict.
async fn start_without_umask(folder: &Path) -> Faena {
    let mut program = Command::new("sh");
    program.args(["-c", "umask 0; exec \"$@\"", "sh"]).arg(command(folder).get_program());
    program.current_dir(folder).env_clear().env("PATH", std::env::var_os("PATH").unwrap()).env("HOME", folder);
    let mut faena = Faena::spawn_with(program, folder, &[], &[]);
    faena.wait_until_listening().await;
    faena
}

/// Checks all files of the database, and returns how many there are.
fn assert_files_are_private(data: &Path) -> usize {
    let files: Vec<_> = fs::read_dir(data).unwrap().map(|entry| entry.unwrap().path()).collect();
    for file in &files {
        assert_eq!(mode(file), 0o600, "{}", file.display());
    }
    files.len()
}

#[tokio::test(flavor = "multi_thread")]
async fn the_data_folder_and_its_files_are_private_whatever_the_umask() {
    let folder = tempfile::tempdir().unwrap();
    let data = folder.path().join("faena-data");
    let mut faena = start_without_umask(folder.path()).await;
    assert_eq!(mode(&data), 0o700);
    assert!(assert_files_are_private(&data) >= 4, "database, log, shared memory and lock");
    faena.kill();
    // Faena restricts its files, but does not change the permissions of a folder that exists.
    for file in fs::read_dir(&data).unwrap() {
        fs::set_permissions(file.unwrap().path(), Permissions::from_mode(0o666)).unwrap();
    }
    fs::set_permissions(&data, Permissions::from_mode(0o777)).unwrap();
    let faena = start_without_umask(folder.path()).await;
    assert!(assert_files_are_private(&data) >= 4);
    assert_eq!(mode(&data), 0o777);
    let log = faena.log();
    assert!(log.contains("file was open to other users, restricted it"), "{log}");
    assert!(log.contains("other users can replace the database, restrict its folder"), "{log}");
    let (_, report, _) = output_parts(&run(folder.path(), &[], &["doctor"]));
    assert!(report.contains("other users of this machine can replace files in"), "{report}");
}

const SECRET: &str = "s3cr3tvalue";

/// URLs with the secret in every place where a URL can have one.
fn urls(scheme: &str, path: &str) -> Vec<String> {
    let host = "127.0.0.1:1";
    vec![
        format!("{scheme}://user:{SECRET}@{host}{path}"),
        format!("{scheme}://user:{SECRET}@{host},localhost:1{path}"),
        format!("{scheme}://user:x/{SECRET}@{host}{path}"),
        format!("{scheme}://user:x?{SECRET}@{host}{path}"),
        format!("{scheme}://user:x#{SECRET}@{host}{path}"),
        format!("{scheme}://user:x@{SECRET}@{host}{path}"),
        format!("{scheme}://{host}{path}?password={SECRET}"),
        format!("{scheme}://{host}{path}?user=me&sslpassword={SECRET}&sslmode=disable"),
        format!("{scheme}://{host}{path}?{SECRET}"),
        format!("{scheme}://{host}{path}#{SECRET}"),
        format!("{scheme}:{SECRET}"),
        format!("user:{SECRET}@{host}"),
        format!("host=127.0.0.1 port=1 password={SECRET}"),
    ]
}

/// Runs a command and checks that its output does not contain the secret.
fn assert_hidden(folder: &Path, environment: &[(&str, &str)], arguments: &[&str]) {
    let (_, stdout, stderr) = output_parts(&run(folder, environment, arguments));
    assert!(!stdout.is_empty() || !stderr.is_empty(), "{environment:?} {arguments:?} prints nothing");
    let shown = format!("{stdout}{stderr}");
    assert!(!shown.contains(SECRET), "{environment:?} {arguments:?}: {shown}");
}

#[test]
fn secrets_in_the_url_of_the_database_are_never_shown() {
    let folder = tempfile::tempdir().unwrap();
    for url in urls("postgres", "/db").iter().chain(&urls("mysql", "/db")).chain([&format!("sqlite:f.db?key={SECRET}")])
    {
        let environment = [("DATABASE_URL", url.as_str()), ("LOG_LEVEL", "trace"), ("PORT", "0")];
        for arguments in [&["config"][..], &["config", "--json"], &["doctor"], &["migrate"], &["serve"]] {
            assert_hidden(folder.path(), &environment, arguments);
        }
        assert_hidden(folder.path(), &[], &["config", "--database-url", url]);
    }
}

#[test]
fn secrets_in_the_url_of_the_server_are_never_shown() {
    let folder = tempfile::tempdir().unwrap();
    // `http:name` is a URL with the host `name`, and `ftp:name` one without a place for a secret.
    for url in urls("http", "").iter().chain(&urls("ftp", "")).filter(|url| !url.ends_with(&format!(":{SECRET}"))) {
        for arguments in [&["jobs", "list"][..], &["health", "--url", url], &["health", "--live", "--url", url]] {
            assert_hidden(folder.path(), &[("FAENA_URL", url)], arguments);
        }
    }
}

#[test]
fn secrets_in_the_urls_of_a_configuration_file_are_never_shown() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("faena.toml");
    let sections = |url: &str| {
        [
            format!("[llm]\nbase_url = {url:?}\nmodel = \"m\"\n"),
            format!("[traces]\nendpoint = {url:?}\n"),
            format!("[queue]\nredis_url = {url:?}\n"),
            format!("[[outbox.source]]\nname = \"a\"\nurl = {url:?}\n"),
            format!("[[sink]]\nname = \"a\"\nkind = \"webhook\"\ntypes = [\"job.*\"]\nurl = {url:?}\n"),
            format!("[[sink]]\nname = \"a\"\nkind = \"redis\"\ntypes = [\"job.*\"]\nurl = {url:?}\nkey = \"k\"\n"),
            format!("[[pool]]\nname = \"a\"\ncapabilities = [\"a\"]\ncommand = [\"worker\", {url:?}]\n"),
        ]
    };
    for scheme in ["postgres", "https", "redis", "amqp", "nats"] {
        for url in urls(scheme, "/db").iter().take(10) {
            for section in sections(url) {
                fs::write(&file, section).unwrap();
                assert_hidden(folder.path(), &[], &["config"]);
            }
        }
    }
}
