//! Opens the pool of connections and migrates the schema.

use faena_domain::error_chain;
use std::{io::ErrorKind, time::Duration};

use deadpool_postgres::{Manager, ManagerConfig, Object, Pool, PoolError, RecyclingMethod, Runtime};
use rustls_platform_verifier::ConfigVerifierExt;
use tokio_postgres::{Config, GenericClient, config::TargetSessionAttrs};
use tokio_postgres_rustls::MakeRustlsConnect;

use super::hosts::Hosts;
use crate::{Cause, Result, StoreError, StoreOptions, migrate};

/// Size of the pool: enough for the batchers, a claim, the loops and a few concurrent readers.
const CONNECTIONS: usize = 12;
/// Time limit for opening a TCP connection, unless the URL has `connect_timeout`.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// Reads a URL without adding defaults.
pub fn parse(url: &str) -> Result<Config> {
    url.parse().map_err(|_| {
        // The message of the parser could contain the password.
        StoreError::Setup("the database URL is not valid; write postgres://user:password@host:5432/database".into())
    })
}

/// Reads a URL. With several hosts, sessions must accept writes unless the URL has `target_session_attrs`.
pub fn config(url: &str) -> Result<Config> {
    let mut config = parse(url)?;
    config.application_name("faena");
    if config.get_connect_timeout().is_none() {
        config.connect_timeout(CONNECT_TIMEOUT);
    }
    config.keepalives_idle(Duration::from_secs(30));
    config.tcp_user_timeout(Duration::from_secs(30));
    let count = config.get_hosts().len().max(config.get_hostaddrs().len());
    if count > 1 && !url.contains("target_session_attrs=") {
        config.target_session_attrs(TargetSessionAttrs::ReadWrite);
    }
    Ok(config)
}

/// Returns the TLS settings for `sslmode=require`: the certificate is checked against the roots of the system.
pub fn tls() -> Result<MakeRustlsConnect> {
    let config = rustls::ClientConfig::with_platform_verifier()
        .map_err(|e| StoreError::Setup(format!("cannot set up TLS for PostgreSQL: {e}")))?;
    Ok(MakeRustlsConnect::new(config))
}

/// Creates the pool. Waiting for a free connection takes no longer than `timeout`.
pub fn pool(url: &str, hosts: &Hosts, timeout: Duration) -> Result<Pool> {
    let manager_config = ManagerConfig { recycling_method: RecyclingMethod::Fast };
    let manager = Manager::from_connect(config(url)?, hosts.clone(), manager_config);
    // Every host has its own timeout; this one only has to be longer.
    let connect = hosts.longest_connect() + Duration::from_secs(1);
    Pool::builder(manager)
        .max_size(CONNECTIONS)
        .runtime(Runtime::Tokio1)
        .wait_timeout(Some(timeout))
        .create_timeout(Some(connect))
        .recycle_timeout(Some(CONNECT_TIMEOUT))
        .build()
        .map_err(|e| StoreError::Internal(Cause::of(e)))
}

/// Describes why the pool has no connection, without the text that the pool and the driver add.
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
        "cannot use the PostgreSQL database: {problem}; check that it is running, and the host, user, password and database name"
    ))
}

fn connection_problem(error: &tokio_postgres::Error) -> Option<String> {
    let Some(source) = std::error::Error::source(error) else {
        return (error.to_string() == "timeout waiting for server").then(|| "no answer in time".to_owned());
    };
    let io = source.downcast_ref::<std::io::Error>()?;
    match io.kind() {
        ErrorKind::PermissionDenied if io.raw_os_error().is_none() => {
            Some("the server is read-only (a standby, or a demoted primary)".to_owned())
        }
        ErrorKind::ConnectionRefused => Some("connection refused".to_owned()),
        ErrorKind::TimedOut => Some("no answer in time".to_owned()),
        // A failed lookup has neither a kind nor a number of its own.
        _ if io.raw_os_error().is_none() && io.to_string().contains("lookup") => {
            Some("cannot resolve the host name".to_owned())
        }
        _ => None,
    }
}

/// Advice for a pooler that gives each transaction another session and does not know prepared statements.
pub const PREPARED_STATEMENTS_LOST: &str = "a connection pooler in transaction mode loses prepared statements; use PgBouncer 1.21 or newer \
     with max_prepared_statements, or pool_mode = session, or connect to PostgreSQL directly";

/// Checks that a prepared statement survives another transaction, which it does not behind an old pooler in transaction mode.
///
/// The statement is prepared in one session of the server. A transaction of another connection then occupies that session, so a
/// pooler runs the statement in another one.
async fn check_prepared_statements(pool: &Pool, client: &Object) -> Result<()> {
    let other = pool.get().await.map_err(|error| unusable(&no_connection(error).to_string()))?;
    let check = async {
        let statement = client.prepare("SELECT 1").await?;
        other.batch_execute("BEGIN; SELECT 1").await?;
        client.query_one(&statement, &[]).await?;
        other.batch_execute("COMMIT").await
    };
    // With a pooler that has a single session, the statement waits for the transaction.
    let outcome = tokio::time::timeout(CONNECT_TIMEOUT, check).await;
    match outcome {
        Ok(Err(error)) if is_lost_statement(&error) => Err(unusable(PREPARED_STATEMENTS_LOST)),
        Ok(Err(error)) => Err(unusable(&error_chain(&error))),
        Ok(Ok(())) => Ok(()),
        Err(_) => {
            drop(Object::take(other));
            Ok(())
        }
    }
}

/// Returns whether a session did not know a prepared statement, or had one of another client with the same name.
pub fn is_lost_statement(error: &tokio_postgres::Error) -> bool {
    error.code().is_some_and(|code| matches!(code.code(), "26000" | "42P05"))
}

/// Key of the advisory lock that only migrations take: "faena" in ASCII.
const MIGRATION_LOCK: i64 = 0x66_61_65_6e_61;

pub async fn prepare_schema(pool: &Pool, options: &StoreOptions) -> Result<()> {
    let mut client = pool.get().await.map_err(|error| unusable(&no_connection(error).to_string()))?;
    check_prepared_statements(pool, &client).await?;
    let tx = client.transaction().await?;
    migrate_in(&*tx, options).await?;
    require_complete(&*tx).await?;
    tx.commit().await?;
    Ok(())
}

/// Applies missing migrations in the current transaction.
pub async fn migrate_in(client: &impl GenericClient, options: &StoreOptions) -> Result<()> {
    let setup = |error: &dyn std::error::Error| unusable(&error_chain(error));
    let version: i32 =
        client.query_one("SELECT current_setting('server_version_num')::int", &[]).await.map_err(|e| setup(&e))?.get(0);
    if version < 130_000 {
        return Err(StoreError::Setup(format!("PostgreSQL {} is too old; Faena needs 13 or newer", version / 10_000)));
    }
    // Nodes that start together migrate one after the other; the second finds nothing to do.
    client.execute("SELECT pg_advisory_xact_lock($1)", &[&MIGRATION_LOCK]).await?;
    let known: bool = client.query_one("SELECT to_regclass('faena.faena_schema') IS NOT NULL", &[]).await?.get(0);
    let found: i32 = if known {
        client.query_one("SELECT coalesce(max(version), 0) FROM faena.faena_schema", &[]).await?.get(0)
    } else {
        0
    };
    let missing = migrate::missing(options.migrations, found, options.migrate)?;
    if !known {
        client
            .batch_execute(
                "CREATE SCHEMA IF NOT EXISTS faena;
                 CREATE TABLE faena.faena_schema (version int PRIMARY KEY, name text NOT NULL, applied_at bigint NOT NULL)",
            )
            .await
            .map_err(|e| setup(&e))?;
    }
    for migration in missing {
        client.batch_execute(migration.postgres).await?;
        client
            .execute(
                "INSERT INTO faena.faena_schema VALUES ($1, $2, $3)",
                &[&migration.version, &migration.name, &faena_domain::Timestamp::now().as_ms()],
            )
            .await?;
    }
    Ok(())
}

/// Fails if the database contains only a part of another one: a move to it has not ended.
pub async fn require_complete(client: &impl GenericClient) -> Result<()> {
    let row = client.query_one("SELECT to_regclass('faena.move_progress') IS NOT NULL", &[]).await?;
    if row.get(0) {
        let text = "a move from SQLite to this database is not complete; run the same \"faena move\" again, which continues it";
        return Err(StoreError::Setup(text.into()));
    }
    Ok(())
}
