//! One line for an error and its causes.

use std::error::Error;

/// Joins the message of an error with those of its causes, as `message: cause: cause of the cause`.
///
/// Some libraries leave causes out of their message, others repeat them; a message that is already there is not repeated.
pub fn error_chain(error: &(dyn Error + '_)) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        let message = cause.to_string();
        if !text.contains(&message) {
            text.push_str(": ");
            text.push_str(&message);
        }
        source = cause.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug)]
    struct Layer(&'static str, Option<Box<Layer>>);

    impl std::fmt::Display for Layer {
        fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            f.write_str(self.0)
        }
    }

    impl Error for Layer {
        fn source(&self) -> Option<&(dyn Error + 'static)> {
            self.1.as_deref().map(|cause| cause as &(dyn Error + 'static))
        }
    }

    #[test]
    fn causes_follow_their_error_once() {
        let refused = Layer("connection refused", None);
        let repeated = Layer("cannot connect: connection refused", Some(Box::new(refused)));
        let error = Layer("query failed", Some(Box::new(repeated)));
        assert_eq!(error_chain(&error), "query failed: cannot connect: connection refused");
    }
}
