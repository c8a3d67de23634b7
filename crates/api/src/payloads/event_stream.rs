//! Hides values in server-sent events.

use axum::body::{Body, Bytes};
use futures_util::{StreamExt, future::ready};
use serde_json::Value;

/// Returns a stream in which `hide` has changed the data of every event.
pub fn hide(body: Body, hide: impl Fn(&mut Value) + Send + 'static) -> Body {
    let mut pending = Vec::new();
    let stream = body.into_data_stream().map(move |chunk| {
        chunk.map(|chunk| {
            pending.extend_from_slice(&chunk);
            let mut passed = Vec::new();
            while let Some(end) = event_end(&pending) {
                let event: Vec<u8> = pending.drain(..end).collect();
                passed.extend_from_slice(&hide_in_event(&event, &hide));
            }
            Bytes::from(passed)
        })
    });
    // A chunk that completes no event passes nothing on.
    Body::from_stream(stream.filter(|passed| ready(passed.as_ref().map_or(true, |bytes| !bytes.is_empty()))))
}

/// Returns where the first event ends: after its empty line.
fn event_end(bytes: &[u8]) -> Option<usize> {
    bytes.windows(2).position(|pair| pair == b"\n\n").map(|at| at + 2)
}

/// Returns an event whose data `hide` has changed, in one line after its other lines. Data that is not JSON is left
/// out.
fn hide_in_event(event: &[u8], hide: &impl Fn(&mut Value)) -> Vec<u8> {
    let mut data = Vec::new();
    let mut others = Vec::new();
    for line in event.split(|byte| *byte == b'\n').filter(|line| !line.is_empty()) {
        match line.strip_prefix(b"data:") {
            Some(text) => data.extend_from_slice(text),
            None => others.extend_from_slice(&[line, b"\n"].concat()),
        }
    }
    if let Ok(mut value) = serde_json::from_slice::<Value>(&data) {
        hide(&mut value);
        others.extend_from_slice(format!("data: {value}\n").as_bytes());
    }
    others.push(b'\n');
    others
}

#[cfg(test)]
mod tests {
    use http_body_util::BodyExt;

    use super::*;

    #[tokio::test]
    async fn events_are_changed_wherever_they_are_split() {
        let text = "event: job.completed\nid: 7\ndata: {\"secret\":\ndata: 1}\n\n: heartbeat\n\ndata: no json\n\n";
        for size in [1, 7, 1_000] {
            let chunks: Vec<_> =
                text.as_bytes().chunks(size).map(|chunk| Ok::<_, std::io::Error>(chunk.to_vec())).collect();
            let body = hide(Body::from_stream(futures_util::stream::iter(chunks)), |value| {
                value["secret"].take();
            });
            let bytes = body.collect().await.expect("a body").to_bytes();
            let expected = "event: job.completed\nid: 7\ndata: {\"secret\":null}\n\n: heartbeat\n\n\n";
            assert_eq!(String::from_utf8_lossy(&bytes), expected, "{size}");
        }
    }
}
