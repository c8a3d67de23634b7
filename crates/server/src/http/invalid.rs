//! Answers requests that are not valid HTTP with the same error body as all other errors.
//!
//! hyper answers such a request itself, with a status and no body, before any of our code runs. This stream recognises that
//! answer and writes another in its place. Our own answers always have a request id, so they are never mistaken for it, and
//! bodies are JSON or compressed, in which the line breaks of a header cannot occur.

use std::{
    io,
    pin::Pin,
    task::{Context, Poll, ready},
    time::Duration,
};

use faena_domain::ErrorCode;
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    time::{Sleep, sleep},
};
use uuid::Uuid;

use super::MAX_HEADER_BYTES;

/// How long the rest of an invalid request is read. A socket that is closed with unread data is reset, and the client would
/// not see the answer.
const LINGER: Duration = Duration::from_secs(1);

/// An HTTP/1 stream whose answers to invalid requests have a body.
pub struct ErrorBodyStream<S> {
    stream: S,
    /// The part of our answer that is not written yet.
    answer: Vec<u8>,
    lingers_until: Option<Pin<Box<Sleep>>>,
}

impl<S> ErrorBodyStream<S> {
    pub fn new(stream: S) -> ErrorBodyStream<S> {
        ErrorBodyStream { stream, answer: Vec::new(), lingers_until: None }
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> ErrorBodyStream<S> {
    /// Replaces hyper's answer to an invalid request. Returns `false` if `head` is not such an answer.
    fn replace(&mut self, head: &[u8]) -> bool {
        let Some(answer) = replacement(head) else { return false };
        self.answer = answer;
        self.lingers_until = Some(Box::pin(sleep(LINGER)));
        true
    }

    fn poll_answer(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        while !self.answer.is_empty() {
            let count = ready!(Pin::new(&mut self.stream).poll_write(cx, &self.answer))?;
            if count == 0 {
                return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
            }
            self.answer.drain(..count);
        }
        Poll::Ready(Ok(()))
    }

    /// Reads and ignores what the client still sends, until it closes the connection or `LINGER` has passed.
    fn poll_linger(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let Some(until) = &mut self.lingers_until else { return Poll::Ready(()) };
        let mut buffer = [0; 4_096];
        while until.as_mut().poll(cx).is_pending() {
            let mut buffer = ReadBuf::new(&mut buffer);
            match ready!(Pin::new(&mut self.stream).poll_read(cx, &mut buffer)) {
                Ok(()) if !buffer.filled().is_empty() => {}
                _ => break,
            }
        }
        Poll::Ready(())
    }
}

/// Returns the answer that replaces hyper's, or `None` if `head` is not hyper's answer to an invalid request.
fn replacement(head: &[u8]) -> Option<Vec<u8>> {
    if !head.starts_with(b"HTTP/1.1 4") || !head.ends_with(b"\r\n\r\n") {
        return None;
    }
    let head = std::str::from_utf8(head).ok()?;
    if head.contains("x-request-id: ") || !head.contains("content-length: 0\r\n") {
        return None;
    }
    let (code, reason, message) = match &head[9..12] {
        "414" | "431" => (
            ErrorCode::HeadersTooLarge,
            "Request Header Fields Too Large",
            format!(
                "the path, query and headers are larger than {MAX_HEADER_BYTES} bytes, or there are more than 100 headers"
            ),
        ),
        _ => (ErrorCode::ValidationError, "Bad Request", "the request is not valid HTTP".to_owned()),
    };
    let (id, status) = (Uuid::now_v7(), code.http_status());
    let body = format!(r#"{{"error":{{"code":"{code}","message":"{message}","requestId":"{id}"}}}}"#);
    Some(
        format!(
            "HTTP/1.1 {status} {reason}\r\ncontent-type: application/json\r\ncontent-length: {}\r\nconnection: close\r\n\
             x-request-id: {id}\r\n\r\n{body}",
            body.len()
        )
        .into_bytes(),
    )
}

impl<S: AsyncRead + Unpin> AsyncRead for ErrorBodyStream<S> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buf)
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncWrite for ErrorBodyStream<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        ready!(self.poll_answer(cx))?;
        if self.replace(buf) {
            return Poll::Ready(Ok(buf.len()));
        }
        Pin::new(&mut self.stream).poll_write(cx, buf)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        ready!(self.poll_answer(cx))?;
        if let [only] = bufs
            && self.replace(only)
        {
            return Poll::Ready(Ok(only.len()));
        }
        Pin::new(&mut self.stream).poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.poll_answer(cx))?;
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.poll_answer(cx))?;
        ready!(Pin::new(&mut self.stream).poll_shutdown(cx))?;
        ready!(self.poll_linger(cx));
        Poll::Ready(Ok(()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_answers_without_a_request_id_and_a_body_are_replaced() {
        let automatic =
            b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-length: 0\r\n\r\n";
        let answer = String::from_utf8(replacement(automatic).expect("replaced")).expect("text");
        assert!(answer.starts_with("HTTP/1.1 431 ") && answer.contains(r#""code":"HEADERS_TOO_LARGE""#), "{answer}");
        for own in [
            &b"HTTP/1.1 404 Not Found\r\nx-request-id: 1\r\ncontent-length: 0\r\n\r\n"[..],
            b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n",
            b"HTTP/1.1 400 Bad Request\r\ncontent-length: 2\r\n\r\n{}",
            b"{\"a\": \"HTTP/1.1 400 \"}",
            b"",
        ] {
            assert!(replacement(own).is_none(), "{:?}", String::from_utf8_lossy(own));
        }
    }
}
