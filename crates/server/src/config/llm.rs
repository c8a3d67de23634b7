//! `[llm]`: the language model of `llm.chat` jobs.

use faena_engine::LlmConfig;

use super::{Config, traces};

impl Config {
    /// Returns the language model, if one is configured.
    pub(super) fn llm(&self) -> Option<LlmConfig> {
        let base_url = self.text("llm.base_url").parse().ok()?;
        let headers = traces::headers(self.text("llm.headers")).unwrap_or_default();
        let daily = self.number("llm.daily_tokens");
        Some(LlmConfig {
            headers,
            max_tokens: self.number("llm.max_tokens"),
            max_prompt_bytes: self.size("llm.max_prompt_bytes"),
            max_answer_bytes: self.size("llm.max_answer_bytes"),
            timeout: self.duration("llm.timeout"),
            daily_tokens: Some(daily).filter(|tokens| *tokens > 0),
            ..LlmConfig::new(base_url, self.text("llm.model").to_owned())
        })
    }
}
