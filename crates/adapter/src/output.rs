//! Keeps a bounded part of a command's output.

/// How many bytes at the end are searched for the last line.
const LINE_BYTES: usize = 2_000;

/// The first and the last bytes of a text of any length.
#[derive(Debug)]
pub struct BoundedLog {
    head: Vec<u8>,
    /// The last bytes, up to twice the limit before they are cut.
    tail: Vec<u8>,
    head_limit: usize,
    tail_limit: usize,
    total: u64,
}

impl BoundedLog {
    /// Keeps a quarter of `limit` from the beginning and the rest from the end.
    pub fn new(limit: usize) -> BoundedLog {
        let head_limit = limit / 4;
        BoundedLog { head: Vec::new(), tail: Vec::new(), head_limit, tail_limit: limit - head_limit, total: 0 }
    }

    pub fn push(&mut self, bytes: &[u8]) {
        self.total += bytes.len() as u64;
        let for_head = (self.head_limit - self.head.len()).min(bytes.len());
        self.head.extend_from_slice(&bytes[..for_head]);
        self.tail.extend_from_slice(&bytes[for_head..]);
        if self.tail.len() > 2 * self.tail_limit {
            self.tail.drain(..self.tail.len() - self.tail_limit);
        }
    }

    pub fn total(&self) -> u64 {
        self.total
    }

    /// Returns the kept text, with a line in place of what is missing.
    pub fn text(&self) -> String {
        let tail = &self.tail[self.tail.len().saturating_sub(self.tail_limit)..];
        let dropped = self.total - (self.head.len() + tail.len()) as u64;
        let (head, tail) = (String::from_utf8_lossy(&self.head), String::from_utf8_lossy(tail));
        // PostgreSQL does not store a NUL in JSON text.
        let text = match dropped {
            0 => format!("{head}{tail}"),
            dropped => format!("{head}\n[{dropped} bytes left out]\n{tail}"),
        };
        text.replace('\0', "\u{fffd}")
    }

    /// Returns the last line that is not empty, shortened.
    pub fn last_line(&self) -> String {
        let mut end = &self.tail[self.tail.len().saturating_sub(LINE_BYTES)..];
        let whole;
        // A short output continues from the head into the tail.
        if self.total == (self.head.len() + self.tail.len()) as u64 && end.len() < LINE_BYTES {
            whole = [&self.head[self.head.len().saturating_sub(LINE_BYTES)..], end].concat();
            end = &whole;
        }
        let text = String::from_utf8_lossy(end);
        let line = text.lines().rev().find(|line| !line.trim().is_empty()).unwrap_or_default();
        line.chars().filter(|c| !c.is_control()).take(200).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_short_output_is_kept_whole_and_a_long_one_at_both_ends() {
        let mut log = BoundedLog::new(40);
        log.push(b"first\n");
        log.push(b"second\n");
        assert_eq!((log.text().as_str(), log.last_line().as_str()), ("first\nsecond\n", "second"));
        for number in 0..1_000 {
            log.push(format!("line {number}\n").as_bytes());
        }
        log.push(b"\n\0end");
        let text = log.text();
        assert!(text.starts_with("first\nseco") && text.ends_with("\n\u{fffd}end"), "{text}");
        assert!(text.contains("bytes left out") && text.len() < 100, "{text}");
        assert_eq!(log.last_line(), "end");
        assert_eq!(log.total(), 13 + (0..1_000).map(|n| format!("line {n}\n").len() as u64).sum::<u64>() + 5);
    }
}
