//! Writes the output of pool processes to the server's log, one event per line.

use std::sync::Arc;

use tokio::io::{AsyncBufReadExt, AsyncRead, BufReader};

/// Longer lines are cut.
const MAX_LINE_BYTES: usize = 4 << 10;

/// The pool and the worker that wrote the output.
#[derive(Clone)]
pub struct OutputLabels {
    pub pool: Arc<str>,
    pub worker: Arc<str>,
}

/// Logs each line of `output` until it ends.
pub async fn log_lines(output: Option<impl AsyncRead + Unpin>, stream: &'static str, labels: OutputLabels) {
    let Some(output) = output else { return };
    let mut reader = BufReader::new(output);
    let mut line = Line::default();
    while let Ok(read) = reader.fill_buf().await {
        if read.is_empty() {
            break;
        }
        let end = read.iter().position(|byte| *byte == b'\n');
        line.add(&read[..end.unwrap_or(read.len())]);
        let used = end.map_or(read.len(), |end| end + 1);
        reader.consume(used);
        if end.is_some() {
            log(&mut line, stream, &labels);
        }
    }
    log(&mut line, stream, &labels);
}

fn log(line: &mut Line, stream: &'static str, labels: &OutputLabels) {
    if let Some(text) = line.take() {
        tracing::info!(pool = &*labels.pool, worker = &*labels.worker, stream, line = text, "pool process output");
    }
}

/// The beginning of a line.
#[derive(Default)]
struct Line {
    kept: Vec<u8>,
    is_cut: bool,
}

impl Line {
    fn add(&mut self, bytes: &[u8]) {
        let room = MAX_LINE_BYTES - self.kept.len();
        self.kept.extend_from_slice(&bytes[..bytes.len().min(room)]);
        self.is_cut |= bytes.len() > room;
    }

    /// Returns the text of a line that is not blank, with its control characters escaped, and starts the next line.
    fn take(&mut self) -> Option<String> {
        let Line { kept, is_cut } = std::mem::take(self);
        let text = String::from_utf8_lossy(&kept);
        let text = text.trim_end();
        if text.is_empty() {
            return None;
        }
        let mut escaped = String::with_capacity(text.len());
        for character in text.chars() {
            match character {
                '\t' => escaped.push(' '),
                control if control.is_control() => escaped.extend(control.escape_default()),
                other => escaped.push(other),
            }
        }
        if is_cut {
            escaped.push('…');
        }
        Some(escaped)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn taken(parts: &[&[u8]]) -> Option<String> {
        let mut line = Line::default();
        parts.iter().for_each(|part| line.add(part));
        line.take()
    }

    #[test]
    fn control_characters_are_escaped_and_blank_lines_left_out() {
        assert_eq!(taken(&[b"a\tb\r"]).as_deref(), Some("a b"));
        assert_eq!(taken(&[b"\x1b[31mred\x07"]).as_deref(), Some("\\u{1b}[31mred\\u{7}"));
        assert_eq!(taken(&[b"caf\xc3", b"\xa9 \xff"]).as_deref(), Some("café \u{fffd}"));
        assert_eq!(taken(&[b" \r"]), None);
    }

    #[test]
    fn a_long_line_is_cut() {
        let text = taken(&[&[b'x'; MAX_LINE_BYTES], b"more"]).expect("a line");
        assert_eq!((text.chars().count(), text.ends_with("x…")), (MAX_LINE_BYTES + 1, true));
    }
}
