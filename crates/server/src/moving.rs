//! `faena move`: moves an installation from SQLite to PostgreSQL, and checks both with the doctor.
//!
//! The store moves and verifies (`store/src/transfer.rs`). This module shows the progress, and compares what the doctor finds before
//! and after: the move must not add an error.

use std::{
    process::ExitCode,
    time::{Duration, Instant},
};

use faena_cli::{output::print, progress};
use faena_domain::Timestamp;
use faena_store::{
    StoreError,
    doctor::{self, Finding, Inspection, Severity},
    transfer::{self, Moved, Phase, Resume, Step, Survey},
};
use serde_json::{Value, json};

use crate::doctor::number;

#[derive(clap::Args)]
pub struct Arguments {
    /// Database to move: sqlite:FILE. It is not changed
    #[arg(long, value_name = "URL")]
    from: String,
    /// Empty database to move to: postgres://user:password@host/database [default: the configured database]
    #[arg(long, value_name = "URL")]
    pub to: Option<String>,
    /// Show what would be moved and check the target; change nothing
    #[arg(long)]
    dry_run: bool,
    /// Discard what an unfinished move has copied, and begin again
    #[arg(long)]
    restart: bool,
    /// Output JSON
    #[arg(long)]
    json: bool,
}

const FAILED: u8 = 1;

/// Moves the database `--from` to `to`: the value of `--to`, or the configured database.
pub async fn run(arguments: &Arguments, to: &str) -> anyhow::Result<ExitCode> {
    if !arguments.from.starts_with("sqlite:") {
        let text =
            "--from: must be sqlite:FILE, such as sqlite:faena.db; \"faena move\" moves from SQLite to PostgreSQL";
        return Err(StoreError::Setup(text.into()).into());
    }
    let resume = if arguments.restart { Resume::Discard } else { Resume::Continue };
    if arguments.dry_run {
        let survey = transfer::survey(&arguments.from, to, resume).await.map_err(name_option)?;
        print(&if arguments.json { survey_json(&survey).to_string() } else { survey_text(&survey) });
        return Ok(ExitCode::SUCCESS);
    }
    let (started, now) = (Instant::now(), Timestamp::now());
    let before = inspect(&arguments.from, now).await?;
    if before.findings.iter().any(|finding| finding.code == "file-damaged") {
        let text = "the source is damaged; run \"faena doctor\" on it, or move an undamaged backup";
        return Err(StoreError::Setup(text.into()).into());
    }
    let bar = progress::bar(0, "starting");
    let step = |step: Step<'_>| {
        bar.set_length(step.total);
        bar.set_position(step.done);
        let phase = if step.phase == Phase::Copy { "copying" } else { "verifying" };
        bar.set_message(format!("{phase} {}", step.table));
    };
    let moved = transfer::run(&arguments.from, to, resume, now, &step).await;
    bar.finish_and_clear();
    let moved = moved.map_err(name_option)?;
    let after = match moved.moved_at {
        Some(_) => None,
        None => Some(inspect(to, now).await?),
    };
    let added = after.iter().flat_map(|after| added_errors(&before, after)).collect();
    let report = Report { moved, jobs: before.jobs, added, took: started.elapsed() };
    print(&if arguments.json { report.json().to_string() } else { report.text(&arguments.from) });
    Ok(if report.added.is_empty() { ExitCode::SUCCESS } else { ExitCode::from(FAILED) })
}

async fn inspect(url: &str, now: Timestamp) -> anyhow::Result<Inspection> {
    let bar = progress::bar(0, "checking");
    let progress = |name: &'static str, at: usize, of: usize| {
        bar.set_length(of as u64);
        bar.set_position(at as u64);
        bar.set_message(format!("checking {name}"));
    };
    let inspection = doctor::inspect(url, now, &progress).await.map_err(name_option);
    bar.finish_and_clear();
    Ok(inspection?)
}

/// Writes "the target database" where a message names `DATABASE_URL`, because this command can take the URL from `--to`.
fn name_option(error: StoreError) -> StoreError {
    match error {
        StoreError::Setup(text) => {
            StoreError::Setup(text.replace("the PostgreSQL database of DATABASE_URL", "the target database"))
        }
        other => other,
    }
}

/// Returns the errors that the target has and the source did not have.
fn added_errors(before: &Inspection, after: &Inspection) -> Vec<Finding> {
    let known =
        |code: &str| before.findings.iter().filter(|finding| finding.code == code).map(|found| found.count).sum();
    // Both inspections use the time at which the move began, so during the second one the clock seems to be behind.
    let is_added = |finding: &&Finding| {
        finding.severity == Severity::Error && finding.code != "clock-skew" && finding.count > known(finding.code)
    };
    after.findings.iter().filter(is_added).cloned().collect()
}

fn survey_json(survey: &Survey) -> Value {
    let tables = survey.tables.iter().map(|table| json!({"name": table.name, "rows": table.rows}));
    json!({
        "dryRun": true,
        "tables": tables.collect::<Vec<_>>(),
        "rows": survey.rows(),
        "copiedRows": survey.copied,
        "movedAt": survey.moved_at,
        "inUseBy": survey.in_use_by,
    })
}

fn survey_text(survey: &Survey) -> String {
    if let Some(at) = survey.moved_at {
        return format!("this source was moved to this target at {at}; there is nothing to do");
    }
    let filled = survey.tables.iter().filter(|table| table.rows > 0);
    let mut lines: Vec<String> = filled.map(|table| format!("{:<20} {:>12}", table.name, table.rows)).collect();
    lines.push(format!("{} in {}", number(survey.rows(), "row"), number(survey.tables.len() as u64, "table")));
    lines.push(match survey.copied {
        0 => "the target is empty".to_owned(),
        copied => format!("{} in the target; the move would continue there", number(copied, "row")),
    });
    lines.extend(survey.in_use_by.as_ref().map(|server| format!("stop the server of the source first ({server})")));
    lines.join("\n")
}

struct Report {
    moved: Moved,
    jobs: u64,
    added: Vec<Finding>,
    took: Duration,
}

impl Report {
    fn json(&self) -> Value {
        let tables = self.moved.tables.iter();
        let tables = tables.map(|table| json!({"name": table.name, "rows": table.rows, "checksum": table.checksum}));
        let added = self.added.iter().map(|finding| json!({"code": finding.code, "text": finding.text}));
        json!({
            "dryRun": false,
            "tables": tables.collect::<Vec<_>>(),
            "rows": self.moved.rows(),
            "jobs": self.jobs,
            "resumedRows": self.moved.resumed,
            "movedAt": self.moved.moved_at,
            "addedErrors": added.collect::<Vec<_>>(),
            "tookMs": u64::try_from(self.took.as_millis()).unwrap_or(u64::MAX),
        })
    }

    fn text(&self, from: &str) -> String {
        if let Some(at) = self.moved.moved_at {
            return format!("this source was moved to this target at {at}; there is nothing to do");
        }
        let mut lines = vec![format!(
            "moved {} of {} ({}) in {:.1} s; every row was verified",
            number(self.moved.rows(), "row"),
            number(self.moved.tables.len() as u64, "table"),
            number(self.jobs, "job"),
            self.took.as_secs_f64()
        )];
        if self.moved.resumed > 0 {
            lines.push(format!("continued after {} of an earlier move", number(self.moved.resumed, "row")));
        }
        if self.added.is_empty() {
            lines.push(format!(
                "set database.url to the target and start the server there; do not start one on {from} again, its jobs would run twice"
            ));
        }
        for finding in &self.added {
            let (what, advice) = (&finding.text, finding.advice);
            lines.push(format!("error    {}  {what} → {advice}", finding.code));
        }
        lines.join("\n")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn inspection(errors: &[(&'static str, Severity, u64)]) -> Inspection {
        let findings = errors.iter().map(|&(code, severity, count)| Finding {
            code,
            severity,
            count,
            text: String::new(),
            advice: "",
            fixable: false,
        });
        Inspection { database_kind: "sqlite", jobs: 0, in_use_by: None, findings: findings.collect() }
    }

    #[test]
    fn only_errors_that_the_source_did_not_have_count() {
        use Severity::{Error, Warning};
        let before = inspection(&[("node-dead", Error, 1), ("counter-drift", Error, 2)]);
        let after = inspection(&[
            ("node-dead", Error, 1),
            ("counter-drift", Error, 3),
            ("clock-skew", Error, 1),
            ("default-partition", Warning, 5),
            ("wrong-lane", Error, 1),
        ]);
        let codes: Vec<&str> = added_errors(&before, &after).iter().map(|finding| finding.code).collect();
        assert_eq!(codes, ["counter-drift", "wrong-lane"]);
    }
}
