//! Creates scratch databases, and removes them at the end.

use std::path::Path;

use anyhow::{Context, Result};
use tokio_postgres::NoTls;

pub enum Scratch {
    Sqlite { folder: std::path::PathBuf, created: usize },
    Postgres { server: String, created: Vec<String> },
}

impl Scratch {
    pub fn sqlite(folder: Option<&Path>) -> Result<Scratch> {
        let base = folder.map_or_else(std::env::temp_dir, Path::to_owned);
        let folder = base.join(format!("faena-bench-{}", std::process::id()));
        std::fs::create_dir_all(&folder).with_context(|| format!("cannot create {}", folder.display()))?;
        Ok(Scratch::Sqlite { folder, created: 0 })
    }

    pub async fn postgres(server: &str) -> Result<Scratch> {
        connect(server).await.context("cannot reach the server of --postgres")?;
        Ok(Scratch::Postgres { server: server.into(), created: Vec::new() })
    }

    pub fn database_kind(&self) -> &'static str {
        match self {
            Scratch::Sqlite { .. } => "sqlite",
            Scratch::Postgres { .. } => "postgres",
        }
    }

    /// Returns the URL of an unused database. Removes the previous ones, which would occupy the page cache.
    pub async fn fresh(&mut self) -> Result<String> {
        match self {
            Scratch::Sqlite { folder, created } => {
                let _ = std::fs::remove_dir_all(&*folder);
                std::fs::create_dir_all(&*folder)?;
                *created += 1;
                Ok(format!("sqlite:{}/{created}.db", folder.display()))
            }
            Scratch::Postgres { server, created } => {
                let client = connect(server).await?;
                for name in created.drain(..) {
                    client.batch_execute(&format!("DROP DATABASE IF EXISTS {name} WITH (FORCE)")).await?;
                }
                let name = format!("faena_bench_{}_{}", std::process::id(), uuid::Uuid::new_v4().simple());
                client.batch_execute(&format!("CREATE DATABASE {name}")).await?;
                // Keeps the removed files from being written back during the next measurement.
                client.batch_execute("CHECKPOINT").await?;
                let mut url = url::Url::parse(server)?;
                url.set_path(&name);
                created.push(name);
                Ok(url.to_string())
            }
        }
    }

    /// Returns the URL of the database for the baseline.
    pub fn baseline_url(&self) -> String {
        match self {
            Scratch::Sqlite { folder, .. } => folder.join("baseline.db").display().to_string(),
            Scratch::Postgres { server, .. } => server.clone(),
        }
    }

    pub async fn remove(&mut self) -> Result<()> {
        match self {
            Scratch::Sqlite { folder, .. } => {
                let _ = std::fs::remove_dir_all(&*folder);
            }
            Scratch::Postgres { server, created } => {
                let client = connect(server).await?;
                for name in created.drain(..) {
                    client.batch_execute(&format!("DROP DATABASE IF EXISTS {name} WITH (FORCE)")).await?;
                }
            }
        }
        Ok(())
    }
}

pub async fn connect(url: &str) -> Result<tokio_postgres::Client> {
    let (client, connection) = tokio_postgres::connect(url, NoTls).await?;
    tokio::spawn(connection);
    Ok(client)
}
