//! Reads server-sent events.

use std::time::Duration;

use futures_util::{StreamExt, stream::BoxStream};
use tokio::time::timeout;

/// The server sends something every 15 s; a stream that is silent for this long is dead.
pub(crate) const SILENCE_LIMIT: Duration = Duration::from_secs(45);
/// An event contains at most one job. A larger event ends the stream.
const MAX_EVENT_BYTES: usize = 64 * 1024 * 1024;

/// One message of an event stream.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct StreamEvent {
    /// The position in the stream, to continue from with the header `Last-Event-ID`.
    pub id: Option<String>,
    /// The name of the event.
    pub event: Option<String>,
    /// The data. Empty if the message only keeps the connection alive or moves the position.
    pub data: String,
}

/// A stream of server-sent events, as [`ApiRequest::stream`](crate::ApiRequest::stream) opens it.
///
/// Dropping it closes the connection.
pub struct EventStream {
    chunks: BoxStream<'static, reqwest::Result<Vec<u8>>>,
    buffer: EventBuffer,
}

impl EventStream {
    pub(crate) fn new(response: reqwest::Response) -> EventStream {
        let chunks = response.bytes_stream().map(|chunk| chunk.map(Vec::from)).boxed();
        EventStream { chunks, buffer: EventBuffer::default() }
    }

    /// Returns the next message, or `None` if the stream has ended, was interrupted, or was silent for 45 seconds.
    ///
    /// To continue, open a new stream with the last [`StreamEvent::id`] in the header `Last-Event-ID`.
    pub async fn next(&mut self) -> Option<StreamEvent> {
        loop {
            if let Some(event) = self.buffer.next() {
                return Some(event);
            }
            let chunk = timeout(SILENCE_LIMIT, self.chunks.next()).await.ok()??.ok()?;
            self.buffer.push(&chunk);
            if self.buffer.bytes.len() > MAX_EVENT_BYTES {
                return None;
            }
        }
    }
}

/// Splits received bytes into messages.
#[derive(Default)]
struct EventBuffer {
    bytes: Vec<u8>,
    /// No message ends before this position, so the search continues here.
    searched: usize,
}

impl EventBuffer {
    fn push(&mut self, chunk: &[u8]) {
        self.bytes.extend_from_slice(chunk);
    }

    fn next(&mut self) -> Option<StreamEvent> {
        // A line end is one byte in UTF-8, so a character that is split between two chunks does no harm.
        let from = self.searched.saturating_sub(1);
        let Some(end) = self.bytes[from..].windows(2).position(|pair| pair == b"\n\n") else {
            self.searched = self.bytes.len();
            return None;
        };
        let message: Vec<u8> = self.bytes.drain(..from + end + 2).collect();
        self.searched = 0;
        Some(parse(&String::from_utf8_lossy(&message)))
    }
}

fn parse(text: &str) -> StreamEvent {
    let mut event = StreamEvent::default();
    for line in text.lines() {
        let Some((field, value)) = line.split_once(':') else { continue };
        let value = value.strip_prefix(' ').unwrap_or(value);
        match field {
            "id" => event.id = Some(value.to_owned()),
            "event" => event.event = Some(value.to_owned()),
            "data" if event.data.is_empty() => event.data.push_str(value),
            "data" => event.data.extend(["\n", value]),
            // A comment, or a field that the protocol tells readers to ignore.
            _ => {}
        }
    }
    event
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_found_wherever_the_stream_is_split() {
        let text =
            "id: 7\nevent: job.created\ndata: {\"name\":\"año\"}\n\n: heartbeat\nid: 9\n\ndata: a\ndata:b\n\nid: 10";
        let event = |id: Option<&str>, event: Option<&str>, data: &str| StreamEvent {
            id: id.map(Into::into),
            event: event.map(Into::into),
            data: data.into(),
        };
        for size in 1..text.len() {
            let mut buffer = EventBuffer::default();
            let mut found = Vec::new();
            for chunk in text.as_bytes().chunks(size) {
                buffer.push(chunk);
                while let Some(event) = buffer.next() {
                    found.push(event);
                }
            }
            let expected = [
                event(Some("7"), Some("job.created"), "{\"name\":\"año\"}"),
                event(Some("9"), None, ""),
                event(None, None, "a\nb"),
            ];
            assert_eq!(found, expected, "in chunks of {size}; an incomplete message is not returned");
        }
    }
}
