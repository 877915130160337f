//! Sockets in the file system.

use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use socket2::{Domain, SockAddr, Socket as Raw, Type};
use tokio::net::UnixListener;

/// Connections that may wait to be taken.
const BACKLOG: i32 = 1024;

/// A socket's file, which goes with its listener.
#[derive(Debug)]
pub struct Socket(PathBuf);

impl Socket {
    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0); // somebody may have done so
    }
}

/// Listens on a socket in the file system, which has these permissions before anybody can connect, where some are given. What a
/// process that died has left there is taken away; what somebody listens on, or is no socket, is not.
pub fn bind_unix(path: &Path, mode: Option<u32>) -> std::io::Result<(UnixListener, Socket)> {
    let is_socket = std::fs::symlink_metadata(path).is_ok_and(|meta| meta.file_type().is_socket());
    if is_socket {
        let answer = UnixStream::connect(path);
        if answer.is_err_and(|e| e.kind() == std::io::ErrorKind::ConnectionRefused) {
            std::fs::remove_file(path)?;
        }
    }
    let raw = Raw::new(Domain::UNIX, Type::STREAM, None)?;
    raw.bind(&SockAddr::unix(path)?)?;
    let socket = Socket(path.to_owned());
    if let Some(mode) = mode {
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode))?;
    }
    raw.listen(BACKLOG)?;
    raw.set_nonblocking(true)?;
    Ok((UnixListener::from_std(raw.into())?, socket))
}
