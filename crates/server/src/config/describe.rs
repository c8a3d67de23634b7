//! Lists the effective configuration with the source of each value, for `faena config`.

use faena_domain::{masked_url, masked_words};

use super::{Config, ValueKind, inboxes, keys, sinks, split};

/// A key, its effective value and the source of the value.
pub type Row = (String, String, String);

impl Config {
    /// Returns every key with its value and source. Secrets are hidden.
    pub fn rows(&self) -> Vec<Row> {
        let mut rows = self.key_rows();
        rows.extend(self.rule_rows());
        rows.extend(self.pools.iter().map(|pool| {
            let text = format!("{} ({} to {})", masked_words(&pool.value.command), pool.value.min, pool.value.max);
            (format!("pool.{}", pool.value.name), text, pool.position.clone())
        }));
        rows.extend(
            self.sinks
                .iter()
                .map(|sink| (format!("sink.{}", sink.value.name), sinks::describe(&sink.value), sink.position.clone())),
        );
        rows.extend(self.sources.iter().map(|source| {
            let (name, text) = source.value.row();
            (format!("outbox.source.{name}"), text, source.position.clone())
        }));
        rows.extend(self.inboxes.iter().map(|inbox| {
            (format!("inbox.{}", inbox.value.name), inboxes::describe(&inbox.value), inbox.position.clone())
        }));
        rows
    }

    fn key_rows(&self) -> Vec<Row> {
        let row = |key: &super::keys::Key| {
            let setting = &self.settings[key.path];
            let value = match key.kind {
                ValueKind::Secret | ValueKind::Endpoint | ValueKind::Redis if !setting.value.is_empty() => {
                    masked_url(&setting.value)
                }
                ValueKind::Secrets | ValueKind::Headers => {
                    split(&setting.value).map(|_| "***").collect::<Vec<_>>().join(",")
                }
                _ => setting.value.clone(),
            };
            (key.path.to_owned(), value, setting.origin.clone())
        };
        keys().map(row).collect()
    }

    fn rule_rows(&self) -> Vec<Row> {
        let queues = self.rules.queues.iter().map(|(name, rule)| {
            let strict = rule.strict.map(|strict| format!("strict {strict}"));
            let fairness = rule.fairness.map(|fairness| format!("fairness {fairness:?}").to_lowercase());
            let text: Vec<String> = strict.into_iter().chain(fairness).collect();
            (format!("queue.{name}"), text.join(", "), "faena.toml".to_owned())
        });
        let limits = self.rules.limits.iter().map(|(scope, limit)| {
            let concurrency = limit.concurrency.map(|max| format!("concurrency {max}"));
            let text: Vec<String> = concurrency.into_iter().chain(limit.rate.map(|rate| rate.to_string())).collect();
            (format!("limit.{} {}", scope.kind(), scope.parts().1), text.join(", "), "faena.toml".to_owned())
        });
        queues.filter(|(_, text, _)| !text.is_empty()).chain(limits).collect()
    }
}
