//! Opens connections and migrates the schema.

use faena_domain::error_chain;
use std::{io::ErrorKind, time::Duration};

use deadpool_postgres::{Manager, ManagerConfig, Pool, PoolError, RecyclingMethod, Runtime};
use rustls_platform_verifier::ConfigVerifierExt;
use tokio_postgres::{Config, NoTls, config::SslMode};
use tokio_postgres_rustls::MakeRustlsConnect;

use crate::{Cause, Result, StoreError, StoreOptions, migrate};

/// Enough for the batchers, a claim, the loops and a few concurrent readers.
const CONNECTIONS: usize = 12;
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

pub fn config(url: &str) -> Result<Config> {
    let mut config: Config = url.parse().map_err(|_| {
        // The message of the parser could contain the password.
        StoreError::Setup(
            "DATABASE_URL is not a valid address; write postgres://user:password@host:5432/database".into(),
        )
    })?;
    config.application_name("faena");
    config.connect_timeout(CONNECT_TIMEOUT);
    config.keepalives_idle(Duration::from_secs(30));
    config.tcp_user_timeout(Duration::from_secs(30));
    Ok(config)
}

/// Returns the TLS settings for `sslmode=require`: the certificate is checked against the roots of the system.
pub fn tls() -> Result<MakeRustlsConnect> {
    let config = rustls::ClientConfig::with_platform_verifier()
        .map_err(|e| StoreError::Setup(format!("cannot set up TLS for PostgreSQL: {e}")))?;
    Ok(MakeRustlsConnect::new(config))
}

pub fn pool(url: &str) -> Result<Pool> {
    let config = config(url)?;
    let manager_config = ManagerConfig { recycling_method: RecyclingMethod::Fast };
    let manager = if config.get_ssl_mode() == SslMode::Require {
        Manager::from_config(config, tls()?, manager_config)
    } else {
        Manager::from_config(config, NoTls, manager_config)
    };
    Pool::builder(manager)
        .max_size(CONNECTIONS)
        .runtime(Runtime::Tokio1)
        .wait_timeout(Some(CONNECT_TIMEOUT))
        .create_timeout(Some(CONNECT_TIMEOUT))
        .recycle_timeout(Some(CONNECT_TIMEOUT))
        .build()
        .map_err(|e| StoreError::Internal(Cause::of(e)))
}

/// Describes in plain words why the pool has no connection. The pool and the driver each add a sentence of their own.
pub fn no_connection(error: PoolError) -> Cause {
    let described = match &error {
        PoolError::Backend(backend) => match backend.as_db_error() {
            Some(rejected) => Some(rejected.message().to_owned()),
            None => connection_problem(backend),
        },
        PoolError::Timeout(_) => Some("no connection in time".to_owned()),
        _ => None,
    };
    described.map_or_else(|| Cause::of(error), Cause::from)
}

/// Returns the error of a database that the operator has to start or to configure.
pub fn unusable(problem: &str) -> StoreError {
    StoreError::Setup(format!(
        "cannot use the PostgreSQL database of DATABASE_URL: {problem}; check that it is running, and the host, user, password and database name"
    ))
}

fn connection_problem(error: &tokio_postgres::Error) -> Option<String> {
    let io = std::error::Error::source(error)?.downcast_ref::<std::io::Error>()?;
    match io.kind() {
        ErrorKind::ConnectionRefused => Some("connection refused".to_owned()),
        ErrorKind::TimedOut => Some("no answer in time".to_owned()),
        // A failed lookup has neither a kind nor a number of its own.
        _ if io.raw_os_error().is_none() && io.to_string().contains("lookup") => {
            Some("the host name is not known".to_owned())
        }
        _ => None,
    }
}

/// Key of the advisory lock that only migrations take: "faena" in ASCII.
const MIGRATION_LOCK: i64 = 0x66_61_65_6e_61;

pub async fn prepare_schema(pool: &Pool, options: &StoreOptions) -> Result<()> {
    let setup = |error: &dyn std::error::Error| unusable(&error_chain(error));
    let mut client = pool.get().await.map_err(|error| unusable(&no_connection(error).to_string()))?;
    let version: i32 =
        client.query_one("SELECT current_setting('server_version_num')::int", &[]).await.map_err(|e| setup(&e))?.get(0);
    if version < 130_000 {
        return Err(StoreError::Setup(format!("PostgreSQL {} is too old; Faena needs 13 or newer", version / 10_000)));
    }
    let tx = client.transaction().await?;
    // Nodes that start together migrate one after the other; the second finds nothing to do.
    tx.execute("SELECT pg_advisory_xact_lock($1)", &[&MIGRATION_LOCK]).await?;
    let known: bool = tx.query_one("SELECT to_regclass('faena.faena_schema') IS NOT NULL", &[]).await?.get(0);
    let found: i32 = if known {
        tx.query_one("SELECT coalesce(max(version), 0) FROM faena.faena_schema", &[]).await?.get(0)
    } else {
        0
    };
    let missing = migrate::missing(options.migrations, found, options.migrate)?;
    if !known {
        tx.batch_execute(
            "CREATE SCHEMA IF NOT EXISTS faena;
             CREATE TABLE faena.faena_schema (version int PRIMARY KEY, name text NOT NULL, applied_at bigint NOT NULL)",
        )
        .await
        .map_err(|e| setup(&e))?;
    }
    for migration in missing {
        tx.batch_execute(migration.postgres).await?;
        tx.execute(
            "INSERT INTO faena.faena_schema VALUES ($1, $2, $3)",
            &[&migration.version, &migration.name, &faena_domain::Timestamp::now().as_ms()],
        )
        .await?;
    }
    tx.commit().await?;
    Ok(())
}
