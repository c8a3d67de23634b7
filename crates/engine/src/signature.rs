//! Signs webhooks according to [Standard Webhooks](https://www.standardwebhooks.com), so that receivers can verify them.
//!
//! There may be several secrets, newest first. Each of them signs, so a receiver needs only one. To rotate a secret, add
//! a new one in front and remove the old one when every receiver has the new one.

use std::{fmt, str::FromStr};

use base64::{Engine as _, engine::general_purpose::STANDARD};
use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;

/// A signing secret: `whsec_` and 24 to 64 bytes in base64. Its debug output hides it.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(Box<[u8]>);

const PREFIX: &str = "whsec_";

impl FromStr for Secret {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Secret, &'static str> {
        let encoded = text.strip_prefix(PREFIX).ok_or("does not begin with whsec_")?;
        let bytes = STANDARD.decode(encoded).map_err(|_| "is not base64 after whsec_")?;
        if !(24..=64).contains(&bytes.len()) {
            return Err("does not have 24 to 64 bytes");
        }
        Ok(Secret(bytes.into()))
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("whsec_***")
    }
}

/// Returns the value of the header `webhook-signature`: one signature per secret.
pub fn sign(secrets: &[Secret], id: &str, timestamp: i64, body: &str) -> String {
    let signature = |secret: &Secret| {
        let mut mac = Hmac::<Sha256>::new_from_slice(&secret.0).expect("HMAC takes keys of every length");
        mac.update(format!("{id}.{timestamp}.").as_bytes());
        mac.update(body.as_bytes());
        format!("v1,{}", STANDARD.encode(mac.finalize().into_bytes()))
    };
    secrets.iter().map(signature).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_example_of_the_specification_has_the_expected_signature() {
        let secret: Secret = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw".parse().expect("a secret");
        let body = r#"{"test": 2432232314}"#;
        let signed = sign(&[secret], "msg_p5jXN8AQM9LWM0D4loKWxJek", 1_614_265_330, body);
        assert_eq!(signed, "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE=");
    }

    #[test]
    fn an_invalid_secret_is_rejected_without_being_repeated() {
        for text in ["", "whsec_", "whsec_s3cret", "whsec_AAAA", "MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"] {
            let error = text.parse::<Secret>().expect_err("rejected");
            assert!(!error.contains("s3cret"), "{error}");
        }
        let long = format!("whsec_{}", STANDARD.encode([7; 65]));
        assert!(long.parse::<Secret>().is_err());
    }

    #[test]
    fn a_secret_is_hidden_in_debug_output() {
        let secret: Secret = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw".parse().expect("a secret");
        assert_eq!(format!("{:?}", vec![secret]), "[whsec_***]");
    }
}
