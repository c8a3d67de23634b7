//! Environment variables that look like keys of the configuration but are not.

use super::{ConfigError, keys};

/// Variables with our prefix that the command line reads, or that workers and `shell.run` programs receive.
const NOT_KEYS: [&str; 8] = [
    "FAENA_URL",
    "FAENA_TOKEN",
    "FAENA_CONFIG",
    "FAENA_JOB_ID",
    "FAENA_RUN",
    "FAENA_CORRELATION_ID",
    "FAENA_SCHEDULE_ID",
    "FAENA_SCHEDULE_DUE",
];

/// Rejects a variable that is probably a misspelled key.
pub fn check_unknown(name: &str, value: &str) -> Result<(), ConfigError> {
    let Some(rest) = name.strip_prefix("FAENA_") else { return Ok(()) };
    if rest.starts_with("TEST_") || NOT_KEYS.contains(&name) || is_service_link(rest, value) {
        return Ok(());
    }
    // FAENA_PORT for PORT: some keys have no prefix.
    let hint = match keys().find(|key| key.env == rest) {
        Some(key) => format!("set {} instead", key.env),
        None => "\"faena config\" lists all keys".into(),
    };
    Err(ConfigError(format!("environment {name} is not a known key; {hint}")))
}

/// Recognises the variables that Kubernetes sets in every pod for a service whose name begins with `faena`, such as
/// `FAENA_SERVICE_HOST`, `FAENA_PORT=tcp://10.0.0.1:3000` and `FAENA_API_PORT_3000_TCP_ADDR`. `rest` is the name without `FAENA_`.
fn is_service_link(rest: &str, value: &str) -> bool {
    let words: Vec<&str> = rest.split('_').collect();
    let is_protocol = |word: &str| matches!(word, "TCP" | "UDP" | "SCTP");
    let is_number = |word: &str| !word.is_empty() && word.bytes().all(|byte| byte.is_ascii_digit());
    let has_service = words.windows(2).any(|pair| pair == ["SERVICE", "HOST"] || pair == ["SERVICE", "PORT"]);
    let has_port = words.windows(3).any(|three| three[0] == "PORT" && is_number(three[1]) && is_protocol(three[2]));
    let is_port_url = words.last() == Some(&"PORT") && value.contains("://");
    has_service || has_port || is_port_url
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variables_of_a_kubernetes_service_are_ignored() {
        for (name, value) in [
            ("FAENA_SERVICE_HOST", "10.0.0.1"),
            ("FAENA_SERVICE_PORT", "3000"),
            ("FAENA_SERVICE_PORT_HTTP", "3000"),
            ("FAENA_PORT", "tcp://10.0.0.1:3000"),
            ("FAENA_PORT_3000_TCP", "tcp://10.0.0.1:3000"),
            ("FAENA_PORT_3000_TCP_ADDR", "10.0.0.1"),
            ("FAENA_PORT_3000_TCP_PORT", "3000"),
            ("FAENA_PORT_3000_TCP_PROTO", "tcp"),
            ("FAENA_API_SERVICE_HOST", "10.0.0.1"),
            ("FAENA_API_PORT", "tcp://10.0.0.1:3000"),
        ] {
            assert!(check_unknown(name, value).is_ok(), "{name}={value}");
        }
    }

    #[test]
    fn a_misspelled_key_is_rejected_with_a_hint() {
        let error = |name, value| check_unknown(name, value).expect_err("rejected").to_string();
        assert_eq!(error("FAENA_PORT", "8080"), "environment FAENA_PORT is not a known key; set PORT instead");
        assert_eq!(
            error("FAENA_NOD_LEASE", "1s"),
            "environment FAENA_NOD_LEASE is not a known key; \"faena config\" lists all keys"
        );
    }
}
