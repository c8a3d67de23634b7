//! One call to the server, with errors that say what to do.

use std::{fmt, time::Duration};

use faena_wire::ErrorBody;
use reqwest::{Method, RequestBuilder, Response};
use serde::de::DeserializeOwned;

use crate::{Connection, print};

pub struct Client {
    http: reqwest::Client,
    base: String,
    /// Answers are shown as they came.
    json: bool,
}

#[derive(Debug)]
pub enum Problem {
    Usage(String),
    Unreachable { url: String, why: String },
    Refused { code: String, message: String, details: Vec<String> },
    Other(String),
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Problem::Usage(text) | Problem::Other(text) => f.write_str(text),
            Problem::Unreachable { url, why } => {
                write!(
                    f,
                    "cannot reach {url}: {why}; start the server with `faena serve`, or name it with --url or FAENA_URL"
                )
            }
            Problem::Refused { code, message, details } => {
                write!(f, "{message} ({code})")?;
                // One fault is the message itself.
                for detail in details.iter().filter(|_| details.len() > 1) {
                    write!(f, "\n  {detail}")?;
                }
                Ok(())
            }
        }
    }
}

impl Client {
    pub fn new(connection: &Connection) -> Result<Client, Problem> {
        let url = connection.url.clone().or_else(|| std::env::var("FAENA_URL").ok());
        let base = url.unwrap_or_else(|| "http://127.0.0.1:3000".into()).trim_end_matches('/').to_owned();
        if !(base.starts_with("http://") || base.starts_with("https://")) {
            return Err(Problem::Usage(format!("{base} is no address of a server; write http://host:port")));
        }
        let mut http = reqwest::Client::builder();
        let host = base.split("://").nth(1).unwrap_or("");
        if ["127.", "localhost", "[::1]"].iter().any(|local| host.starts_with(local)) {
            // A proxy cannot reach this machine's own loopback.
            http = http.no_proxy();
        }
        let http = http
            .connect_timeout(Duration::from_secs(5))
            .user_agent(concat!("faena/", env!("CARGO_PKG_VERSION")))
            .build()
            .map_err(|e| Problem::Other(e.to_string()))?;
        Ok(Client { http, base, json: connection.json })
    }

    pub fn request(&self, method: Method, path: &str) -> RequestBuilder {
        self.http.request(method, format!("{}{path}", self.base))
    }

    /// Sends and reads the answer.
    pub async fn call<T: DeserializeOwned>(&self, request: RequestBuilder) -> Result<T, Problem> {
        let answer = self.send(request.timeout(Duration::from_secs(30))).await?;
        answer.json().await.map_err(|e| Problem::Other(format!("the answer was not understood: {e}")))
    }

    /// Sends and shows the answer: as it came with `--json`, else in words.
    pub async fn show<T: DeserializeOwned>(
        &self,
        request: RequestBuilder,
        words: impl FnOnce(&T) -> String,
    ) -> Result<(), Problem> {
        if self.json {
            print(&self.text(request).await?);
        } else {
            print(&words(&self.call(request).await?));
        }
        Ok(())
    }

    /// Sends; an error of the server becomes ours.
    pub async fn send(&self, request: RequestBuilder) -> Result<Response, Problem> {
        let answer = request.send().await.map_err(|e| self.unreachable(&e))?;
        if answer.status().is_success() {
            return Ok(answer);
        }
        let status = answer.status();
        match answer.json::<ErrorBody>().await {
            Ok(body) => Err(Problem::Refused {
                code: body.error.code,
                message: body.error.message,
                details: body
                    .error
                    .details
                    .into_iter()
                    .map(|fault| format!("{}: {}", fault.path, fault.message))
                    .collect(),
            }),
            Err(_) => Err(Problem::Other(format!("{} answered {status}; is that a faena server?", self.base))),
        }
    }

    fn unreachable(&self, error: &reqwest::Error) -> Problem {
        let mut why = error.to_string();
        let mut source = std::error::Error::source(error);
        while let Some(cause) = source {
            why = cause.to_string();
            source = cause.source();
        }
        Problem::Unreachable { url: self.base.clone(), why }
    }

    /// The same for what may take minutes.
    pub async fn patient_text(&self, request: RequestBuilder) -> Result<String, Problem> {
        let answer = self.send(request.timeout(Duration::from_secs(330))).await?;
        answer.text().await.map_err(|e| Problem::Other(format!("the answer did not arrive whole: {e}")))
    }

    /// The answer as it was written: read and written again, a large number would not be the same.
    pub async fn text(&self, request: RequestBuilder) -> Result<String, Problem> {
        let answer = self.send(request.timeout(Duration::from_secs(30))).await?;
        answer.text().await.map_err(|e| Problem::Other(format!("the answer did not arrive whole: {e}")))
    }
}
