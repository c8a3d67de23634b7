//! Expiry of the certificate that this server presents.

use std::sync::{
    Arc,
    atomic::{AtomicI64, Ordering},
};

/// Expiry of a certificate, in seconds since 1970. Clones share it, because the certificate is reloaded when its file changes.
#[derive(Clone, Debug, Default)]
pub struct CertificateExpiry(Arc<AtomicI64>);

impl CertificateExpiry {
    pub fn set(&self, at: i64) {
        self.0.store(at, Ordering::Relaxed);
    }

    /// Returns `None` if this server has no certificate.
    pub fn get(&self) -> Option<i64> {
        Some(self.0.load(Ordering::Relaxed)).filter(|at| *at != 0)
    }
}
