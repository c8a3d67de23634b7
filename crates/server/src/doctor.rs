//! `faena doctor`: checks the database and the configuration, and prints one line per finding with a suggested fix.
//!
//! The store checks the database (`store/src/doctor.rs`). This module checks everything else: free disk space, the TLS
//! certificate, Redis, and the loops, sources, inboxes and sinks of the server if it answers. Exit code: 0 no errors, 1
//! errors found, 2 the check itself failed.

mod redis;

use std::{
    path::Path,
    process::{ExitCode, Stdio},
    time::{Duration, Instant},
};

use faena_cli::{
    output::{print, print_error},
    progress::bar,
};
use faena_domain::Timestamp;
use faena_store::doctor::{self, Finding, Inspection, Repaired, Severity};
use faena_wire::{DoctorFinding, DoctorSeverity, Health, Ready};
use serde_json::json;

use crate::{config::Config, health};

#[derive(clap::Args)]
pub struct Arguments {
    /// Repair what can be repaired without losing a job
    #[arg(long)]
    fix: bool,
    /// Output JSON
    #[arg(long)]
    json: bool,
}

const ERRORS_FOUND: u8 = 1;
const CHECK_FAILED: u8 = 2;

pub async fn run(config: &Config, arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let started = Instant::now();
    let url = config.text("database.url");
    let now = Timestamp::now();
    let bar = bar(0, "opening the database");
    let progress = |name: &'static str, at: usize, of: usize| {
        bar.set_length(of as u64);
        bar.set_position(at as u64);
        bar.set_message(name);
    };
    let checked = if arguments.fix {
        doctor::repair(url, config.store(false), config.engine().grace_periods(), now, &progress).await
    } else {
        doctor::inspect(url, now, &progress).await.map(|inspection| (Vec::new(), inspection))
    };
    bar.finish_and_clear();
    let (repaired, mut inspection) = match checked {
        Ok(checked) => checked,
        Err(error) => {
            print_error(&error.to_string());
            return Ok(ExitCode::from(CHECK_FAILED));
        }
    };
    check_machine(config, &mut inspection, now).await;
    let report = Report { repaired, inspection, took: started.elapsed() };
    let text = if arguments.json { report.json() } else { report.text() };
    print(text.trim_end_matches('\n'));
    Ok(if report.count(Severity::Error) > 0 { ExitCode::from(ERRORS_FOUND) } else { ExitCode::SUCCESS })
}

/// Runs all checks, for the API of a server.
pub async fn check(config: &Config) -> faena_api::Checked {
    let now = Timestamp::now();
    let inspected = doctor::inspect(config.text("database.url"), now, &|_, _, _| ()).await;
    let mut inspection = inspected.map_err(|error| error.to_string())?;
    check_machine(config, &mut inspection, now).await;
    let finding = |finding: Finding| DoctorFinding {
        code: finding.code.into(),
        severity: match finding.severity {
            Severity::Error => DoctorSeverity::Error,
            Severity::Warning => DoctorSeverity::Warning,
        },
        count: finding.count,
        text: finding.text,
        advice: finding.advice.into(),
        fixable: finding.fixable,
    };
    Ok((inspection.jobs, inspection.findings.into_iter().map(finding).collect()))
}

/// Adds the findings that are not about the database.
async fn check_machine(config: &Config, inspection: &mut Inspection, now: Timestamp) {
    inspection.findings.extend(check_disk(config.text("database.url")).await);
    inspection.findings.extend(check_server(config).await);
    inspection.findings.extend(redis::check(config).await);
    inspection.findings.extend(check_certificate(config, now));
    inspection.findings.sort_by_key(|finding| finding.severity);
}

struct Report {
    repaired: Vec<Repaired>,
    inspection: Inspection,
    took: Duration,
}

impl Report {
    fn count(&self, severity: Severity) -> usize {
        self.inspection.findings.iter().filter(|finding| finding.severity == severity).count()
    }

    fn text(&self) -> String {
        let mut text = String::new();
        for repaired in &self.repaired {
            text.push_str(&format!("fixed    {}  {} {}\n", repaired.code, repaired.count, repaired.done));
        }
        for finding in &self.inspection.findings {
            let Finding { code, severity, text: what, advice, .. } = finding;
            text.push_str(&format!("{:<8} {code}  {what} → {advice}\n", severity.as_str()));
        }
        let (errors, warnings) = (self.count(Severity::Error), self.count(Severity::Warning));
        let checked = format!("{} checked in {:.1} s", number(self.inspection.jobs, "job"), self.took.as_secs_f64());
        let counted = |n: usize, one: &str| number(n as u64, one);
        let verdict = match (errors, warnings) {
            (0, 0) => "healthy".to_owned(),
            (0, _) => counted(warnings, "warning"),
            (_, 0) => counted(errors, "error"),
            _ => format!("{}, {}", counted(errors, "error"), counted(warnings, "warning")),
        };
        let in_use = self.inspection.in_use_by.as_deref().map_or(String::new(), |owner| format!(", in use by {owner}"));
        text.push_str(&format!("{verdict}: {checked}{in_use}\n"));
        text
    }

    fn json(&self) -> String {
        let findings = self.inspection.findings.iter().map(|finding| {
            json!({
                "code": finding.code,
                "severity": finding.severity.as_str(),
                "count": finding.count,
                "text": finding.text,
                "advice": finding.advice,
                "fixable": finding.fixable,
            })
        });
        let fixed = self.repaired.iter().map(|repaired| {
            json!({"code": repaired.code, "count": repaired.count, "text": format!("{} {}", repaired.count, repaired.done)})
        });
        let report = json!({
            "engine": self.inspection.database_kind,
            "jobs": self.inspection.jobs,
            "inUseBy": self.inspection.in_use_by,
            "tookMs": u64::try_from(self.took.as_millis()).unwrap_or(u64::MAX),
            "errors": self.count(Severity::Error),
            "warnings": self.count(Severity::Warning),
            "fixed": fixed.collect::<Vec<_>>(),
            "findings": findings.collect::<Vec<_>>(),
        });
        format!("{report:#}\n")
    }
}

/// Formats a count with its noun, such as `1 234 567 jobs`.
pub fn number(n: u64, one: &str) -> String {
    let digits = n.to_string();
    let mut text = String::new();
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            text.push(' ');
        }
        text.push(digit);
    }
    format!("{text} {one}{}", if n == 1 { "" } else { "s" })
}

fn finding(code: &'static str, severity: Severity, text: String, advice: &'static str) -> Finding {
    Finding { code, severity, count: 1, text, advice, fixable: false }
}

const FULL_BELOW_KIB: u64 = 1 << 20;
const FULL_BELOW_PERCENT: u64 = 10;

/// Checks the free space of the disk with the SQLite file. Uses `df`, because the system call would need unsafe code; without `df`
/// there is no finding.
async fn check_disk(url: &str) -> Option<Finding> {
    let path = Path::new(url.strip_prefix("sqlite:")?.trim_start_matches("//"));
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let mut df = tokio::process::Command::new("df");
    df.arg("-Pk").arg(folder).env("LC_ALL", "C").stdin(Stdio::null()).kill_on_drop(true);
    let output = tokio::time::timeout(Duration::from_secs(5), df.output()).await.ok()?.ok()?;
    let (free_kib, size_kib) = parse_df(&String::from_utf8_lossy(&output.stdout))?;
    disk_finding(&folder.display().to_string(), free_kib, size_kib)
}

/// Returns the free and the total size in KiB.
fn parse_df(text: &str) -> Option<(u64, u64)> {
    let mut numbers = text.lines().nth(1)?.split_whitespace().rev().skip(2);
    let free = numbers.next()?.parse().ok()?;
    let used: u64 = numbers.next()?.parse().ok()?;
    Some((free, used + free))
}

fn disk_finding(folder: &str, free_kib: u64, size_kib: u64) -> Option<Finding> {
    let percent = free_kib * 100 / size_kib.max(1);
    if free_kib >= FULL_BELOW_KIB && percent >= FULL_BELOW_PERCENT {
        return None;
    }
    let text = format!("{folder} has {} MiB left ({percent} %)", free_kib / 1_024);
    Some(finding("disk-space", Severity::Warning, text, "free disk space or shorten the retention"))
}

/// Checks the loops, sources, inboxes and sinks of the server that the configuration points to, if it answers.
async fn check_server(config: &Config) -> Vec<Finding> {
    let Some(url) = config.health_url() else { return Vec::new() };
    // Another program may listen on this port.
    let Ok(ready) = health::fetch(&url).await else { return Vec::new() };
    check_loops(&ready, &url)
}

const EXPIRES_WITHIN_DAYS: i64 = 14;

/// Checks that the TLS certificate does not expire soon. A file that cannot be read is reported when the server starts.
fn check_certificate(config: &Config, now: Timestamp) -> Option<Finding> {
    const ADVICE: &str = "replace the files of tls.certificate and tls.key; the server reads them without a restart";
    let expires_at = Timestamp::from_ms(config.tls_files().ok()??.expires_at()?.saturating_mul(1_000));
    let days = expires_at.ms_since(now).div_euclid(86_400_000);
    if days < 0 {
        let text = format!("the certificate of tls.certificate expired at {expires_at}");
        return Some(finding("certificate-expired", Severity::Error, text, ADVICE));
    }
    let text =
        format!("the certificate of tls.certificate expires in {} at {expires_at}", number(days.unsigned_abs(), "day"));
    (days < EXPIRES_WITHIN_DAYS).then(|| finding("certificate-expiring", Severity::Warning, text, ADVICE))
}

fn check_loops(ready: &Ready, url: &str) -> Vec<Finding> {
    const ADVICE: &str = "check the server's log; restart the server if the loop does not recover";
    const INPUT_ADVICE: &str =
        "fix the cause that the message names; Faena keeps retrying, and nothing is lost meanwhile";
    const SIGNAL_ADVICE: &str = "set database.listen_url to a direct address of PostgreSQL; the server polls meanwhile";
    let mut findings = Vec::new();
    if let Some(error) = &ready.checks.database.error {
        let text = format!("the server at {url} cannot use its database: {error}");
        findings.push(finding("server-database", Severity::Error, text, "check the database and the server's log"));
    }
    if let Some(problem) = &ready.checks.database.signal_problem {
        let text = format!("the server at {url} receives no notifications from other servers: {problem}");
        findings.push(finding("signals-lost", Severity::Warning, text, SIGNAL_ADVICE));
    }
    for check in &ready.checks.loops {
        let since = check.last_beat_at.map_or("never".into(), |at| format!("at {at}"));
        let error = check.error.as_deref().map_or(String::new(), |error| format!(", last error: {error}"));
        match check.status {
            Health::Healthy => {}
            Health::Degraded => findings.push(finding(
                "loop-failing",
                Severity::Warning,
                format!("loop {} of {url} fails{error}", check.name),
                ADVICE,
            )),
            Health::Unhealthy => findings.push(finding(
                "loop-late",
                Severity::Error,
                format!("loop {} of {url} last ran {since}{error}", check.name),
                ADVICE,
            )),
        }
    }
    let inputs = ready.checks.inputs.iter().map(|check| ("input-down", check));
    let all = inputs.chain(ready.checks.sinks.iter().map(|check| ("sink-down", check)));
    for (code, check) in all.filter(|(_, check)| check.status != Health::Healthy) {
        let since = check.down_since.map_or(String::new(), |at| format!(" since {at}"));
        let error = check.error.as_deref().map_or(String::new(), |error| format!(": {error}"));
        let text = format!("{} of {url} is down{since}{error}", check.name);
        findings.push(finding(code, Severity::Warning, text, INPUT_ADVICE));
    }
    // Every server needs these loops, whatever its roles.
    for name in ["dispatcher", "reporter", "guardian", "poller", "lease"] {
        if !ready.checks.loops.iter().any(|check| check.name == name) {
            let text = format!("loop {name} does not run at {url}");
            findings.push(finding("loop-missing", Severity::Error, text, ADVICE));
        }
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_disk_that_is_nearly_full_is_reported() {
        let text = "Filesystem 1024-blocks Used Available Capacity Mounted on\n/dev/sda1 100000000 95000000 5000000 95% /data\n";
        assert_eq!(parse_df(text), Some((5_000_000, 100_000_000)));
        assert_eq!(parse_df("nonsense"), None);
        let found = disk_finding("/data", 5_000_000, 100_000_000).expect("five percent is too little");
        assert!(found.text.contains("4882 MiB left (5 %)"), "{}", found.text);
        assert!(disk_finding("/data", 900_000, 2_000_000).is_some(), "less than a gibibyte");
        assert_eq!(disk_finding("/data", 50_000_000, 100_000_000), None);
    }

    #[test]
    fn a_late_failing_or_missing_loop_and_an_inbox_that_is_down_are_reported() {
        let beat = |name: &str, status: &str| json!({"name": name, "status": status, "handled": 0, "error": "no"});
        let ready = |loops: Vec<serde_json::Value>| -> Ready {
            serde_json::from_value(json!({"status": "healthy", "checks": {
                "database": {"status": "healthy", "engine": "sqlite", "latencyMs": 0.1},
                "workers": {"status": "healthy", "activeCount": 1},
                "loops": loops,
                "inputs": [
                    {"name": "source:a", "status": "healthy"},
                    {"name": "inbox:b", "status": "degraded", "downSince": "2026-01-31T12:00:00.000Z", "error": "broker: refused"},
                ],
                "sinks": [{"name": "sink:c", "status": "degraded"}],
            }}))
            .expect("a Ready")
        };
        let names = ["dispatcher", "reporter", "guardian", "poller"];
        let mut loops: Vec<_> = names.iter().map(|name| beat(name, "healthy")).collect();
        loops.push(beat("promoter", "unhealthy"));
        loops.push(beat("retention", "degraded"));
        let found = check_loops(&ready(loops), "x");
        let codes: Vec<_> = found.iter().map(|finding| finding.code).collect();
        assert_eq!(codes, ["loop-late", "loop-failing", "input-down", "sink-down", "loop-missing"]);
        assert!(found[0].text.contains("promoter") && found[0].text.contains("never"), "{}", found[0].text);
        assert_eq!(found[2].text, "inbox:b of x is down since 2026-01-31T12:00:00.000Z: broker: refused");
        assert_eq!(found[3].text, "sink:c of x is down");
        assert!(found[4].text.contains("lease"), "{}", found[4].text);
    }

    #[test]
    fn numbers_are_grouped_and_nouns_agree_with_them() {
        assert_eq!(number(1_234_567, "job"), "1 234 567 jobs");
        assert_eq!((number(1, "error").as_str(), number(0, "job").as_str()), ("1 error", "0 jobs"));
    }
}
