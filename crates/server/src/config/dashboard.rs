//! The settings of the dashboard.

use faena_dashboard::DashboardConfig;

use super::Config;

impl Config {
    /// Returns the settings of the dashboard. Fails if the base path cannot be part of an address.
    pub fn dashboard(&self) -> anyhow::Result<DashboardConfig> {
        let path = self.text("server.base_path").trim_matches('/');
        let is_valid = path.chars().all(|character| character.is_ascii_alphanumeric() || "-._~/".contains(character));
        anyhow::ensure!(is_valid, "server.base_path must consist of letters, digits, -, ., _, ~ and /, is {path:?}");
        let base_path = if path.is_empty() { String::new() } else { format!("/{path}") };
        Ok(DashboardConfig { base_path, configuration: self.rows(), has_tls: self.tls_files()?.is_some() })
    }
}
