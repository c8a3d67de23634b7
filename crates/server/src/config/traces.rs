//! `[traces]`, and the environment variables that every program with OpenTelemetry reads.
//!
//! The variables of OpenTelemetry set keys of `[traces]`. The last of these takes precedence: file, `OTEL_…`,
//! `FAENA_TRACES_…`.

use std::collections::BTreeMap;

use faena_engine::traces::{Collector, TraceConfig};
use reqwest::header::{HeaderMap, HeaderName, HeaderValue};
use url::Url;

use super::{Config, ConfigError, split};

/// Path that is added to the URL of a collector.
const PATH: &str = "v1/traces";

/// Names and values, in the order of the environment.
type Variables = Vec<(String, String)>;

impl Config {
    /// Returns where to send spans, if a collector is configured.
    pub(super) fn traces(&self) -> Option<TraceConfig> {
        let url = endpoint(self.text("traces.endpoint")).ok()?;
        let mut attributes = BTreeMap::from([("service.version".to_owned(), env!("CARGO_PKG_VERSION").to_owned())]);
        attributes.extend(pairs(self.text("traces.attributes")).unwrap_or_default());
        attributes.insert("service.name".into(), self.text("traces.service_name").into());
        let headers = headers(self.text("traces.headers")).unwrap_or_default();
        let collector = Collector { url, headers, attributes: attributes.into_iter().collect() };
        Some(TraceConfig { collector, sample_ratio: ratio(self.text("traces.sample_ratio")).unwrap_or(1.0) })
    }

    /// Applies the variables of OpenTelemetry and returns the others. A variable for traces overrides the one for all signals.
    pub(super) fn read_open_telemetry(
        &mut self,
        environment: impl IntoIterator<Item = (String, String)>,
    ) -> Result<Variables, ConfigError> {
        let (variables, others): (Variables, Variables) =
            environment.into_iter().partition(|(name, _)| name.starts_with("OTEL_"));
        let variables: BTreeMap<String, String> = variables.into_iter().collect();
        // An empty variable counts as not set.
        let value = |name: &'static str| {
            variables.get(name).map(|value| value.trim()).filter(|value| !value.is_empty()).map(|value| (name, value))
        };
        if let Some((name, base)) = value("OTEL_EXPORTER_OTLP_ENDPOINT") {
            self.set("traces.endpoint", format!("{}/{PATH}", base.trim_end_matches('/')), origin(name))?;
        }
        for (path, names) in [
            ("traces.endpoint", ["OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", ""]),
            ("traces.headers", ["OTEL_EXPORTER_OTLP_TRACES_HEADERS", "OTEL_EXPORTER_OTLP_HEADERS"]),
            ("traces.attributes", ["OTEL_RESOURCE_ATTRIBUTES", ""]),
            ("traces.service_name", ["OTEL_SERVICE_NAME", ""]),
        ] {
            if let Some((name, value)) = names.into_iter().find_map(value) {
                self.set(path, value.to_owned(), origin(name))?;
            }
        }
        let named_service = pairs(self.text("traces.attributes")).ok().and_then(|mut all| all.remove("service.name"));
        if let Some(service) = named_service.filter(|_| value("OTEL_SERVICE_NAME").is_none()) {
            self.set("traces.service_name", service, origin("OTEL_RESOURCE_ATTRIBUTES"))?;
        }
        self.read_sampler(value("OTEL_TRACES_SAMPLER"), value("OTEL_TRACES_SAMPLER_ARG"))?;
        for (name, off) in [("OTEL_TRACES_EXPORTER", "none"), ("OTEL_SDK_DISABLED", "true")] {
            if value(name).is_some_and(|(_, value)| value.eq_ignore_ascii_case(off)) {
                self.set("traces.endpoint", String::new(), origin(name))?;
            }
        }
        let protocols = ["OTEL_EXPORTER_OTLP_PROTOCOL", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"];
        let unused = protocols.into_iter().filter_map(value).filter(|(_, protocol)| *protocol != "http/protobuf");
        self.unused.extend(unused.map(|(name, _)| (name, "spans are exported with http/protobuf")));
        Ok(others)
    }

    fn read_sampler(
        &mut self,
        sampler: Option<(&'static str, &str)>,
        argument: Option<(&'static str, &str)>,
    ) -> Result<(), ConfigError> {
        let Some((name, sampler)) = sampler else { return Ok(()) };
        // The sampled flag of a caller's trace context always decides, so the samplers with and without a parent are the same.
        let (name, ratio) = match sampler.trim_start_matches("parentbased_") {
            "always_on" => (name, "1"),
            "always_off" => (name, "0"),
            "traceidratio" => argument.unwrap_or((name, "1")),
            _ => {
                return Err(ConfigError(format!(
                    "environment {name}: {sampler:?} is not supported; use always_on, always_off or traceidratio, each also with parentbased_ in front"
                )));
            }
        };
        self.set("traces.sample_ratio", ratio.to_owned(), origin(name))
    }
}

fn origin(name: &str) -> String {
    format!("environment {name}")
}

/// Returns the URL to send spans to. Without a path, that of OTLP is added.
pub fn endpoint(text: &str) -> Result<Url, String> {
    let invalid = || "must be a URL like http://localhost:4318".to_owned();
    let mut url: Url = text.parse().map_err(|_| invalid())?;
    if !matches!(url.scheme(), "http" | "https") || url.host_str().is_none() {
        return Err(invalid());
    }
    if !url.username().is_empty() || url.password().is_some() {
        return Err("must not contain a password; set traces.headers instead".into());
    }
    if url.path() == "/" {
        url.set_path(PATH);
    }
    Ok(url)
}

/// Parses the headers for the collector. The message of an error does not contain a value.
pub fn headers(text: &str) -> Result<HeaderMap, String> {
    let mut headers = HeaderMap::new();
    for (at, (name, value)) in pairs(text)?.into_iter().enumerate() {
        let invalid = |what: &str| {
            format!("must be headers like name=value separated by commas; {what} of number {} is not valid", at + 1)
        };
        let name: HeaderName = name.parse().map_err(|_| invalid("the name"))?;
        let mut value = HeaderValue::from_str(&value).map_err(|_| invalid("the value"))?;
        value.set_sensitive(true);
        headers.insert(name, value);
    }
    Ok(headers)
}

pub fn ratio(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(ratio) if (0.0..=1.0).contains(&ratio) => Ok(ratio),
        _ => Err("must be a number from 0 to 1, such as 0.05".into()),
    }
}

/// Parses `name=value` pairs that are separated by commas, in which other characters are percent-encoded.
pub fn pairs(text: &str) -> Result<BTreeMap<String, String>, String> {
    let pair = |(at, part): (usize, &str)| match part.split_once('=') {
        Some((name, value)) if !name.trim().is_empty() => Ok((name.trim().to_owned(), percent_decoded(value.trim()))),
        _ => Err(format!("must be pairs like name=value separated by commas; number {} is not one", at + 1)),
    };
    split(text).enumerate().map(pair).collect()
}

fn percent_decoded(text: &str) -> String {
    // A form encodes a space as `+`; here `+` is a plus sign.
    let text = format!("v={}", text.replace('+', "%2B").replace('&', "%26"));
    url::form_urlencoded::parse(text.as_bytes()).next().map_or_else(String::new, |(_, value)| value.into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn load(environment: &[(&str, &str)]) -> Result<Config, ConfigError> {
        let environment = environment.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
        Config::load((std::path::Path::new("/does/not/exist"), false), environment, &[])
    }

    fn traces(environment: &[(&str, &str)]) -> Option<TraceConfig> {
        load(environment).expect("valid").engine().traces
    }

    fn error(environment: &[(&str, &str)]) -> String {
        load(environment).err().expect("rejected").to_string()
    }

    #[test]
    fn without_an_endpoint_no_spans_are_exported() {
        assert!(traces(&[("OTEL_SERVICE_NAME", "jobs")]).is_none());
        let endpoint = ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://collector:4318");
        assert!(traces(&[endpoint]).is_some());
        assert!(traces(&[endpoint, ("OTEL_SDK_DISABLED", "true")]).is_none());
        assert!(traces(&[endpoint, ("OTEL_TRACES_EXPORTER", "none")]).is_none());
        assert!(traces(&[("OTEL_EXPORTER_OTLP_ENDPOINT", "")]).is_none(), "an empty variable counts as not set");
    }

    #[test]
    fn the_path_of_otlp_is_added_to_a_base_url() {
        let url = |name, value| traces(&[(name, value)]).expect("traces").collector.url.to_string();
        assert_eq!(url("FAENA_TRACES_ENDPOINT", "http://collector:4318"), "http://collector:4318/v1/traces");
        assert_eq!(url("FAENA_TRACES_ENDPOINT", "https://c/otlp/v1/traces"), "https://c/otlp/v1/traces");
        assert_eq!(url("OTEL_EXPORTER_OTLP_ENDPOINT", "https://c/otlp/"), "https://c/otlp/v1/traces");
        assert_eq!(url("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "https://c/spans"), "https://c/spans");
    }

    #[test]
    fn the_variables_of_open_telemetry_are_read() {
        let traces = traces(&[
            ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://c:4318"),
            ("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer%20s3cret, x-team=a+b%2Cc"),
            ("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=prod,service.name=other"),
            ("OTEL_SERVICE_NAME", "jobs"),
            ("OTEL_TRACES_SAMPLER", "parentbased_traceidratio"),
            ("OTEL_TRACES_SAMPLER_ARG", "0.25"),
        ])
        .expect("traces");
        assert!((traces.sample_ratio - 0.25).abs() < f64::EPSILON);
        assert_eq!(traces.collector.headers["authorization"], "Bearer s3cret");
        assert_eq!(traces.collector.headers["x-team"], "a+b,c");
        let attribute = |key: &str| {
            traces.collector.attributes.iter().find(|(name, _)| name == key).map(|(_, value)| value.as_str())
        };
        assert_eq!(attribute("service.name"), Some("jobs"));
        assert_eq!(attribute("deployment.environment.name"), Some("prod"));
        assert!(!format!("{traces:?}").contains("s3cret"), "a secret is not shown");
    }

    #[test]
    fn the_name_of_the_service_may_be_one_of_the_attributes() {
        let config = load(&[("OTEL_RESOURCE_ATTRIBUTES", "service.name=orders")]).expect("valid");
        assert_eq!(config.text("traces.service_name"), "orders");
    }

    #[test]
    fn variables_of_faena_override_those_of_open_telemetry() {
        for order in [0, 1] {
            let mut environment =
                [("FAENA_TRACES_ENDPOINT", "http://own:4318"), ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://all:4318")];
            environment.rotate_left(order);
            let url = traces(&environment).expect("traces").collector.url;
            assert_eq!(url.host_str(), Some("own"));
        }
    }

    #[test]
    fn another_protocol_is_reported_as_unused() {
        let config = load(&[("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")]).expect("valid");
        assert_eq!(
            config.unused_variables(),
            [("OTEL_EXPORTER_OTLP_PROTOCOL", "spans are exported with http/protobuf")]
        );
    }

    #[test]
    fn an_invalid_value_names_its_origin_and_hides_secrets() {
        assert_eq!(
            error(&[("OTEL_EXPORTER_OTLP_ENDPOINT", "collector:4318")]),
            "environment OTEL_EXPORTER_OTLP_ENDPOINT: traces.endpoint: must be a URL like http://localhost:4318"
        );
        assert_eq!(
            error(&[("FAENA_TRACES_ENDPOINT", "http://user:pw@c:4318")]),
            "environment FAENA_TRACES_ENDPOINT: traces.endpoint: must not contain a password; set traces.headers instead"
        );
        assert_eq!(
            error(&[("OTEL_EXPORTER_OTLP_HEADERS", "authorization=a%0As3cret")]),
            "environment OTEL_EXPORTER_OTLP_HEADERS: traces.headers: must be headers like name=value separated by commas; the value of number 1 is not valid"
        );
        assert_eq!(
            error(&[("FAENA_TRACES_HEADERS", "s3cret")]),
            "environment FAENA_TRACES_HEADERS: traces.headers: must be pairs like name=value separated by commas; number 1 is not one"
        );
        assert_eq!(
            error(&[("OTEL_TRACES_SAMPLER", "traceidratio"), ("OTEL_TRACES_SAMPLER_ARG", "5")]),
            "environment OTEL_TRACES_SAMPLER_ARG: traces.sample_ratio: \"5\" must be a number from 0 to 1, such as 0.05"
        );
        assert_eq!(
            error(&[("OTEL_TRACES_SAMPLER", "jaeger_remote")]),
            "environment OTEL_TRACES_SAMPLER: \"jaeger_remote\" is not supported; use always_on, always_off or traceidratio, each also with parentbased_ in front"
        );
    }
}
