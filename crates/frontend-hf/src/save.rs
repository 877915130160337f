//! Files that are written whole or not at all.

use std::fs::{File, OpenOptions};
use std::io::{self, BufWriter, Write};
use std::path::Path;

/// Writes `path`: first a temporary file beside it, which is renamed over it when `check` has nothing against it, so that a
/// reader sees the old file or the whole new one.
pub(crate) fn save<E: From<io::Error>>(
    path: &Path,
    write: impl FnOnce(&mut BufWriter<File>) -> Result<(), E>,
    check: impl FnOnce(&Path) -> Result<(), E>,
) -> Result<(), E> {
    // Only a file may be replaced by another; a device or a pipe, such as /dev/null, is written to.
    if std::fs::metadata(path).is_ok_and(|m| !m.is_file() && !m.is_dir()) {
        write_to(OpenOptions::new().write(true).open(path)?, write)?;
        return Ok(());
    }
    let folder = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let mut builder = tempfile::Builder::new();
    builder.prefix(".infernum-").suffix(".partial");
    // What `File::create` would give (the umask applies), instead of an owner-only temporary.
    #[cfg(unix)]
    builder.permissions(std::os::unix::fs::PermissionsExt::from_mode(0o666));
    let (file, temporary) = builder.tempfile_in(folder)?.into_parts();
    write_to(file, write)?;
    check(&temporary)?;
    temporary.persist(path).map_err(|e| e.error)?;
    Ok(())
}

fn write_to<E: From<io::Error>>(
    file: File,
    write: impl FnOnce(&mut BufWriter<File>) -> Result<(), E>,
) -> Result<(), E> {
    let mut out = BufWriter::with_capacity(1 << 16, file);
    write(&mut out)?;
    out.flush()?;
    Ok(())
}
