//! Inspects the Redis server and the content of the queue for `faena doctor`. Changes nothing.

use crate::{
    QueueError, RedisQueue,
    client::Command,
    redis_queue::{plain, read},
};

/// Maximum number of `SCAN` calls per search: a server that is shared with other programs may have many keys.
const SCAN_ROUNDS: usize = 1_000;
const KEYS_PER_ROUND: usize = 1_000;

/// What the Redis server reports about itself.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct ServerInfo {
    pub version: String,
    pub is_cluster: bool,
    /// `noeviction` is the only setting under which Redis never drops entries.
    pub eviction_policy: Option<String>,
}

impl RedisQueue {
    pub async fn info(&self) -> Result<ServerInfo, QueueError> {
        let mut connection = self.client.connection().await?;
        let command = |section: &str| Command::Plain(redis::cmd("INFO").arg(section).clone());
        let answers = self.client.run(&mut connection, &[command("server"), command("memory")]).await?;
        let text: String = answers.into_iter().map(|answer| read::<String>(Some(answer)).unwrap_or_default()).collect();
        let field =
            |name: &str| text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':')).map(str::to_owned);
        let version = field("valkey_version").map(|version| format!("Valkey {version}"));
        Ok(ServerInfo {
            version: version.or(field("redis_version").map(|version| format!("Redis {version}"))).unwrap_or_default(),
            is_cluster: connection.is_cluster,
            eviction_policy: field("maxmemory_policy"),
        })
    }

    /// Returns the format of the data; 0 if it is not a number.
    pub async fn format(&self) -> Result<Option<u32>, QueueError> {
        let mut connection = self.client.connection().await?;
        let command = Command::Plain(redis::cmd("HGET").arg(connection.keys.meta()).arg("format").clone());
        let answers = self.client.run(&mut connection, &[command]).await?;
        let text: Option<String> = read(answers.into_iter().next())?;
        Ok(text.map(|text| text.parse().unwrap_or(0)))
    }

    /// Returns the stored ids of the jobs in flight. Foreign clients may have added any text.
    pub async fn in_flight(&self) -> Result<Vec<String>, QueueError> {
        let mut connection = self.client.connection().await?;
        let command = plain("HKEYS", &connection.keys.processing());
        read(self.client.run(&mut connection, &[command]).await?.into_iter().next())
    }

    /// Returns up to `limit` keys under the prefix that do not belong to the queue.
    pub async fn unknown_keys(&self, limit: usize) -> Result<Vec<String>, QueueError> {
        let mut connection = self.client.connection().await?;
        let mut unknown = Vec::new();
        let mut cursor = "0".to_owned();
        for _ in 0..SCAN_ROUNDS {
            let mut command = redis::cmd("SCAN");
            command.arg(&cursor).arg("MATCH").arg(connection.keys.pattern()).arg("COUNT").arg(KEYS_PER_ROUND);
            let answers = self.client.run(&mut connection, &[Command::Plain(command)]).await?;
            let (next, found): (String, Vec<String>) = read(answers.into_iter().next())?;
            unknown.extend(found.into_iter().filter(|key| !connection.keys.is_known(key)));
            cursor = next;
            if cursor == "0" || unknown.len() >= limit {
                break;
            }
        }
        // `SCAN` may return a key twice.
        unknown.sort();
        unknown.dedup();
        unknown.truncate(limit);
        Ok(unknown)
    }
}
