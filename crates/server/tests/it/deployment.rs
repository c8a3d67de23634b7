//! Tests that the files for containers and service managers fit the binary: its variables, keys, ports, paths and
//! commands.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use serde_json::Value;

use crate::{faena::run, markdown::files_below, pages::REPOSITORY, shell::output_parts};

type Variables = BTreeMap<String, String>;

pub fn root() -> PathBuf {
    Path::new(REPOSITORY).canonicalize().unwrap()
}

fn read(path: &str) -> String {
    fs::read_to_string(root().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

pub fn yaml(path: &str) -> Value {
    serde_saphyr::from_str(&read(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// Returns the effective configuration with these variables and, if named, this file.
fn effective(variables: &Variables, file: Option<&str>) -> Value {
    let folder = tempfile::tempdir().unwrap();
    if let Some(file) = file {
        fs::write(folder.path().join("faena.toml"), read(file)).unwrap();
    }
    let variables: Vec<(&str, &str)> = variables.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect();
    let (code, stdout, stderr) = output_parts(&run(folder.path(), &variables, &["config", "--json"]));
    assert_eq!(code, 0, "{variables:?} {file:?}: {stderr}");
    serde_json::from_str(&stdout).unwrap()
}

fn value<'a>(config: &'a Value, key: &str) -> &'a str {
    config[key]["value"].as_str().unwrap_or_else(|| panic!("{key} is not a key"))
}

/// Returns a duration such as `60s` in seconds.
fn seconds(text: &str) -> u64 {
    text.trim_end_matches('s').parse().unwrap_or_else(|_| panic!("{text} is not a number of seconds"))
}

fn strings(value: &Value) -> Vec<&str> {
    value.as_array().into_iter().flatten().map(|item| item.as_str().unwrap()).collect()
}

/// Returns every variable that the binary reads. Others, such as `WORKER_CONCURENCY`, have no effect and are typing
/// errors.
fn known_variables() -> Vec<String> {
    let example = read("faena.example.toml");
    example.lines().filter_map(|line| Some(line.split_once("Environment: ")?.1.to_owned())).collect()
}

fn assert_known(variables: &Variables, of: &str) {
    let known = known_variables();
    for name in variables.keys() {
        assert!(known.contains(name), "{of}: {name} is not a variable of Faena");
    }
}

/// Variables that the image sets.
fn image_variables() -> Variables {
    let dockerfile = read("Dockerfile");
    let block = dockerfile.split("\nENV ").nth(1).unwrap();
    let end = block.lines().take_while(|line| line.ends_with('\\')).count();
    let words = block.lines().take(end + 1).map(|line| line.trim_end_matches('\\').trim());
    words.map(|word| word.split_once('=').unwrap()).map(|(name, value)| (name.into(), value.into())).collect()
}

fn compose_variables(service: &Value) -> Variables {
    let own = service["environment"].as_object().unwrap().iter();
    let own = own.map(|(name, value)| {
        (name.clone(), value.as_str().unwrap().replace("${POSTGRES_PASSWORD:?set it in .env}", "s"))
    });
    image_variables().into_iter().chain(own).collect()
}

#[test]
fn the_image_runs_the_binary_as_a_user_other_than_root() {
    let dockerfile = read("Dockerfile");
    let variables = image_variables();
    assert_known(&variables, "Dockerfile");
    let config = effective(&variables, None);
    let exposed = dockerfile.lines().find_map(|line| line.strip_prefix("EXPOSE ")).unwrap();
    assert_eq!(exposed, format!("{} {}", value(&config, "server.port"), value(&config, "health.port")));
    assert!(dockerfile.contains("\nUSER 65532:65532\n"));
    let toolchain: toml::Table = read("rust-toolchain.toml").parse().unwrap();
    let channel = toolchain["toolchain"]["channel"].as_str().unwrap();
    assert!(dockerfile.contains(&format!("FROM rust:{channel}-slim-")), "another Rust than {channel}");
    let check = dockerfile.split("CMD [\"/usr/local/bin/faena\", ").nth(1).unwrap().lines().next().unwrap();
    let check: Vec<&str> = check.trim_end_matches(']').split(", ").map(|word| word.trim_matches('"')).collect();
    let folder = tempfile::tempdir().unwrap();
    let (code, _, stderr) = output_parts(&run(folder.path(), &[], &[&check[..], &["--help"]].concat()));
    assert_eq!(code, 0, "{check:?}: {stderr}");
}

#[test]
fn the_compose_files_fit_the_configuration_and_name_files_that_exist() {
    for (file, services, toml) in [
        ("compose.yaml", vec!["faena"], None),
        ("compose.cluster.yaml", vec!["node-1", "node-2"], Some("deploy/compose/faena.toml")),
    ] {
        let compose = yaml(file);
        for name in services {
            let service = &compose["services"][name];
            let variables = compose_variables(service);
            assert_known(&variables, file);
            let config = effective(&variables, toml);
            let port = value(&config, "server.port");
            let published = strings(&service["ports"]);
            assert!(
                published.iter().all(|line| line.starts_with("127.0.0.1:") && line.ends_with(port)),
                "{published:?}"
            );
            let grace = seconds(service["stop_grace_period"].as_str().unwrap());
            assert!(grace > seconds(value(&config, "drain.grace")), "{file}: jobs are killed while they drain");
        }
        for (name, service) in compose["services"].as_object().unwrap() {
            for volume in strings(&service["volumes"]).into_iter().filter(|volume| volume.starts_with("./")) {
                let path = volume.split(':').next().unwrap();
                assert!(root().join(path).exists(), "{file}: {name} mounts {path}, which does not exist");
            }
        }
    }
}

#[test]
fn prometheus_of_the_compose_file_scrapes_its_nodes_with_its_key() {
    let (compose, prometheus) = (yaml("compose.cluster.yaml"), yaml("monitoring/prometheus/prometheus.yml"));
    let scrape = &prometheus["scrape_configs"][0];
    let targets = strings(&scrape["static_configs"][0]["targets"]);
    assert_eq!(targets, ["node-1:3000", "node-2:3000"]);
    let secret = &compose["services"]["prometheus"]["secrets"][0];
    let file = scrape["authorization"]["credentials_file"].as_str().unwrap();
    assert_eq!(file, format!("/run/secrets/{}", secret.as_str().unwrap()));
    let ignored = read(".gitignore");
    let key = compose["secrets"]["metrics_key"]["file"].as_str().unwrap().trim_start_matches('.');
    assert!(ignored.lines().any(|line| line == key), "{key} is a secret and must not be committed");
}

/// A container of a Kubernetes file, with the pod around it.
fn pod(path: &str) -> (Value, Variables) {
    let object = yaml(path);
    let pod = object["spec"]["template"]["spec"].clone();
    let mut variables = image_variables();
    for variable in pod["containers"][0]["env"].as_array().unwrap() {
        let value = variable["value"].as_str().unwrap_or("postgres://faena:s@db/faena");
        variables.insert(variable["name"].as_str().unwrap().into(), value.into());
    }
    (pod, variables)
}

#[test]
fn the_kubernetes_files_fit_the_configuration_and_the_health_checks() {
    let files = files_below(&root().join("deploy/kubernetes"), "yaml");
    assert!(files.len() >= 8, "{files:?}");
    for file in &files {
        yaml(file.strip_prefix(root()).unwrap().to_str().unwrap());
    }
    let nodes = [
        ("deploy/kubernetes/base/deployment.yaml", "http", "server.port"),
        ("deploy/kubernetes/split-roles/processing.yaml", "health", "health.port"),
    ];
    for (path, port_name, port_key) in nodes {
        let (pod, variables) = pod(path);
        assert_known(&variables, path);
        let config = effective(&variables, Some("deploy/kubernetes/base/faena.toml"));
        let container = &pod["containers"][0];
        let port = &container["ports"][0];
        assert_eq!(port["name"], port_name);
        assert_eq!(port["containerPort"].to_string(), value(&config, port_key), "{path}");
        for (probe, expected) in
            [("startupProbe", "/health/live"), ("livenessProbe", "/health/live"), ("readinessProbe", "/health/ready")]
        {
            let get = &container[probe]["httpGet"];
            assert_eq!(
                (get["path"].as_str(), get["port"].as_str()),
                (Some(expected), Some(port_name)),
                "{path} {probe}"
            );
        }
        let grace = pod["terminationGracePeriodSeconds"].as_u64().unwrap();
        assert!(grace > seconds(value(&config, "drain.grace")), "{path}: jobs are killed while they drain");
        assert_eq!(pod["securityContext"]["runAsNonRoot"], true);
        assert_eq!(container["securityContext"]["readOnlyRootFilesystem"], true);
    }
    let service = yaml("deploy/kubernetes/base/service.yaml");
    assert_eq!(service["spec"]["ports"][0]["targetPort"], "http");
}

#[test]
fn the_kubernetes_job_creates_the_first_key() {
    let (pod, _) = pod("deploy/kubernetes/create-key.yaml");
    let folder = tempfile::tempdir().unwrap();
    let (code, stdout, stderr) = output_parts(&run(folder.path(), &[], &strings(&pod["containers"][0]["args"])));
    assert!(code == 0 && stdout.starts_with("fna_"), "{stderr}");
}

#[test]
fn systemd_accepts_the_unit_and_finds_it_hardened_with_services() {
    let unit = read("deploy/systemd/faena.service");
    let setting = |name: &str| unit.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix('=')).unwrap();
    let variables: Variables = setting("Environment")
        .split(' ')
        .map(|pair| pair.split_once('=').unwrap())
        .map(|(a, b)| (a.into(), b.into()))
        .collect();
    assert_known(&variables, "faena.service");
    let config = effective(&variables, None);
    assert!(seconds(setting("TimeoutStopSec")) > seconds(value(&config, "drain.grace")));
    let connections: u64 = value(&config, "server.max_connections").parse().unwrap();
    assert!(setting("LimitNOFILE").parse::<u64>().unwrap() > 2 * connections);

    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("faena.service");
    fs::write(&path, unit.replace("/usr/local/bin/faena", env!("CARGO_BIN_EXE_faena"))).unwrap();
    // The exposure was 1.2 when this was written; 10 means no protection. The threshold is ten times the exposure.
    for arguments in [&["verify", "--man=no"][..], &["security", "--offline=true", "--threshold=15"]] {
        let output = Command::new("systemd-analyze").args(arguments).arg(&path).output();
        let output = output.expect("this test needs systemd-analyze (Debian: apt-get install systemd)");
        let output_text =
            format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        assert!(output.status.success(), "{arguments:?}: {output_text}");
        assert!(arguments[0] != "verify" || output_text.is_empty(), "{output_text}");
    }
}
