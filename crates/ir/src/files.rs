//! Files of the user's that hide built-in ones.

use std::io::ErrorKind;
use std::path::Path;

/// Whether there is something at `path`, readable or not. What is there and cannot be read is an error
/// to be told when it is opened; only what is absent may be passed over.
pub fn is_there(path: &Path) -> bool {
    let absent = |kind| matches!(kind, ErrorKind::NotFound | ErrorKind::NotADirectory);
    // Not of what a link points to: a link to nothing is there.
    path.symlink_metadata().map_or_else(|e| !absent(e.kind()), |_| true)
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;

    #[test]
    fn what_cannot_be_read_is_there() {
        let folder = std::env::temp_dir().join(format!("infernum-there-{}", std::process::id()));
        std::fs::create_dir_all(&folder).expect("a folder");
        let link = folder.join("link");
        std::os::unix::fs::symlink("/no/such/file", &link).expect("a link");
        assert!(is_there(&folder) && is_there(&link));
        assert!(!is_there(&folder.join("nothing")) && !is_there(Path::new("/dev/null/x")));
        std::fs::remove_dir_all(&folder).expect("gone");
    }
}
