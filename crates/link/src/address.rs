//! Where engines listen.

use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::str::FromStr;

use tokio::net::lookup_host;

/// `ipc:///PATH`, a socket in the file system, or `tcp://HOST:PORT`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Address {
    /// A socket in the file system, which only its owner may use.
    Ipc(PathBuf),
    /// A host, by name or address, with its port.
    Tcp(String),
}

/// It is no address.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("expected ipc:///PATH or tcp://HOST:PORT, found `{found}`")]
pub struct AddressError {
    found: String,
}

impl FromStr for Address {
    type Err = AddressError;

    fn from_str(text: &str) -> Result<Address, AddressError> {
        let wrong = || AddressError { found: text.to_owned() };
        if let Some(path) = text.strip_prefix("ipc://") {
            return if path.starts_with('/') && path.len() > 1 {
                Ok(Address::Ipc(path.into()))
            } else {
                Err(wrong())
            };
        }
        let host = text.strip_prefix("tcp://").ok_or_else(wrong)?;
        let (name, port) = host.rsplit_once(':').ok_or_else(wrong)?;
        if name.is_empty() || port.parse::<u16>().is_err() {
            return Err(wrong());
        }
        Ok(Address::Tcp(host.to_owned()))
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Address::Ipc(path) => write!(f, "ipc://{}", path.display()),
            Address::Tcp(host) => write!(f, "tcp://{host}"),
        }
    }
}

/// What a host's name stands for.
pub(crate) async fn resolve(host: &str) -> std::io::Result<Vec<SocketAddr>> {
    let found: Vec<SocketAddr> = lookup_host(host).await?.collect();
    if found.is_empty() {
        let message = format!("there is no host `{host}`");
        return Err(std::io::Error::new(std::io::ErrorKind::NotFound, message));
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read() {
        for text in
            ["ipc:///run/e.sock", "tcp://127.0.0.1:9000", "tcp://[::1]:0", "tcp://gpu-3:9000"]
        {
            assert_eq!(text.parse::<Address>().expect(text).to_string(), text);
        }
        for text in [
            "",
            "ipc://",
            "ipc:///",
            "ipc://run/e",
            "tcp://",
            "tcp://a",
            "tcp://:1",
            "tcp://a:x",
            "/e",
            "a:1",
        ] {
            assert!(text.parse::<Address>().is_err(), "{text}");
        }
    }
}
