//! Working directories that exist only as long as their program.

use std::{
    fs::{self, DirBuilder, Permissions},
    io,
    os::unix::fs::{DirBuilderExt, PermissionsExt},
    path::Path,
};

/// Deepest folder whose permissions are repaired.
const MAX_DEPTH: usize = 64;

/// Creates a folder that only this user can use, whatever the umask.
pub fn create(path: &Path) -> io::Result<()> {
    DirBuilder::new().mode(0o700).create(path)?;
    fs::set_permissions(path, Permissions::from_mode(0o700))
}

/// Removes a folder with its content, including folders that their program made read-only. The folder need not exist.
pub fn remove(path: &Path) {
    let removed = match fs::remove_dir_all(path) {
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
            make_writable(path, MAX_DEPTH);
            fs::remove_dir_all(path)
        }
        other => other,
    };
    if let Err(error) = removed
        && error.kind() != io::ErrorKind::NotFound
    {
        tracing::warn!(folder = %path.display(), %error, "cannot remove working directory");
    }
}

fn make_writable(folder: &Path, depth: usize) {
    let _ = fs::set_permissions(folder, Permissions::from_mode(0o700));
    if depth == 0 {
        return;
    }
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        // Symbolic links are not followed.
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            make_writable(&entry.path(), depth - 1);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_is_private_and_is_removed_with_read_only_folders() {
        let base = tempfile::tempdir().expect("a folder");
        let path = base.path().join("own");
        create(&path).expect("created");
        assert_eq!(fs::metadata(&path).expect("a folder").permissions().mode() & 0o777, 0o700);
        assert!(create(&path).is_err(), "another program may have created it");
        fs::create_dir_all(path.join("a/b")).expect("folders");
        fs::write(path.join("a/b/file"), "text").expect("a file");
        fs::set_permissions(path.join("a/b"), Permissions::from_mode(0o500)).expect("read-only");
        remove(&path);
        assert!(!path.exists());
        remove(&path);
    }
}
