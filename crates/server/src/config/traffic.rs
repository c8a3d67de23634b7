//! Limits of the traffic that the server accepts: rates, memory, streams and origins.

use std::{num::NonZeroU32, time::Duration};

use faena_api::{Cors, RequestRate, TrafficConfig};

use super::{Config, ConfigError};

/// Default burst of a limit, in seconds of its rate.
const BURST_SECONDS: u32 = 10;

/// How long the rejection of a request is delayed. It slows down a client that ignores `Retry-After`, and hardly
/// affects one that does not.
const REJECTION_DELAY: Duration = Duration::from_millis(200);

impl Config {
    /// Returns the limits of the traffic, and the origins that may call the API.
    pub fn traffic(&self) -> TrafficConfig {
        TrafficConfig {
            per_key: self.request_rate("limits.requests_per_key", "limits.requests_per_key_burst"),
            per_address: self.request_rate("limits.requests_per_address", "limits.requests_per_address_burst"),
            rejection_delay: REJECTION_DELAY,
            in_flight_bytes: Some(self.in_flight_bytes()),
            max_streams: Some(self.size("server.max_streams")),
            max_streams_per_caller: Some(self.size("server.max_streams_per_caller")),
            cors: Cors { origins: self.names("cors.origins"), credentials: self.text("cors.credentials") == "true" },
        }
    }

    /// Returns the budget for requests in flight. It is at least as large as the largest batch and body, which a
    /// smaller budget would never admit.
    fn in_flight_bytes(&self) -> usize {
        ["server.in_flight_bytes", "server.batch_bytes", "server.body_bytes"]
            .map(|path| self.size(path))
            .into_iter()
            .fold(0, usize::max)
    }

    fn request_rate(&self, rate: &str, burst: &str) -> Option<RequestRate> {
        let number = |path: &str| self.text(path).parse::<NonZeroU32>().ok();
        let per_second = number(rate)?;
        let default = per_second.saturating_mul(NonZeroU32::new(BURST_SECONDS).expect("not zero"));
        Some(RequestRate { per_second, burst: number(burst).unwrap_or(default) })
    }

    /// Rejects settings that browsers do not accept, or that have no effect.
    pub(super) fn check_traffic(&self) -> Result<(), ConfigError> {
        let origin = |path: &str| &self.settings[path].origin;
        if self.text("cors.credentials") == "true" && self.names("cors.origins").iter().any(|name| name == "*") {
            let position = origin("cors.credentials");
            return Err(ConfigError(format!(
                "{position}: cors.credentials: must be false if cors.origins is *; list the origins"
            )));
        }
        for (rate, burst) in [
            ("limits.requests_per_key", "limits.requests_per_key_burst"),
            ("limits.requests_per_address", "limits.requests_per_address_burst"),
        ] {
            if self.text(rate) == "none" && self.text(burst) != "none" {
                return Err(ConfigError(format!("{}: {burst}: has no effect without {rate}", origin(burst))));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn load(environment: &[(&str, &str)]) -> Result<Config, ConfigError> {
        let environment = environment.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
        Config::load((std::path::Path::new("none.toml"), false), environment, &[])
    }

    #[test]
    fn there_is_no_rate_limit_by_default_and_the_default_burst_is_ten_seconds_of_the_rate() {
        let traffic = load(&[]).expect("the defaults are good").traffic();
        assert!(traffic.per_key.is_none() && traffic.per_address.is_none() && traffic.cors.origins.is_empty());
        let traffic = load(&[
            ("FAENA_LIMITS_REQUESTS_PER_KEY", "50"),
            ("FAENA_LIMITS_REQUESTS_PER_ADDRESS", "5"),
            ("FAENA_LIMITS_REQUESTS_PER_ADDRESS_BURST", "7"),
        ])
        .expect("good")
        .traffic();
        let numbers = |rate: Option<RequestRate>| rate.map(|rate| (rate.per_second.get(), rate.burst.get()));
        assert_eq!((numbers(traffic.per_key), numbers(traffic.per_address)), (Some((50, 500)), Some((5, 7))));
    }

    #[test]
    fn settings_that_cannot_work_are_rejected() {
        for (environment, expected) in [
            (vec![("FAENA_CORS_ORIGINS", "example.com")], "cors.origins: \"example.com\" must be * or origins"),
            (
                vec![("FAENA_CORS_ORIGINS", "https://a.example,*"), ("FAENA_CORS_CREDENTIALS", "true")],
                "environment FAENA_CORS_CREDENTIALS: cors.credentials: must be false",
            ),
            (
                vec![("FAENA_LIMITS_REQUESTS_PER_KEY_BURST", "5")],
                "limits.requests_per_key_burst: has no effect without limits.requests_per_key",
            ),
            (vec![("FAENA_LIMITS_REQUESTS_PER_KEY", "0")], "must be a whole number from 1"),
        ] {
            let error = load(&environment).err().expect("rejected").to_string();
            assert!(error.contains(expected), "{error}");
        }
    }
}
