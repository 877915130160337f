//! Where the server listens: addresses of a network, and Unix sockets.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use tokio::net::{TcpListener, TcpStream, UnixListener};

use infernum_link::Stream;
use infernum_link::{Socket, bind_unix};

use super::lanes::Client;

/// Bytes of answers that wait in the kernel for each connection beyond what is on its way.
const UNSENT: u32 = 64 << 10;

/// What can be listened on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Address {
    Tcp(SocketAddr),
    Unix(PathBuf),
}

impl Address {
    /// Whether only this machine reaches it.
    pub(crate) fn is_local(&self) -> bool {
        match self {
            Address::Tcp(address) => address.ip().is_loopback(),
            Address::Unix(_) => true,
        }
    }
}

impl FromStr for Address {
    type Err = String;

    fn from_str(text: &str) -> Result<Address, String> {
        match text.strip_prefix("unix:") {
            Some("") => Err("expected unix:PATH, found no path".to_owned()),
            Some(path) => Ok(Address::Unix(path.into())),
            None => text.parse().map(Address::Tcp).map_err(|_| {
                format!("expected unix:PATH or an address with its port, such as 127.0.0.1:8000, found `{text}`")
            }),
        }
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Address::Tcp(address) => address.fmt(f),
            Address::Unix(path) => write!(f, "unix:{}", path.display()),
        }
    }
}

/// Takes connections.
pub(crate) enum Listener {
    Tcp(TcpListener),
    Unix(UnixListener, Socket),
}

impl Listener {
    pub(crate) async fn bind(address: &Address) -> Result<Listener, String> {
        let bound = match address {
            Address::Tcp(address) => TcpListener::bind(address).await.map(Listener::Tcp),
            Address::Unix(path) => {
                bind_unix(path, None).map(|(listener, socket)| Listener::Unix(listener, socket))
            }
        };
        bound.map_err(|e| {
            format!("cannot listen on {address}: {e}; choose another --port, --host or --listen")
        })
    }

    /// What it listens on, its port known.
    pub(crate) fn address(&self) -> std::io::Result<Address> {
        match self {
            Listener::Tcp(listener) => listener.local_addr().map(Address::Tcp),
            Listener::Unix(_, socket) => Ok(Address::Unix(socket.path().to_owned())),
        }
    }

    /// The next connection, and whose it is.
    pub(crate) async fn accept(&self) -> (Box<dyn Stream>, Client) {
        loop {
            let accepted = match self {
                Listener::Tcp(listener) => listener
                    .accept()
                    .await
                    .map(|(stream, address)| (tuned(stream), Client::at(address.ip()))),
                Listener::Unix(listener, _) => listener.accept().await.map(|(stream, _)| {
                    let stream: Box<dyn Stream> = Box::new(stream);
                    (stream, Client::at(IpAddr::V4(Ipv4Addr::LOCALHOST)))
                }),
            };
            match accepted {
                Ok(accepted) => return accepted,
                Err(error) => {
                    // Most often too many open files: wait for some to close.
                    tracing::warn!(%error, "a connection could not be accepted");
                    tokio::time::sleep(Duration::from_millis(100)).await;
                }
            }
        }
    }
}

fn tuned(stream: TcpStream) -> Box<dyn Stream> {
    let socket = socket2::SockRef::from(&stream);
    // Tokens are small and must not wait for each other.
    let _ = socket.set_tcp_nodelay(true);
    // What a client does not read waits where it is counted, not in the kernel.
    #[cfg(target_os = "linux")]
    let _ = socket.set_tcp_notsent_lowat(UNSENT);
    Box::new(stream)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read() {
        for text in ["127.0.0.1:8000", "[::1]:0", "unix:/run/infernum.sock"] {
            assert_eq!(text.parse::<Address>().expect(text).to_string(), text);
        }
        for text in ["", "unix:", "localhost", "8000", "127.0.0.1", "/run/infernum.sock"] {
            assert!(text.parse::<Address>().is_err(), "{text}");
        }
        let local = |text: &str| text.parse::<Address>().expect(text).is_local();
        assert!(local("127.0.0.1:1") && local("unix:x") && !local("0.0.0.0:1"));
    }

    #[tokio::test]
    async fn a_socket_that_nobody_listens_on_is_taken_over_and_no_other() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("s");
        let address = Address::Unix(path.clone());
        drop(std::os::unix::net::UnixListener::bind(&path).expect("a socket"));
        let taken =
            Listener::bind(&address).await.map_err(drop).expect("left by a process that died");
        assert!(Listener::bind(&address).await.is_err(), "somebody listens");
        drop(taken);
        assert!(!path.exists());
        std::fs::write(&path, "a file").expect("written");
        assert!(Listener::bind(&address).await.is_err(), "no socket");
        assert!(path.exists());
    }
}
