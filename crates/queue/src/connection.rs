//! Connects to the server that has the keys: the given one, the master that the sentinels name, or the master of the slot in a cluster.

use std::time::Duration;

use redis::{
    AsyncConnectionConfig, Client, ConnectionAddr, ConnectionInfo, IntoConnectionInfo, RedisError, Value,
    aio::MultiplexedConnection,
};

use crate::{
    address::{Login, RedisAddress},
    keys::Keys,
};

pub const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);

/// A connection to the master that has the keys.
#[derive(Clone)]
pub struct Connection {
    pub redis: MultiplexedConnection,
    pub keys: Keys,
    pub is_cluster: bool,
}

/// Connects. Tries each host in turn, and returns the error of the last.
pub async fn connect(address: &RedisAddress, prefix: &str, timeout: Duration) -> Result<Connection, String> {
    let mut last = "no host".to_owned();
    for host in &address.hosts {
        let attempt = match &address.sentinel {
            Some((master, login)) => connect_by_sentinel(address, host, master, login, prefix, timeout).await,
            None => connect_directly(address, host, prefix, timeout).await,
        };
        match attempt {
            Ok(connection) => return Ok(connection),
            Err(error) => last = address.redact(&format!("{}:{}: {error}", host.0, host.1)),
        }
    }
    Err(last)
}

async fn connect_by_sentinel(
    address: &RedisAddress,
    sentinel: &(String, u16),
    master: &str,
    login: &Login,
    prefix: &str,
    timeout: Duration,
) -> Result<Connection, String> {
    let mut connection = open(address, sentinel, login, 0, timeout).await?;
    let found: Option<(String, u16)> = redis::cmd("SENTINEL")
        .arg("get-master-addr-by-name")
        .arg(master)
        .query_async(&mut connection)
        .await
        .map_err(describe)?;
    let host = found.ok_or_else(|| format!("the sentinel does not know the master {master:?}"))?;
    connect_directly(address, &host, prefix, timeout).await
}

async fn connect_directly(
    address: &RedisAddress,
    host: &(String, u16),
    prefix: &str,
    timeout: Duration,
) -> Result<Connection, String> {
    let mut redis = open(address, host, &address.login, address.database, timeout).await?;
    // A server that is loading its data, or needs a password, answers with an error here.
    let _: Value = redis::cmd("PING").query_async(&mut redis).await.map_err(describe)?;
    let info: String = redis::cmd("INFO").arg("cluster").query_async(&mut redis).await.unwrap_or_default();
    let is_cluster = info.contains("cluster_enabled:1");
    let keys = Keys::new(prefix, is_cluster);
    if is_cluster {
        let owner = slot_owner(&mut redis, host, &keys.meta()).await?;
        if owner != *host {
            redis = open(address, &owner, &address.login, 0, timeout).await?;
        }
    }
    check_master(&mut redis).await?;
    Ok(Connection { redis, keys, is_cluster })
}

/// Fails for a replica: after a failover the previous master may answer, and must not be used.
async fn check_master(redis: &mut MultiplexedConnection) -> Result<(), String> {
    // The login may not be allowed to run this command. Then the first write fails on a replica.
    let info: String = redis::cmd("INFO").arg("replication").query_async(redis).await.unwrap_or_default();
    if info.contains("role:slave") { Err("it is a replica, not the master".into()) } else { Ok(()) }
}

/// Returns the master of the slot of a key.
async fn slot_owner(
    redis: &mut MultiplexedConnection,
    asked: &(String, u16),
    key: &str,
) -> Result<(String, u16), String> {
    let slot: i64 = redis::cmd("CLUSTER").arg("KEYSLOT").arg(key).query_async(redis).await.map_err(describe)?;
    let slots: Vec<Vec<Value>> = redis::cmd("CLUSTER").arg("SLOTS").query_async(redis).await.map_err(describe)?;
    for range in slots {
        let [Value::Int(first), Value::Int(last), Value::Array(master), ..] = range.as_slice() else { continue };
        if !(*first..=*last).contains(&slot) {
            continue;
        }
        let [name, Value::Int(port), ..] = master.as_slice() else { continue };
        let name: String = redis::from_redis_value(name.clone()).unwrap_or_default();
        let port = u16::try_from(*port).map_err(|_| "the cluster names an invalid port".to_owned())?;
        // A node that does not know its own address leaves it out.
        return Ok((if name.is_empty() { asked.0.clone() } else { name }, port));
    }
    Err("no node of the cluster serves the slot of the queue".into())
}

async fn open(
    address: &RedisAddress,
    (host, port): &(String, u16),
    login: &Login,
    database: i64,
    timeout: Duration,
) -> Result<MultiplexedConnection, String> {
    let client = Client::open(info(address, host, *port, login, database)?).map_err(describe)?;
    let config =
        AsyncConnectionConfig::new().set_connection_timeout(Some(CONNECT_TIMEOUT)).set_response_timeout(Some(timeout));
    client.get_multiplexed_async_connection_with_config(&config).await.map_err(describe)
}

fn info(address: &RedisAddress, host: &str, port: u16, login: &Login, database: i64) -> Result<ConnectionInfo, String> {
    let target = if address.is_tls {
        ConnectionAddr::TcpTls { host: host.to_owned(), port, insecure: false, tls_params: None }
    } else {
        ConnectionAddr::Tcp(host.to_owned(), port)
    };
    let info = target.into_connection_info().map_err(describe)?;
    let mut settings = info.redis_settings().clone().set_db(database).set_skip_set_lib_name();
    if let Some(user) = &login.user {
        settings = settings.set_username(user);
    }
    if let Some(password) = &login.password {
        settings = settings.set_password(password);
    }
    Ok(info.set_redis_settings(settings))
}

#[expect(clippy::needless_pass_by_value, reason = "passed to map_err")]
fn describe(error: RedisError) -> String {
    error.to_string()
}
