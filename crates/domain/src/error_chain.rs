//! One line for an error and its causes.

use std::{error::Error, io};

/// Joins the message of an error with those of its causes, as `message: cause: cause of the cause`.
///
/// Some libraries leave causes out of their message, others repeat them; a cause that the text already contains is not added again.
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

/// Explains why a server was not reached, with one wording for the HTTP client, the resolver and the TLS library.
pub fn outage(error: &(dyn Error + 'static)) -> String {
    let mut cause = error;
    let mut is_lookup = false;
    loop {
        is_lookup |= cause.to_string().contains("dns error");
        match cause.source() {
            Some(source) => cause = source,
            None => break,
        }
    }
    let text = cause.to_string();
    match cause.downcast_ref::<io::Error>().map(io::Error::kind) {
        _ if is_lookup => "cannot resolve the host name".to_owned(),
        Some(io::ErrorKind::ConnectionRefused) => "connection refused".to_owned(),
        Some(io::ErrorKind::TimedOut) => "no answer in time".to_owned(),
        Some(io::ErrorKind::ConnectionReset | io::ErrorKind::UnexpectedEof) => "the connection was closed".to_owned(),
        Some(io::ErrorKind::NetworkUnreachable | io::ErrorKind::HostUnreachable) => "no route to the host".to_owned(),
        _ if text.contains("InvalidContentType") => {
            "the server does not use TLS; write http:// instead of https://".to_owned()
        }
        _ if text.contains("UnknownIssuer") => "its TLS certificate is not from a known authority".to_owned(),
        _ => text,
    }
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
