//! Parses and validates jobs from JSON.
//!
//! REST, gRPC, outbox sources and inboxes share this parser, so a job follows the same rules wherever it comes from. Every bad
//! field is reported with its path, not only the first one.

mod batch;
mod fields;
mod job;
mod json;
pub mod schema;

use std::fmt;

use sha2::{Digest, Sha256};

pub use fields::Fields;
pub use job::parse_retry_policy;
pub use json::check_json;

use crate::{AddressRule, FieldError, JobId, JobLimits, NewJob};

/// Parser for jobs, with the limits of this installation.
#[derive(Clone, Debug, Default)]
pub struct JobParser {
    pub limits: JobLimits,
    /// Addresses that a webhook URL may contain.
    pub addresses: AddressRule,
}

/// Why a request body was rejected.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum ParseError {
    /// The body is larger than `max_bytes`.
    TooLarge {
        max_bytes: usize,
    },
    Invalid(Vec<FieldError>),
}

impl ParseError {
    fn body(message: impl Into<String>) -> ParseError {
        ParseError::Invalid(vec![FieldError::new("body", message)])
    }
}

impl fmt::Display for ParseError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ParseError::TooLarge { max_bytes } => write!(f, "body: must not be larger than {max_bytes} bytes"),
            ParseError::Invalid(errors) => f.write_str(&FieldError::join(errors)),
        }
    }
}

impl std::error::Error for ParseError {}

impl JobParser {
    /// Splits a JSON object into its fields.
    ///
    /// Fails if the body is larger than `max_body_bytes`, not UTF-8, or not a JSON object.
    pub fn fields<'a>(&self, body: &'a [u8]) -> Result<Fields<'a>, ParseError> {
        Fields::parse(body, self.limits.max_body_bytes)
    }

    /// Parses a body that holds one job and gives the job a new id.
    ///
    /// If the job has an idempotency key, its fingerprint is that of the whole body.
    pub fn parse(&self, body: &[u8]) -> Result<NewJob, ParseError> {
        let mut errors = Vec::new();
        let mut job = self.parse_single(self.fields(body)?, JobId::new(), &mut errors);
        if job.options.idempotency_key.is_some() {
            job.fingerprint = Some(fingerprint(body));
        }
        if errors.is_empty() { Ok(job) } else { Err(ParseError::Invalid(errors)) }
    }

    /// Parses one job outside a batch. Appends everything that is wrong with it to `errors`.
    pub fn parse_single(&self, fields: Fields<'_>, id: JobId, errors: &mut Vec<FieldError>) -> NewJob {
        let job = self.parse_job(fields, id, errors);
        if job.reference.is_some() || !job.depends_on_refs.is_empty() {
            let path = if job.reference.is_some() { "ref" } else { "dependsOn" };
            errors.push(FieldError::new(path, "refs work only in a batch; use job ids in dependsOn"));
        }
        job
    }
}

/// Hashes a submitted body, to detect an idempotency key that is reused with a different body.
pub fn fingerprint(body: &[u8]) -> [u8; 32] {
    Sha256::digest(body).into()
}

/// Hashes the content of one job of a batch, which has no request body of its own.
///
/// Hashes the refs instead of the job ids they resolve to, because those ids are new in every request. The resolved ids are the
/// last entries of `depends_on`.
pub fn batch_fingerprint(job: &NewJob) -> [u8; 32] {
    let mut hash = Sha256::new();
    let mut options = job.options.clone();
    options.depends_on.truncate(options.depends_on.len().saturating_sub(job.depends_on_refs.len()));
    let options = serde_json::to_string(&options).unwrap_or_default();
    let refs = serde_json::to_string(&job.depends_on_refs).unwrap_or_default();
    for part in [&job.kind, &job.queue, job.priority.as_str(), &job.payload, &options, &refs] {
        hash.update((part.len() as u64).to_le_bytes());
        hash.update(part);
    }
    hash.finalize().into()
}
