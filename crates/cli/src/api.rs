//! Calls the server, and turns errors into messages that say what to do.

use std::{fmt, process::ExitCode, time::Duration};

use faena::{ApiRequest, Client, Method};
use faena_domain::outage;
use serde::de::DeserializeOwned;

use crate::{
    Connection,
    output::{print, show_exact_times},
    progress::spinner,
};

/// How long a bulk action may take before the server answers.
const BULK_TIMEOUT: Duration = Duration::from_secs(330);

/// Which option of a command sets a field of the API, where their names differ.
pub type FieldOptions = &'static [(&'static str, &'static str)];

/// The server that a command calls.
pub struct Api {
    client: Client,
    url: String,
    field_options: FieldOptions,
    /// Whether answers are printed as JSON, unchanged.
    pub json: bool,
}

/// Why a command failed.
#[derive(Debug)]
pub enum CommandError {
    Usage(String),
    Api(faena::Error),
    /// The server rejected what these options say.
    Options(Vec<(String, String)>),
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
            CommandError::Api(_) | CommandError::Options(_) | CommandError::Other(_) => 1,
        })
    }
}

impl CommandError {
    /// Returns how long the server asks the caller to wait before the next call.
    pub fn retry_after(&self) -> Option<Duration> {
        match self {
            CommandError::Api(error) => error.retry_after(),
            _ => None,
        }
    }
}

impl fmt::Display for CommandError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            CommandError::Usage(text) | CommandError::Other(text) => f.write_str(text),
            CommandError::Options(errors) => match errors.as_slice() {
                [(option, message)] => write!(f, "{option}: {message}"),
                errors => {
                    write!(f, "{} options are not valid", errors.len())?;
                    errors.iter().try_for_each(|(option, message)| write!(f, "\n  {option}: {message}"))
                }
            },
            CommandError::Api(error @ faena::Error::Unreachable { .. }) => {
                write!(f, "{error}: {}; ", outage(error))?;
                f.write_str("start the server with \"faena serve\", or set --url or FAENA_URL")
            }
            CommandError::Api(faena::Error::Decode { what, .. }) => {
                write!(f, "cannot read {what}; is this a Faena server of the same version?")
            }
            CommandError::Api(error @ faena::Error::Response { code: faena::ErrorCode::Unauthorized, .. }) => {
                write!(f, "{error}; set FAENA_TOKEN to an API key that is valid")
            }
            CommandError::Api(error) => f.write_str(&error.with_causes()),
        }
    }
}

impl Api {
    pub fn new(connection: &Connection) -> Result<Api, CommandError> {
        let mut builder = Client::builder().user_agent(concat!("faena/", env!("CARGO_PKG_VERSION")));
        if let Some(url) = &connection.url {
            builder = builder.url(url);
        }
        let client = builder.build()?;
        if connection.utc {
            show_exact_times();
        }
        let url = connection.url.clone().or_else(|| std::env::var("FAENA_URL").ok());
        let url = url.unwrap_or_else(|| "http://127.0.0.1:3000".to_owned());
        Ok(Api { client, url, field_options: &[], json: connection.json })
    }

    /// Returns the URL of the server, to show it.
    pub fn url(&self) -> String {
        self.url.clone()
    }

    /// Sets the options that errors name instead of these fields. Other fields are converted: `maxRetries` to
    /// `--max-retries`.
    pub fn with_options(self, field_options: FieldOptions) -> Api {
        Api { field_options, ..self }
    }

    /// Names the options of the command instead of the fields of the API.
    pub fn name_options(&self, error: faena::Error) -> CommandError {
        match error {
            faena::Error::Response { code: faena::ErrorCode::ValidationError, details, .. } if !details.is_empty() => {
                let option = |path: &str| option_name(path, self.field_options);
                CommandError::Options(details.into_iter().map(|field| (option(&field.path), field.message)).collect())
            }
            error => error.into(),
        }
    }

    pub fn get(&self, path: &str) -> ApiRequest<'_> {
        self.client.request(Method::GET, path)
    }

    pub fn post(&self, path: &str) -> ApiRequest<'_> {
        self.client.request(Method::POST, path)
    }

    /// Prepares a bulk action, which may take minutes.
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
            print(&request.text().await.map_err(|error| self.name_options(error))?);
        } else {
            print(&describe(&request.send().await.map_err(|error| self.name_options(error))?));
        }
        Ok(ExitCode::SUCCESS)
    }
}

impl Api {
    /// Does the same as [`Api::show`] for a request that may take minutes. A terminal shows a spinner meanwhile.
    pub async fn show_long<T: DeserializeOwned>(
        &self,
        request: ApiRequest<'_>,
        what: impl Into<String>,
        describe: impl FnOnce(&T) -> String,
    ) -> Result<ExitCode, CommandError> {
        let spinner = spinner(what);
        let text = if self.json { request.text().await } else { request.send().await.map(|answer| describe(&answer)) };
        spinner.finish_and_clear();
        print(&text.map_err(|error| self.name_options(error))?);
        Ok(ExitCode::SUCCESS)
    }
}

/// Returns the option that sets a field: `--tag` for `tags[2]`, `--max-retries` for `maxRetries`.
fn option_name(path: &str, field_options: FieldOptions) -> String {
    let path = path.strip_prefix("filter.").unwrap_or(path);
    let field = path.split(['.', '[']).next().unwrap_or(path);
    if let Some((_, option)) = field_options.iter().find(|(known, _)| *known == field) {
        return (*option).to_owned();
    }
    match field {
        "id" => "ID".to_owned(),
        "body" => "options".to_owned(),
        field => {
            let kebab = |c: char| if c.is_uppercase() { format!("-{}", c.to_lowercase()) } else { c.to_string() };
            format!("--{}", field.chars().map(kebab).collect::<String>())
        }
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
    fn errors_name_the_option_of_a_field() {
        const OPTIONS: FieldOptions = &[("scheduledAt", "--at"), ("tags", "--tag")];
        let named =
            ["maxRetries", "scheduledAt", "tags[2]", "filter.reason", "id"].map(|path| option_name(path, OPTIONS));
        assert_eq!(named, ["--max-retries", "--at", "--tag", "--reason", "ID"]);
        let one = CommandError::Options(vec![("--at".into(), "must be a time".into())]);
        assert_eq!(one.to_string(), "--at: must be a time");
        let two = CommandError::Options(vec![("--at".into(), "a".into()), ("--tag".into(), "b".into())]);
        assert_eq!(two.to_string(), "2 options are not valid\n  --at: a\n  --tag: b");
    }

    #[test]
    fn any_text_can_be_a_segment_of_a_path() {
        assert_eq!(segment("order/7 ñ"), "order%2F7%20%C3%B1");
    }
}
