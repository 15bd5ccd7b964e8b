# Shared by the set-up scripts (sourced): the cache, messages, and folders that appear whole or not
# at all.

# What is made is for all users, as programs of a guest's see it.
umask 022

cache=${RACKBUS_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/rackbus}
mkdir -p "$cache"

say() { echo "setup: $*" >&2; }

die() {
	echo "setup: error: $*" >&2
	exit 1
}

# need TOOL REMEDY: stops unless this machine has TOOL.
need() {
	command -v "$1" >/dev/null 2>&1 || die "no '$1' on this machine: $2"
}

# recipe FILE...: a stamp of these files' contents; what they build is made anew when it changes.
recipe() {
	cat "$@" | sha256sum | cut -c1-12
}

# fresh FOLDER STAMP: whether FOLDER was completed by this very recipe.
fresh() {
	[ "$(cat "$1/.recipe" 2>/dev/null)" = "$2" ]
}

# temporary NAME: sets $new to a new folder, removed when the script ends unless published.
temporary() {
	new=$(mktemp -d "$cache/$1.XXXXXX")
	chmod 755 "$new"
	trap 'rm -rf "$new"' EXIT
	trap 'exit 130' INT TERM HUP
}

# publish TEMPORARY FOLDER STAMP: puts a finished folder in place in one step. A folder that is in
# use by a running VM is moved aside, not emptied under it.
publish() {
	echo "$3" >"$1/.recipe"
	if [ -e "$2" ]; then
		old=$(mktemp -d "$cache/old.XXXXXX")
		mv -T "$2" "$old/gone"
		mv -T "$1" "$2"
		rm -rf "$old"
	else
		mv -T "$1" "$2"
	fi
}

# in_chroot ROOT FOLDERS COMMAND...: runs it in ROOT, where the FOLDERS (one argument, with spaces between) are as here.
# Takes root. Its mounts are its own, and gone with it.
in_chroot() {
	unshare -m sh -eu -c '
		root=$1
		for dir in $2 /proc /dev; do
			mkdir -p "$root$dir"
			mount --bind "$dir" "$root$dir"
		done
		shift 2
		exec chroot "$root" /usr/bin/env -i PATH=/usr/bin:/usr/sbin LC_ALL=C "$@"
	' sh "$@"
}

# compiler ROOT STAMP SUITE COMPILER PACKAGE...: a compiler of SUITE, with what more its user needs, unpacked into ROOT to
# be run in a chroot. In a shell of its own: the caller's $new and $stamp stay what they are.
compiler() (
	root=$1 stamp=$2 suite=$3
	fresh "$root" "$stamp" && exit
	say "kernel $suite: $4, unpacked"
	temporary tools
	shift 3
	"$here/debs" "$suite" "$new" "$@" make bash coreutils sed gawk grep findutils perl-base dash
	ln -sf dash "$new/usr/bin/sh"
	[ -e "$new/usr/bin/awk" ] || ln -s gawk "$new/usr/bin/awk"
	mkdir -p "$new/proc" "$new/dev" "$new/tmp" "$(dirname "$root")"
	publish "$new" "$root" "$stamp"
)
