//! `[llm]`: the language model of `llm.chat` jobs.

use faena_engine::LlmConfig;

use super::{Config, traces};

impl Config {
    /// Returns the language model, if one is configured.
    pub(super) fn llm(&self) -> Option<LlmConfig> {
        let base_url = self.text("llm.base_url").parse().ok()?;
        let headers = traces::headers(self.text("llm.headers")).unwrap_or_default();
        let max_tokens = self.text("llm.max_tokens").parse().unwrap_or(4_096);
        Some(LlmConfig { base_url, model: self.text("llm.model").to_owned(), headers, max_tokens })
    }
}
