//! Restricts the files of a database to their owner, whatever the umask: they contain the payloads of jobs.
//!
//! The files are Faena's, so their permissions are repaired at each start. The folder is Faena's only if Faena has created it: one that
//! exists may be `/tmp`, so it keeps its permissions, and a folder that others can write to is reported.

use std::{
    fs::{self, DirBuilder, OpenOptions, Permissions},
    io,
    os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt},
    path::{Path, PathBuf},
};

const GROUP_AND_OTHERS: u32 = 0o077;
const WRITABLE_BY_OTHERS: u32 = 0o022;
/// In a folder with this bit, users can replace only their own files.
const STICKY: u32 = 0o1000;

/// Creates the folder of a database, unless it exists.
pub fn create_folder(folder: &Path) -> io::Result<()> {
    if folder.is_dir() {
        if is_writable_by_others(folder) {
            tracing::warn!(folder = %folder.display(), "other users can replace the database, restrict its folder");
        }
        return Ok(());
    }
    DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
    fs::set_permissions(folder, Permissions::from_mode(0o700))
}

/// Returns whether users other than the owner can replace the files in a folder.
pub fn is_writable_by_others(folder: &Path) -> bool {
    let mode = fs::metadata(folder).map_or(0, |data| data.permissions().mode());
    mode & WRITABLE_BY_OTHERS != 0 && mode & STICKY == 0
}

/// Creates the database file, unless it exists. SQLite gives its other files the same permissions.
pub fn create_file(path: &Path) -> io::Result<()> {
    match OpenOptions::new().create_new(true).write(true).mode(0o600).open(path) {
        Ok(file) => file.set_permissions(Permissions::from_mode(0o600)),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        Err(error) => Err(error),
    }
}

/// Removes the permissions of other users from the files of an existing database.
pub fn restrict_files(path: &Path) {
    for suffix in ["", "-wal", "-shm", ".lock"] {
        let file = PathBuf::from(format!("{}{suffix}", path.display()));
        let Ok(mode) = fs::metadata(&file).map(|data| data.permissions().mode()) else { continue };
        if mode & GROUP_AND_OTHERS == 0 {
            continue;
        }
        match fs::set_permissions(&file, Permissions::from_mode(0o600)) {
            Ok(()) => tracing::warn!(file = %file.display(), "file was open to other users, restricted it"),
            Err(error) => tracing::warn!(file = %file.display(), %error, "file is open to other users"),
        }
    }
}
