//! What a machine of a testbed sees of this machine's files. Its own folder is the only one of the testbed that is there, and
//! in the place of those folders in which processes leave files for others, it has empty ones of its own. Programs are
//! those of this machine. It knows the other machines by their names, from a file in its folder.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use rackbus_vm::Assets;

use super::failed;
use crate::output::Failure;

/// Where those folders are set aside that are there all the same: the first of these below which none of them is.
const ASIDE: [&str; 4] = ["/mnt", "/media", "/srv", "/opt"];

/// The file in a machine's folder that it has for `/etc/hosts`.
pub const HOSTS: &str = "hosts";

/// Runs `$@` behind `--` in a mount namespace with folders of its own. $1: where others are set aside; $2: the testbed's
/// folder, of which the machine $3 alone is left; $4: the user's home, or nothing; then folders that are there all the same.
const APART: &str = r#"set -e
side=$1 dir=$2 own=$2/$3 home=$4
shift 4
count=0
aside() { mkdir "$side/$count"; mount --rbind "$1" "$side/$count"; count=$((count + 1)); }
back() { mkdir -p "$1"; mount --move "$side/$count" "$1"; count=$((count + 1)); }
hide() { mkdir -p "$2"; mount -t tmpfs -o "mode=$1" none "$2"; }
mount -t tmpfs -o mode=700 none "$side"
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
umount "$side"
[ ! -e /etc/hosts ] || mount --bind "$own/hosts" /etc/hosts
exec "$@""#;

/// The program with its arguments that enters such a mount namespace, and an IPC namespace, for the machine in
/// `dir/machine`. What it runs there follows.
///
/// The folder of this program is there wherever it is, and so is the cache that set-up filled with QEMU and guests, in which
/// it is also kept what was found out about that QEMU.
///
/// # Errors
/// When it is not known where this program is, or there is no place to set folders aside.
pub fn command(dir: &Path, machine: &str) -> Result<Vec<OsString>, Failure> {
    let program = std::env::current_exe().map_err(|cause| failed(cause.to_string()))?;
    let home = std::env::var_os("HOME").map(PathBuf::from);
    let home = home.filter(|it| it.is_absolute() && it.is_dir() && it.parent().is_some());
    let cache = Some(Assets::of_user().cache().to_owned()).filter(|it| it.is_dir());
    let kept: Vec<PathBuf> =
        program.parent().map(Path::to_owned).into_iter().chain(cache).collect();
    let is_apart = |side: &&str| {
        let mut all = kept.iter().map(PathBuf::as_path).chain([dir]);
        Path::new(side).is_dir() && !all.any(|it| it.starts_with(side))
    };
    let side = ASIDE.into_iter().find(is_apart).ok_or_else(|| {
        failed(format!(
            "the testbed's folder, the program and its cache are in all of {}",
            ASIDE.join(", ")
        ))
    })?;
    let mut words: Vec<OsString> =
        ["unshare", "--mount", "--ipc", "--propagation", "private", "sh", "-c", APART, "sh"]
            .map(OsString::from)
            .into();
    words.extend([side.into(), dir.into(), machine.into(), home.unwrap_or_default().into()]);
    words.extend(kept.into_iter().map(OsString::from));
    words.push("--".into());
    Ok(words)
}
