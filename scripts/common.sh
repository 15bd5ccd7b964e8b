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
