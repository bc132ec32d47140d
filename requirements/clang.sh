#!/usr/bin/env bash
# Debian's clang with the runtime of libFuzzer and the sanitizers, in a folder of its own, without root:
# `requirements/clang.sh FOLDER` makes FOLDER/bin/clang++, which uses this machine's GCC for the C++ library.
set -euo pipefail

version=19
packages=(clang-$version libclang-common-$version-dev libclang-cpp$version libclang-rt-$version-dev libclang1-$version
  libllvm$version llvm-$version-linker-tools)
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
llvm=usr/lib/llvm-$version
# It looks for its libraries beside itself alone.
for library in "$target/usr/lib"/*-linux-gnu/lib*.so.*; do
  ln -sf "$(realpath --relative-to "$target/$llvm/lib" "$library")" "$target/$llvm/lib/"
done
ln -s "$llvm/bin" "$target/bin"
"$target/bin/clang++" --version > /dev/null
