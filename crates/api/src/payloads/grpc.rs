//! Hides fields of gRPC messages, as their descriptors require.
//!
//! A message is read in its encoded form: fields that are hidden or unknown are left out, so the caller sees their default values.

use std::{
    collections::HashMap,
    pin::Pin,
    sync::OnceLock,
    task::{Context, Poll, ready},
};

use axum::{
    body::{Body, Bytes, HttpBody},
    http::{HeaderName, HeaderValue, header},
    response::Response,
};
use faena_wire::v1::DESCRIPTOR;
use http_body::Frame;
use prost::Message;
use prost_types::{FileDescriptorSet, field_descriptor_proto::Type};
use tonic::Status;

use super::{are_visible, visible::is_visible};

/// Metadata of an answer in which fields are hidden.
const HIDDEN: HeaderName = HeaderName::from_static("x-payloads");
const HEADER_BYTES: usize = 5;

/// Returns the answer to a call as the caller of the current request may see it.
pub fn hide_in_call(path: &str, response: Response) -> Response {
    if are_visible() {
        return response;
    }
    let Some(message) = Protocol::get().answers.get(path.trim_start_matches('/')) else {
        // The answers of health checks and server reflection contain no payloads.
        return response;
    };
    let mut response = response.map(|inner| Body::new(HidingBody { inner, message, pending: Vec::new() }));
    response.headers_mut().remove(header::CONTENT_LENGTH);
    response.headers_mut().insert(HIDDEN, HeaderValue::from_static("hidden"));
    response
}

/// What happens to a field of a message.
enum Rule {
    Show,
    /// Shows the parts of a message that are not hidden.
    Message(String),
    Hide,
}

/// Rules for every message of the protocol.
struct Protocol {
    /// The message that answers each call, by service and name of the call.
    answers: HashMap<String, String>,
    /// Rules of the fields of each message, by their numbers.
    messages: HashMap<String, HashMap<u64, Rule>>,
}

impl Protocol {
    fn get() -> &'static Protocol {
        static PROTOCOL: OnceLock<Protocol> = OnceLock::new();
        PROTOCOL.get_or_init(|| {
            let files = FileDescriptorSet::decode(DESCRIPTOR).expect("the descriptors come from the build");
            Protocol::new(&files)
        })
    }

    fn new(files: &FileDescriptorSet) -> Protocol {
        let mut protocol = Protocol { answers: HashMap::new(), messages: HashMap::new() };
        for file in &files.file {
            for service in &file.service {
                for call in &service.method {
                    let name = format!("{}.{}/{}", file.package(), service.name(), call.name());
                    protocol.answers.insert(name, call.output_type().to_owned());
                }
            }
            for message in &file.message_type {
                let rule = |field: &prost_types::FieldDescriptorProto| {
                    let rule = match field.r#type() {
                        _ if is_visible(message.name(), field.json_name()) => Rule::Show,
                        Type::String | Type::Bytes | Type::Group => Rule::Hide,
                        Type::Message => Rule::Message(field.type_name().to_owned()),
                        _ => Rule::Show,
                    };
                    (u64::from(field.number().unsigned_abs()), rule)
                };
                let rules = message.field.iter().map(rule).collect();
                protocol.messages.insert(format!(".{}.{}", file.package(), message.name()), rules);
            }
        }
        protocol
    }

    /// Copies the fields of an encoded message that are shown. `None`: it is not a valid message.
    fn hide(&self, message: &str, mut encoded: &[u8]) -> Option<Vec<u8>> {
        let rules = self.messages.get(message)?;
        let mut shown = Vec::new();
        while !encoded.is_empty() {
            let start = encoded;
            let tag = varint(&mut encoded)?;
            let content = content(&mut encoded, tag & 7)?;
            let whole = &start[..start.len() - encoded.len()];
            match rules.get(&(tag >> 3)) {
                Some(Rule::Show) => shown.extend_from_slice(whole),
                Some(Rule::Message(name)) => {
                    let inner = self.hide(name, content)?;
                    put_varint(&mut shown, tag);
                    put_varint(&mut shown, inner.len() as u64);
                    shown.extend_from_slice(&inner);
                }
                Some(Rule::Hide) | None => {}
            }
        }
        Some(shown)
    }
}

/// Takes a number from the beginning of an encoded message.
fn varint(encoded: &mut &[u8]) -> Option<u64> {
    let mut number = 0;
    for at in 0..10 {
        let (byte, rest) = encoded.split_first()?;
        *encoded = rest;
        number |= u64::from(byte & 0x7f) << (7 * at);
        if byte & 0x80 == 0 {
            return Some(number);
        }
    }
    None
}

fn put_varint(encoded: &mut Vec<u8>, mut number: u64) {
    while number >= 0x80 {
        encoded.push((number & 0x7f) as u8 | 0x80);
        number >>= 7;
    }
    encoded.push(number as u8);
}

/// Takes the content of a field of this wire type.
fn content<'a>(encoded: &mut &'a [u8], wire_type: u64) -> Option<&'a [u8]> {
    let length = match wire_type {
        0 => {
            let mut rest = *encoded;
            varint(&mut rest)?;
            encoded.len() - rest.len()
        }
        1 => 8,
        2 => usize::try_from(varint(encoded)?).ok()?,
        5 => 4,
        _ => return None,
    };
    let (content, rest) = encoded.split_at_checked(length)?;
    *encoded = rest;
    Some(content)
}

/// The body of an answer whose messages are changed as they pass. Trailers are not changed.
struct HidingBody {
    inner: Body,
    message: &'static str,
    /// Bytes of a message that has not arrived completely.
    pending: Vec<u8>,
}

impl HidingBody {
    /// Takes data, and returns the messages that are complete.
    fn pass(&mut self, data: &[u8]) -> Result<Bytes, Status> {
        self.pending.extend_from_slice(data);
        let mut passed = Vec::new();
        while let Some(&[flags, a, b, c, d]) = self.pending.first_chunk::<HEADER_BYTES>() {
            let end = HEADER_BYTES + u32::from_be_bytes([a, b, c, d]) as usize;
            if self.pending.len() < end {
                break;
            }
            let message: Vec<u8> = self.pending.drain(..end).collect();
            // A compressed message cannot be read, so it is not shown.
            let shown = (flags == 0).then(|| Protocol::get().hide(self.message, &message[HEADER_BYTES..])).flatten();
            let shown = shown.ok_or_else(|| Status::internal("the answer could not be read"))?;
            let length = u32::try_from(shown.len()).map_err(|_| Status::internal("the answer is too large"))?;
            passed.push(0);
            passed.extend_from_slice(&length.to_be_bytes());
            passed.extend_from_slice(&shown);
        }
        Ok(Bytes::from(passed))
    }
}

impl HttpBody for HidingBody {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let this = &mut *self;
        loop {
            match ready!(Pin::new(&mut this.inner).poll_frame(cx)) {
                Some(Ok(frame)) => match frame.into_data() {
                    Ok(data) => match this.pass(&data) {
                        Ok(passed) if passed.is_empty() => {}
                        passed => return Poll::Ready(Some(passed.map(Frame::data))),
                    },
                    Err(trailers) => return Poll::Ready(Some(Ok(trailers))),
                },
                Some(Err(error)) => return Poll::Ready(Some(Err(Status::from_error(error.into())))),
                None => return Poll::Ready(None),
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        self.inner.is_end_stream()
    }
}

#[cfg(test)]
mod tests {
    use faena_wire::v1::{GetJobResponse, Job, JobAttempt, Progress, Step};

    use super::*;

    fn job() -> GetJobResponse {
        let step = Step { name: "charge".into(), result_json: "{}".into(), run: Some(7), completed_at: None };
        let progress = Progress {
            phase: Some("x".into()),
            percentage: Some(12.5),
            message: Some("y".into()),
            ..Progress::default()
        };
        let time = prost_types::Timestamp { seconds: 1_700_000_000, nanos: 5 };
        let attempt =
            JobAttempt { run: Some(3), error: Some("no".into()), finished_at: Some(time), ..JobAttempt::default() };
        GetJobResponse {
            job: Some(Job {
                id: "1".into(),
                tags: vec!["a".into(), "b".into()],
                payload_json: "{\"card\":1}".into(),
                result_json: Some("2".into()),
                error: Some("no such user".into()),
                max_retries: 300,
                created_at: Some(time),
                progress: Some(progress),
                steps: vec![step.clone(), step],
                attempts: vec![attempt],
                ..Job::default()
            }),
        }
    }

    #[test]
    fn texts_are_hidden_unless_they_are_listed() {
        let encoded = job().encode_to_vec();
        let shown = Protocol::get().hide(".faena.v1.GetJobResponse", &encoded).expect("a message");
        let mut expected = job();
        if let Some(job) = &mut expected.job {
            (job.payload_json, job.result_json, job.error) = (String::new(), None, None);
            job.progress = Some(Progress { percentage: Some(12.5), ..Progress::default() });
            job.steps.iter_mut().for_each(|step| step.result_json.clear());
            job.attempts.iter_mut().for_each(|attempt| attempt.error = None);
        }
        assert_eq!(GetJobResponse::decode(shown.as_slice()), Ok(expected));
    }

    #[test]
    fn a_message_that_cannot_be_read_is_not_shown() {
        let encoded = job().encode_to_vec();
        assert_eq!(Protocol::get().hide(".faena.v1.GetJobResponse", &encoded[..encoded.len() - 1]), None);
        assert_eq!(Protocol::get().hide(".faena.v1.Unknown", &encoded), None);
    }

    #[test]
    fn messages_pass_whole_wherever_their_bytes_are_split() {
        let encoded = job().encode_to_vec();
        let mut frame = vec![0];
        frame.extend_from_slice(&(encoded.len() as u32).to_be_bytes());
        frame.extend_from_slice(&encoded);
        let frames = [frame.clone(), frame].concat();
        let passed = |size: usize| {
            let message = ".faena.v1.GetJobResponse";
            let mut body = HidingBody { inner: Body::empty(), message, pending: Vec::new() };
            let parts = frames.chunks(size).map(|part| body.pass(part).expect("messages"));
            parts.collect::<Vec<_>>().concat()
        };
        assert!(!passed(1).is_empty() && passed(1) == passed(10_000));
        let mut body = HidingBody { inner: Body::empty(), message: ".faena.v1.GetJobResponse", pending: Vec::new() };
        assert!(body.pass(&[1, 0, 0, 0, 1, 9]).is_err(), "a compressed message");
    }
}
