//! Encryption, by certificates that can be changed while the server runs.

use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError, RwLock};

use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::crypto::ring::default_provider;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer, pem};
use tokio_rustls::rustls::{Error, ServerConfig};
use tokio_rustls::server::TlsStream;

use infernum_link::Stream;

/// A certificate or its key cannot be used.
#[derive(Debug, thiserror::Error)]
pub(crate) enum TlsError {
    #[error("--tls-cert {}: expected certificates in PEM: {error}", path.display())]
    Certificates { path: PathBuf, error: pem::Error },
    #[error("--tls-cert {}: expected at least one certificate in PEM, found none", path.display())]
    NoCertificate { path: PathBuf },
    #[error("--tls-key {}: expected a private key in PEM: {error}", path.display())]
    Key { path: PathBuf, error: pem::Error },
    #[error("--tls-cert, --tls-key: cannot be used together: {0}")]
    Pair(Error),
}

/// What connections are encrypted with.
pub(crate) struct Tls {
    certificates: PathBuf,
    key: PathBuf,
    config: RwLock<Arc<ServerConfig>>,
}

impl Tls {
    pub(crate) fn open(certificates: &Path, key: &Path) -> Result<Tls, TlsError> {
        let config = RwLock::new(read(certificates, key)?);
        Ok(Tls { certificates: certificates.to_owned(), key: key.to_owned(), config })
    }

    /// Reads the files again, for connections to come. What cannot be used changes nothing.
    pub(crate) fn reload(&self) -> Result<(), TlsError> {
        let new = read(&self.certificates, &self.key)?;
        *self.config.write().unwrap_or_else(PoisonError::into_inner) = new;
        Ok(())
    }

    /// Agrees on a key with whoever is at the other end.
    pub(crate) async fn accept<S: Stream>(&self, stream: S) -> std::io::Result<TlsStream<S>> {
        let config = self.config.read().unwrap_or_else(PoisonError::into_inner).clone();
        TlsAcceptor::from(config).accept(stream).await
    }
}

fn read(certificates: &Path, key: &Path) -> Result<Arc<ServerConfig>, TlsError> {
    let unread = |error| TlsError::Certificates { path: certificates.to_owned(), error };
    let chain = CertificateDer::pem_file_iter(certificates).map_err(unread)?;
    let chain: Vec<_> = chain.collect::<Result<_, _>>().map_err(unread)?;
    if chain.is_empty() {
        return Err(TlsError::NoCertificate { path: certificates.to_owned() });
    }
    let secret = PrivateKeyDer::from_pem_file(key)
        .map_err(|error| TlsError::Key { path: key.to_owned(), error })?;
    let config = ServerConfig::builder_with_provider(Arc::new(default_provider()))
        .with_safe_default_protocol_versions()
        .and_then(|builder| builder.with_no_client_auth().with_single_cert(chain, secret));
    let mut config = config.map_err(TlsError::Pair)?;
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    Ok(Arc::new(config))
}
