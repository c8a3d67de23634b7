//! Where health checks and metrics are served.

use super::Config;

impl Config {
    /// Returns host and port of the second listener for health checks and metrics, if this node has one.
    pub fn health_address(&self) -> Option<(&str, u16)> {
        let is_open = match self.text("health.mode") {
            "always" => true,
            "never" => false,
            _ => !self.roles().api,
        };
        let host = match self.text("health.host") {
            "" => self.text("server.host"),
            host => host,
        };
        let port = u16::try_from(self.number("health.port")).expect("bounded by its key");
        is_open.then_some((host, port))
    }

    /// Returns the URL at which a program on this machine reaches the health checks, if they are served at all.
    ///
    /// Prefers the second listener: it needs neither TLS nor a client certificate.
    pub fn health_url(&self) -> Option<String> {
        if let Some((host, port)) = self.health_address() {
            return Some(format!("http://{}:{port}", reachable(host)));
        }
        let scheme = if self.text("tls.certificate").is_empty() { "http" } else { "https" };
        let api = (self.text("server.host"), self.port());
        self.roles().api.then(|| format!("{scheme}://{}:{}", reachable(api.0), api.1))
    }
}

/// Returns the host for a URL: loopback if the server listens on every address, and IPv6 in brackets.
fn reachable(host: &str) -> String {
    match host {
        "0.0.0.0" => "127.0.0.1".to_owned(),
        "::" => "[::1]".to_owned(),
        host if host.contains(':') && !host.starts_with('[') => format!("[{host}]"),
        host => host.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(environment: &[(&str, &str)]) -> Config {
        let environment = environment.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
        Config::load(("faena.toml".as_ref(), false), environment, &[]).expect("good")
    }

    #[test]
    fn only_a_node_without_the_api_has_a_second_port_unless_it_is_configured() {
        assert_eq!(config(&[]).health_address(), None);
        let worker = ("FAENA_SERVER_ROLES", "worker");
        assert_eq!(config(&[worker]).health_address(), Some(("127.0.0.1", 3001)));
        assert_eq!(config(&[worker, ("HOST", "::")]).health_address(), Some(("::", 3001)));
        let own = [worker, ("HOST", "::"), ("FAENA_HEALTH_HOST", "::1"), ("FAENA_HEALTH_PORT", "9")];
        assert_eq!(config(&own).health_address(), Some(("::1", 9)));
        assert_eq!(config(&[worker, ("FAENA_HEALTH_MODE", "never")]).health_address(), None);
        assert_eq!(config(&[("FAENA_HEALTH_MODE", "always")]).health_address(), Some(("127.0.0.1", 3001)));
    }

    #[test]
    fn health_checks_are_reached_on_this_machine() {
        let url = |environment: &[(&str, &str)]| config(environment).health_url();
        assert_eq!(url(&[]).as_deref(), Some("http://127.0.0.1:3000"));
        assert_eq!(url(&[("HOST", "::"), ("PORT", "8")]).as_deref(), Some("http://[::1]:8"));
        assert_eq!(url(&[("HOST", "fd00::1")]).as_deref(), Some("http://[fd00::1]:3000"));
        let tls = ("FAENA_TLS_CERTIFICATE", "c.pem");
        assert_eq!(url(&[("HOST", "0.0.0.0"), tls]).as_deref(), Some("https://127.0.0.1:3000"));
        assert_eq!(url(&[tls, ("FAENA_HEALTH_MODE", "always")]).as_deref(), Some("http://127.0.0.1:3001"));
        assert_eq!(url(&[("FAENA_SERVER_ROLES", "engine"), ("FAENA_HEALTH_MODE", "never")]), None);
    }
}
