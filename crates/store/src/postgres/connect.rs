//! Connections and the schema.

use faena_domain::error_chain;
use std::time::Duration;

use deadpool_postgres::{Manager, ManagerConfig, Pool, RecyclingMethod, Runtime};
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
        .map_err(|e| StoreError::Broken(Cause::of(e)))
}

/// A key for `pg_advisory_xact_lock` of our own: "faena" in ASCII.
const MIGRATION_LOCK: i64 = 0x66_61_65_6e_61;

pub async fn prepare_schema(pool: &Pool, options: &StoreOptions) -> Result<()> {
    let setup = |e: &dyn std::error::Error| {
        StoreError::Setup(format!(
            "cannot use the PostgreSQL database of DATABASE_URL: {}; check that it runs, and the host, user, password and database",
            error_chain(e)
        ))
    };
    let mut client = pool.get().await.map_err(|e| setup(&e))?;
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
