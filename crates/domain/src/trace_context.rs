//! The W3C trace context: the value of the header `traceparent`.

use std::fmt;

/// Position in a distributed trace: the trace and the span that is the parent of what follows.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct TraceContext {
    pub trace_id: [u8; 16],
    pub span_id: [u8; 8],
    /// Bit 0: the trace is recorded. The other bits are 0, as version 00 requires; some receivers reject a value in
    /// which they are set.
    pub flags: u8,
}

const SAMPLED: u8 = 1;
/// Length of a value of version 00: `00-`, 32 digits, `-`, 16 digits, `-`, 2 digits.
const LENGTH: usize = 55;

impl TraceContext {
    pub fn new(trace_id: [u8; 16], span_id: [u8; 8], is_sampled: bool) -> TraceContext {
        TraceContext { trace_id, span_id, flags: u8::from(is_sampled) }
    }

    /// Parses the value of a header `traceparent`. Returns `None` if it is not valid and must be ignored.
    ///
    /// A value of a later version is read like version 00, as the specification requires.
    pub fn parse(text: &str) -> Option<TraceContext> {
        let bytes = text.as_bytes();
        let is_separated = bytes.len() >= LENGTH && [2, 35, 52].iter().all(|at| bytes[*at] == b'-');
        if !is_separated {
            return None;
        }
        let [version] = hex(&bytes[..2])?;
        let is_length_valid = match version {
            0 => bytes.len() == LENGTH,
            0xff => false,
            _ => bytes.len() == LENGTH || bytes[LENGTH] == b'-',
        };
        let [flags] = hex(&bytes[53..55])?;
        let context =
            TraceContext { trace_id: hex(&bytes[3..35])?, span_id: hex(&bytes[36..52])?, flags: flags & SAMPLED };
        let has_ids = context.trace_id != [0; 16] && context.span_id != [0; 8];
        (is_length_valid && has_ids).then_some(context)
    }

    /// Returns whether spans of this trace are recorded.
    pub fn is_sampled(self) -> bool {
        self.flags & SAMPLED != 0
    }

    /// Returns the context for the children of another span of the same trace.
    pub fn with_span(self, span_id: [u8; 8]) -> TraceContext {
        TraceContext { span_id, ..self }
    }
}

/// Formats the context as a value of the header `traceparent`.
impl fmt::Display for TraceContext {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let trace_id = u128::from_be_bytes(self.trace_id);
        let span_id = u64::from_be_bytes(self.span_id);
        write!(f, "00-{trace_id:032x}-{span_id:016x}-{:02x}", self.flags)
    }
}

/// Parses lower-case hexadecimal digits; the specification rejects upper case.
fn hex<const N: usize>(digits: &[u8]) -> Option<[u8; N]> {
    let digit = |byte: u8| match byte {
        b'0'..=b'9' => Some(byte - b'0'),
        b'a'..=b'f' => Some(byte - b'a' + 10),
        _ => None,
    };
    let mut bytes = [0; N];
    for (at, byte) in bytes.iter_mut().enumerate() {
        *byte = digit(digits[2 * at])? << 4 | digit(digits[2 * at + 1])?;
    }
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const VALID: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";

    #[test]
    fn a_valid_value_is_parsed_and_formatted_again() {
        let context = TraceContext::parse(VALID).expect("valid");
        assert!(context.is_sampled());
        assert_eq!(context.span_id, [0x00, 0xf0, 0x67, 0xaa, 0x0b, 0xa9, 0x02, 0xb7]);
        assert_eq!(context.to_string(), VALID);
        let unsampled = TraceContext::parse(&VALID.replace("-01", "-00")).expect("valid");
        assert!(!unsampled.is_sampled());
    }

    #[test]
    fn a_later_version_is_read_like_the_first() {
        for later in [VALID.replacen("00", "cc", 1), format!("{}-more", VALID.replacen("00", "01", 1))] {
            let context = TraceContext::parse(&later).expect("valid");
            assert_eq!(context.to_string(), VALID);
        }
        // Flags that this version does not know are not passed on.
        let flags = TraceContext::parse(&VALID.replace("-01", "-ff")).expect("valid");
        assert_eq!(flags.to_string(), VALID);
    }

    #[test]
    fn an_invalid_value_is_ignored() {
        let invalid = [
            String::new(),
            "00-t".into(),
            VALID.replace("4bf92f3577b34da6a3ce929d0e0e4736", "00000000000000000000000000000000"),
            VALID.replace("00f067aa0ba902b7", "0000000000000000"),
            VALID.to_uppercase(),
            VALID.replacen("00", "ff", 1),
            format!("{VALID}-more"),
            format!("{}more", VALID.replacen("00", "01", 1)),
            VALID[..54].into(),
            VALID.replace('-', "_"),
            VALID.replace("-01", "-0g"),
            format!(" {VALID}"),
        ];
        for text in invalid {
            assert_eq!(TraceContext::parse(&text), None, "{text}");
        }
    }

    proptest! {
        #[test]
        fn no_text_makes_the_parser_panic(text in ".{0,80}") {
            let _ = TraceContext::parse(&text);
        }

        #[test]
        fn every_context_survives_formatting(trace in 1u128.., span in 1u64.., flags in 0u8..2) {
            let context = TraceContext { trace_id: trace.to_be_bytes(), span_id: span.to_be_bytes(), flags };
            prop_assert_eq!(TraceContext::parse(&context.to_string()), Some(context));
        }
    }
}
