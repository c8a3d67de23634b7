//! Options that several adapters share.

use std::{path::PathBuf, time::Duration};

use faena_domain::parse_duration;

use crate::{CannotStart, repository::Allowed, transport::TransportArguments, words};

#[derive(clap::Args)]
pub struct ServiceArguments {
    #[command(flatten)]
    pub transport: TransportArguments,
    /// Machine whose tasks it serves: coding-task, or a variant with the same states and events; repeat for several
    #[arg(long = "machine", value_name = "NAME", default_value = "coding-task")]
    pub machines: Vec<String>,
    /// Folder for its records and repositories, used by no other process
    #[arg(long, value_name = "FOLDER")]
    pub workdir: PathBuf,
    /// Repository that tasks may name: an absolute path, a URL, or the beginning of one; repeat for several
    #[arg(long = "allow-repository", value_name = "PREFIX", required = true)]
    pub allow_repositories: Vec<String>,
    /// Maximum number of commands that run concurrently
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u16).range(1..=1_000))]
    pub concurrency: u16,
    /// Heartbeat interval; less than half of the silence deadline of the machine
    #[arg(long, value_name = "DURATION", default_value = "60s", value_parser = duration)]
    pub heartbeat: Duration,
    /// Interval at which all tasks are read, to find work whose message was lost
    #[arg(long, value_name = "DURATION", default_value = "60s", value_parser = duration)]
    pub reconcile: Duration,
    /// Maximum number of attempts if work fails with a retryable error
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=20))]
    pub attempts: u32,
}

impl ServiceArguments {
    pub fn allowed(&self) -> Result<Allowed, CannotStart> {
        Allowed::new(&self.allow_repositories).map_err(CannotStart)
    }
}

/// Parses a duration that is not zero.
pub fn duration(text: &str) -> Result<Duration, String> {
    parse_duration(text)
        .filter(|duration| !duration.is_zero())
        .ok_or_else(|| "must be a duration like 500ms, 30s, 5m or 2h".to_owned())
}

/// Parses a number of bytes: `500`, `64KiB`, `10MiB`, `2GiB`.
pub fn bytes(text: &str) -> Result<u64, String> {
    let unit_start = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let unit = match text[unit_start..].trim() {
        "" | "B" => 1,
        "KiB" | "k" => 1 << 10,
        "MiB" | "M" => 1 << 20,
        "GiB" | "G" => 1_u64 << 30,
        _ => return Err("must be a size like 500, 64KiB, 10MiB or 2GiB".into()),
    };
    let number = text[..unit_start].parse::<u64>().ok().and_then(|number| number.checked_mul(unit));
    number.filter(|number| *number > 0).ok_or_else(|| "must be a size like 500, 64KiB, 10MiB or 2GiB".into())
}

/// A command line, split into its words.
#[derive(Clone, Debug)]
pub struct Argv(pub Vec<String>);

pub fn argv(text: &str) -> Result<Argv, String> {
    words::split(text).map(Argv)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_and_durations_have_units() {
        assert_eq!((bytes("64KiB"), bytes("7"), bytes("2GiB")), (Ok(64 << 10), Ok(7), Ok(2 << 30)));
        for text in ["", "0", "x", "-1", "1TB", "99999999999GiB"] {
            assert!(bytes(text).is_err(), "{text}");
        }
        assert!(duration("0s").is_err() && duration("5").is_err() && duration("90s").is_ok());
    }
}
