//! Configures TLS from files, and reads them again when they change.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, SystemTime},
};

use anyhow::Context;
use arc_swap::ArcSwap;
use faena_api::CertificateExpiry;
use rustls::{
    RootCertStore, ServerConfig,
    pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject},
    server::WebPkiClientVerifier,
};
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::CancellationToken;

/// How often the files are checked for changes.
const CHECK_EVERY: Duration = Duration::from_secs(10);

/// Files of a TLS configuration.
#[derive(Clone, Debug)]
pub struct TlsFiles {
    pub certificate: PathBuf,
    pub key: PathBuf,
    /// Certificate authorities of client certificates. If set, every client needs a certificate of one of them.
    pub client_authorities: Option<PathBuf>,
}

/// The current TLS configuration.
pub struct Tls {
    files: TlsFiles,
    current: ArcSwap<ServerConfig>,
    expiry: CertificateExpiry,
}

impl Tls {
    /// Reads the files. Fails with the file and the reason if one of them is not valid.
    pub fn load(files: TlsFiles) -> anyhow::Result<Arc<Tls>> {
        let config = read(&files)?;
        let tls = Tls { files, current: ArcSwap::from_pointee(config), expiry: CertificateExpiry::default() };
        tls.record_expiry();
        Ok(Arc::new(tls))
    }

    /// Returns the expiry of the current certificate.
    pub fn expiry(&self) -> &CertificateExpiry {
        &self.expiry
    }

    fn record_expiry(&self) {
        if let Some(at) = self.files.expires_at() {
            self.expiry.set(at);
        }
    }

    /// Returns the acceptor for the next connection.
    pub fn acceptor(&self) -> TlsAcceptor {
        TlsAcceptor::from(self.current.load_full())
    }

    /// Reads the files again whenever one of them changes. Files that are not valid leave the current configuration in place.
    pub async fn reload_on_change(self: Arc<Tls>, closing: CancellationToken) {
        let mut seen = self.files.modified_at();
        loop {
            tokio::select! { () = closing.cancelled() => return, () = tokio::time::sleep(CHECK_EVERY) => {} }
            let now = self.files.modified_at();
            if now != seen {
                self.reload();
                seen = now;
            }
        }
    }

    fn reload(&self) {
        match read(&self.files) {
            Ok(config) => {
                self.current.store(Arc::new(config));
                self.record_expiry();
                tracing::info!("tls certificate reloaded");
            }
            Err(error) => {
                tracing::error!(error = format!("{error:#}"), "tls certificate not reloaded, using the previous one")
            }
        }
    }
}

impl TlsFiles {
    /// Returns the earliest expiry of the certificates in the chain, in seconds since 1970.
    pub fn expires_at(&self) -> Option<i64> {
        let certificates = read_certificates(&self.certificate).ok()?;
        let expiries = certificates.iter().filter_map(|certificate| {
            let (_, parsed) = x509_parser::parse_x509_certificate(certificate).ok()?;
            Some(parsed.validity().not_after.timestamp())
        });
        expiries.min()
    }

    fn modified_at(&self) -> Vec<Option<SystemTime>> {
        [Some(&self.certificate), Some(&self.key), self.client_authorities.as_ref()]
            .into_iter()
            .map(|path| std::fs::metadata(path?).ok()?.modified().ok())
            .collect()
    }
}

fn read(files: &TlsFiles) -> anyhow::Result<ServerConfig> {
    let certificates = read_certificates(&files.certificate)?;
    let key = PrivateKeyDer::from_pem_file(&files.key)
        .with_context(|| format!("tls.key: cannot read a private key from {}", files.key.display()))?;
    let builder = ServerConfig::builder();
    let builder = match &files.client_authorities {
        None => builder.with_no_client_auth(),
        Some(path) => {
            let mut roots = RootCertStore::empty();
            for certificate in read_certificates(path)? {
                roots.add(certificate).with_context(|| format!("tls.client_ca: {} is not valid", path.display()))?;
            }
            let verifier = WebPkiClientVerifier::builder(Arc::new(roots)).build().context("tls.client_ca")?;
            builder.with_client_cert_verifier(verifier)
        }
    };
    let mut config = builder
        .with_single_cert(certificates, key)
        .with_context(|| format!("tls.key: {} does not belong to the certificate", files.key.display()))?;
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    Ok(config)
}

fn read_certificates(path: &Path) -> anyhow::Result<Vec<CertificateDer<'static>>> {
    let problem = || format!("cannot read certificates from {}", path.display());
    let certificates: Result<Vec<_>, _> = CertificateDer::pem_file_iter(path).with_context(problem)?.collect();
    let certificates = certificates.with_context(problem)?;
    anyhow::ensure!(!certificates.is_empty(), "{} contains no certificate", path.display());
    Ok(certificates)
}
