//! Reads server-sent events.

use futures_util::{Stream, StreamExt, stream::BoxStream};

#[derive(Clone, PartialEq, Debug, Default)]
pub struct Message {
    pub id: Option<String>,
    pub event: Option<String>,
    /// Empty: it only tells that the line holds, or its id.
    pub data: String,
}

pub struct Messages<B> {
    parts: BoxStream<'static, reqwest::Result<B>>,
    bytes: Vec<u8>,
}

/// What a server may say before it ends a message.
const LONGEST: usize = 32 << 20;

impl<B: AsRef<[u8]> + 'static> Messages<B> {
    pub fn new(parts: impl Stream<Item = reqwest::Result<B>> + Send + 'static) -> Messages<B> {
        Messages { parts: parts.boxed(), bytes: Vec::new() }
    }

    /// `None`: the stream has ended, well or not.
    pub async fn next(&mut self) -> Option<Message> {
        loop {
            // A line end is one byte in every text, so that a character that is cut in two between parts does no harm.
            if let Some(end) = self.bytes.windows(2).position(|two| two == b"\n\n") {
                let message: Vec<u8> = self.bytes.drain(..end + 2).collect();
                return Some(parse(&String::from_utf8_lossy(&message)));
            }
            let part = self.parts.next().await?.ok()?;
            self.bytes.extend_from_slice(part.as_ref());
            if self.bytes.len() > LONGEST {
                return None;
            }
        }
    }
}

fn parse(text: &str) -> Message {
    let mut message = Message::default();
    for line in text.lines() {
        let Some((name, value)) = line.split_once(':') else { continue };
        let value = value.strip_prefix(' ').unwrap_or(value);
        match name {
            "id" => message.id = Some(value.to_owned()),
            "event" => message.event = Some(value.to_owned()),
            "data" if message.data.is_empty() => message.data.push_str(value),
            "data" => message.data.extend(["\n", value]),
            _ => {}
        }
    }
    message
}

#[cfg(test)]
mod tests {
    use futures_util::stream;

    use super::*;

    #[tokio::test]
    async fn messages_are_read_however_they_are_cut() {
        let text =
            "id: 7\nevent: job.created\ndata: {\"name\":\"año\"}\n\n: heartbeat\nid: 9\n\ndata: a\ndata:b\n\nid: 10";
        for size in 1..text.len() {
            let parts: Vec<reqwest::Result<Vec<u8>>> =
                text.as_bytes().chunks(size).map(|part| Ok(part.to_vec())).collect();
            let mut messages = Messages::new(stream::iter(parts));
            let first = messages.next().await.expect("the first");
            assert_eq!((first.id.as_deref(), first.event.as_deref()), (Some("7"), Some("job.created")));
            assert_eq!(first.data, "{\"name\":\"año\"}");
            let beat = messages.next().await.expect("the second");
            assert_eq!((beat.id.as_deref(), beat.data.as_str()), (Some("9"), ""));
            assert_eq!(messages.next().await.expect("the third").data, "a\nb");
            assert_eq!(messages.next().await, None, "what is not whole is no message");
        }
    }
}
