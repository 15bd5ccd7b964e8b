//! What a machine of a testbed sees of this machine's files. Its own folder is the only one of the testbed that is there, and
//! in the place of those folders in which processes leave files for others, it has empty ones of its own. Programs are
//! those of this machine.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use rackbus_vm::Assets;

use super::failed;
use crate::output::Failure;

/// Runs `$@` behind `--` in a mount namespace with folders of its own. $1: the testbed's folder, of which the machine $2 alone
/// is left; $3: the user's home, or nothing; then folders that are there all the same.
const APART: &str = r#"set -e
dir=$1 own=$1/$2 home=$3
shift 3
count=0
aside() { mkdir "/mnt/$count"; mount --bind "$1" "/mnt/$count"; count=$((count + 1)); }
back() { mkdir -p "$1"; mount --move "/mnt/$count" "$1"; count=$((count + 1)); }
hide() { mkdir -p "$2"; mount -t tmpfs -o "mode=$1" none "$2"; }
mount -t tmpfs -o mode=700 none /mnt
aside "$own"
for place in "$@"; do
    [ "$place" != -- ] || break
    aside "$place"
done
hide 1777 /tmp
hide 1777 /dev/shm
hide 700 /run/rackbus
[ -z "$home" ] || hide 700 "$home"
hide 700 "$dir"
count=0
back "$own"
while [ "$1" != -- ]; do
    back "$1"
    shift
done
shift
umount /mnt
exec "$@""#;

/// The program with its arguments that enters such a mount namespace, and an IPC namespace, for the machine in
/// `dir/machine`. What it runs there follows.
///
/// The folder of this program is there wherever it is, and so is the cache that set-up filled with QEMU and guests, in which
/// it is also kept what was found out about that QEMU.
///
/// # Errors
/// When it is not known where this program is.
pub fn command(dir: &Path, machine: &str) -> Result<Vec<OsString>, Failure> {
    let program = std::env::current_exe().map_err(|cause| failed(cause.to_string()))?;
    let home = std::env::var_os("HOME").map(PathBuf::from);
    let home = home.filter(|it| it.is_absolute() && it.is_dir() && it.parent().is_some());
    let cache = Some(Assets::of_user().cache().to_owned()).filter(|it| it.is_dir());
    let kept = program.parent().map(Path::to_owned).into_iter().chain(cache);
    let mut words: Vec<OsString> =
        ["unshare", "--mount", "--ipc", "--propagation", "private", "sh", "-c", APART, "sh"]
            .map(OsString::from)
            .into();
    words.extend([dir.into(), machine.into(), home.unwrap_or_default().into()]);
    words.extend(kept.map(OsString::from));
    words.push("--".into());
    Ok(words)
}
