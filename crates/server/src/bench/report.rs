//! Prints results as a table and as JSON.

use faena_cli::{output::print, progress::spinner, table::table};
use indicatif::ProgressBar;
use serde::Serialize;

pub struct Report {
    rows: Vec<Row>,
    /// Shows on a terminal what is being measured.
    spinner: ProgressBar,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Row {
    database: String,
    what: String,
    value: f64,
    unit: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    ratio: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    goal: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reached: Option<bool>,
}

impl Report {
    pub fn new() -> Report {
        Report { rows: Vec::new(), spinner: spinner("preparing") }
    }

    /// Shows what is measured next.
    pub fn step(&self, what: &str) {
        if self.spinner.is_hidden() {
            eprintln!("{what}");
        } else {
            self.spinner.set_message(what.to_owned());
        }
    }

    /// Adds a result without a goal.
    pub fn plain(&mut self, database: &str, what: &str, value: f64, unit: &str) {
        self.add(database, what, value, unit, None, None, None);
    }

    /// Adds a result and its ratio to a baseline of the same run. `goal` is the ratio to reach.
    pub fn against(&mut self, database: &str, what: &str, value: f64, unit: &str, baseline: f64, goal: Option<f64>) {
        let ratio = value / baseline;
        let reached = goal.map(|goal| ratio >= goal);
        self.add(
            database,
            what,
            value,
            unit,
            Some(ratio),
            goal.map(|goal| format!(">= {:.0} %", goal * 100.0)),
            reached,
        );
    }

    pub fn at_most(&mut self, database: &str, what: &str, value: f64, unit: &str, goal: f64) {
        self.add(database, what, value, unit, None, Some(format!("<= {} {unit}", tenths(goal))), Some(value <= goal));
    }

    pub fn at_least(&mut self, database: &str, what: &str, value: f64, unit: &str, goal: f64) {
        self.add(database, what, value, unit, None, Some(format!(">= {} {unit}", tenths(goal))), Some(value >= goal));
    }

    #[expect(clippy::too_many_arguments, reason = "one row, one argument per column")]
    fn add(
        &mut self,
        database: &str,
        what: &str,
        value: f64,
        unit: &str,
        ratio: Option<f64>,
        goal: Option<String>,
        reached: Option<bool>,
    ) {
        let row = Row { database: database.into(), what: what.into(), value, unit: unit.into(), ratio, goal, reached };
        self.spinner.suspend(|| eprintln!("  {what}: {} {unit}", number(value)));
        self.rows.push(row);
    }

    pub fn print(&self) {
        self.spinner.finish_and_clear();
        let mut table = table(["database", "measurement", "value", "ratio to baseline", "goal", "result"]);
        for row in &self.rows {
            table.add_row([
                row.database.clone(),
                row.what.clone(),
                format!("{} {}", number(row.value), row.unit),
                row.ratio.map(|ratio| format!("{:.0} %", ratio * 100.0)).unwrap_or_default(),
                row.goal.clone().unwrap_or_default(),
                match row.reached {
                    Some(true) => "reached".into(),
                    Some(false) => "MISSED".into(),
                    None => String::new(),
                },
            ]);
        }
        print(&table.to_string());
    }

    pub fn json(&self) -> String {
        let body = serde_json::json!({
            "version": env!("CARGO_PKG_VERSION"),
            "cores": std::thread::available_parallelism().map_or(0, usize::from),
            "figures": self.rows,
        });
        serde_json::to_string_pretty(&body).expect("results are valid JSON")
    }
}

fn number(value: f64) -> String {
    if value >= 1_000.0 {
        let whole = format!("{value:.0}");
        let mut text = String::new();
        for (at, digit) in whole.chars().enumerate() {
            if at > 0 && (whole.len() - at) % 3 == 0 {
                text.push(' ');
            }
            text.push(digit);
        }
        text
    } else {
        format!("{value:.2}")
    }
}

/// Rounds a goal that depends on a measurement.
fn tenths(goal: f64) -> f64 {
    (goal * 10.0).round() / 10.0
}
