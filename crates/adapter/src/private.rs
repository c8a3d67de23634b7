//! Creates folders and files that only their owner can use, whatever the umask: they contain requests, answers and source code.

use std::{
    fs::{self, DirBuilder, File, OpenOptions, Permissions},
    io,
    os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt},
    path::Path,
};

/// Creates a folder and its parents. An existing folder loses the permissions of other users, so call this only for folders that
/// belong to Faena.
pub fn create_folder(folder: &Path) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
    fs::set_permissions(folder, Permissions::from_mode(0o700))
}

/// Creates a file, or empties it.
pub fn create_file(path: &Path) -> io::Result<File> {
    let file = OpenOptions::new().create(true).truncate(true).write(true).mode(0o600).open(path)?;
    file.set_permissions(Permissions::from_mode(0o600))?;
    Ok(file)
}
