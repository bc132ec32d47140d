# To be sourced: `unpack_debian FOLDER PACKAGE...` makes the folder anew, of Debian's packages as they are, without root.
# With `architecture` they are those of another kind of machine.
unpack_debian() (
  set -euo pipefail
  target=$1
  shift
  work=$(mktemp -d)
  trap 'rm -rf "$work"' EXIT
  cd "$work"
  if test "${architecture:-}" || ! apt-get -q -q download "$@" 2> apt.log; then
    # No lists of packages here, or old ones: lists of our own.
    mkdir -p lists/partial cache/archives/partial
    own=(-o "Dir::State::lists=$work/lists" -o "Dir::Cache=$work/cache" ${architecture:+-o "APT::Architecture=$architecture"})
    apt-get "${own[@]}" -q -q update 2> apt.log && apt-get "${own[@]}" -q -q download "$@" 2> apt.log \
      || { cat apt.log; exit 1; }
  fi
  rm -rf "$target"
  mkdir -p "$target"
  for package in ./*.deb; do dpkg -x "$package" "$target"; done
)
