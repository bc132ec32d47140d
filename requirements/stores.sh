#!/usr/bin/env bash
# Debian's redis-server, prometheus and the libraries of Mooncake's client, in a folder of their own, without root: `requirements/stores.sh FOLDER`.
set -euo pipefail

packages=(redis-server redis-tools libjemalloc2 liblzf1 prometheus
  libibverbs1 ibverbs-providers librdmacm1 libnl-3-200 libnl-route-3-200 libnuma1 liburing2)
target=$(realpath -m "$1")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"

download() { apt-get "$@" -q -q download "${packages[@]}" 2> apt.log; }

if ! download; then
  # No lists of packages here, or old ones: lists of our own.
  mkdir -p lists/partial cache/archives/partial
  own=(-o "Dir::State::lists=$work/lists" -o "Dir::Cache=$work/cache")
  apt-get "${own[@]}" -q -q update 2> apt.log && download "${own[@]}" || { cat apt.log; exit 1; }
fi
rm -rf "$target"
mkdir -p "$target"
for package in ./*.deb; do dpkg -x "$package" "$target"; done
# One folder of libraries: libnl's is in another one than the rest.
if [[ -d $target/lib ]]; then
  cp -a "$target/lib/." "$target/usr/lib/"
  rm -r "$target/lib"
fi
