//! Calls to the server, and errors that say what to do.

use std::{fmt, process::ExitCode, time::Duration};

use faena::{ApiRequest, Client, Method};
use serde::de::DeserializeOwned;

use crate::{Connection, output::print};

/// How long an action on many jobs may take before the server answers.
const BULK_TIMEOUT: Duration = Duration::from_secs(330);

/// The server, as one command uses it.
pub struct Api {
    client: Client,
    /// Whether answers are printed as they are.
    pub json: bool,
}

/// Why a command failed.
#[derive(Debug)]
pub enum CommandError {
    Usage(String),
    Api(faena::Error),
    Other(String),
}

impl From<faena::Error> for CommandError {
    fn from(error: faena::Error) -> CommandError {
        match error {
            faena::Error::Invalid(message) => CommandError::Usage(message),
            error => CommandError::Api(error),
        }
    }
}

impl CommandError {
    pub fn exit_code(&self) -> ExitCode {
        ExitCode::from(match self {
            CommandError::Usage(_) => 2,
            CommandError::Api(faena::Error::Unreachable { .. }) => 3,
            CommandError::Api(_) | CommandError::Other(_) => 1,
        })
    }
}

impl fmt::Display for CommandError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            CommandError::Usage(text) | CommandError::Other(text) => f.write_str(text),
            CommandError::Api(error @ faena::Error::Unreachable { .. }) => {
                write!(f, "{error}: {}; ", root_cause(error))?;
                f.write_str("start the server with \"faena serve\", or set --url or FAENA_URL")
            }
            CommandError::Api(error) => f.write_str(&error.with_causes()),
        }
    }
}

/// The errors in between only name the layers of the HTTP client.
fn root_cause(error: &faena::Error) -> String {
    let mut cause: &dyn std::error::Error = error;
    while let Some(source) = cause.source() {
        cause = source;
    }
    cause.to_string()
}

impl Api {
    pub fn new(connection: &Connection) -> Result<Api, CommandError> {
        let mut builder = Client::builder().user_agent(concat!("faena/", env!("CARGO_PKG_VERSION")));
        if let Some(url) = &connection.url {
            builder = builder.url(url);
        }
        Ok(Api { client: builder.build()?, json: connection.json })
    }

    pub fn get(&self, path: &str) -> ApiRequest<'_> {
        self.client.request(Method::GET, path)
    }

    pub fn post(&self, path: &str) -> ApiRequest<'_> {
        self.client.request(Method::POST, path)
    }

    /// Prepares an action on many jobs, which may take minutes.
    pub fn post_bulk(&self, path: &str) -> ApiRequest<'_> {
        self.post(path).timeout(BULK_TIMEOUT)
    }

    pub fn patch(&self, path: &str) -> ApiRequest<'_> {
        self.client.request(Method::PATCH, path)
    }

    pub fn delete(&self, path: &str) -> ApiRequest<'_> {
        self.client.request(Method::DELETE, path)
    }

    /// Sends a request and prints the answer: as `describe` formats it, or unchanged with `--json`.
    ///
    /// JSON is never parsed and written again: large numbers would lose digits.
    pub async fn show<T: DeserializeOwned>(
        &self,
        request: ApiRequest<'_>,
        describe: impl FnOnce(&T) -> String,
    ) -> Result<ExitCode, CommandError> {
        if self.json {
            print(&request.text().await?);
        } else {
            print(&describe(&request.send().await?));
        }
        Ok(ExitCode::SUCCESS)
    }
}

/// Encodes a text as one segment of a path.
pub fn segment(text: &str) -> String {
    let encode = |byte: u8| match byte {
        byte if byte.is_ascii_alphanumeric() || b"-_.~".contains(&byte) => char::from(byte).to_string(),
        byte => format!("%{byte:02X}"),
    };
    text.bytes().map(encode).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_text_can_be_a_segment_of_a_path() {
        assert_eq!(segment("order/7 ñ"), "order%2F7%20%C3%B1");
    }
}
