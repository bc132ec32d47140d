#!/usr/bin/env bash
# Debian's clang with the runtime of libFuzzer and the sanitizers, in a folder of its own, without root:
# `requirements/clang.sh FOLDER` makes FOLDER/bin/clang++, which uses this machine's GCC for the C++ library.
set -euo pipefail

version=19
packages=(clang-$version libclang-common-$version-dev libclang-cpp$version libclang-rt-$version-dev libclang1-$version
  libllvm$version llvm-$version-linker-tools)
target=$(realpath -m "$1")
source "$(dirname "$0")/debian.sh"
unpack_debian "$target" "${packages[@]}"
llvm=usr/lib/llvm-$version
# It looks for its libraries beside itself alone.
for library in "$target/usr/lib"/*-linux-gnu/lib*.so.*; do
  ln -sf "$(realpath --relative-to "$target/$llvm/lib" "$library")" "$target/$llvm/lib/"
done
ln -s "$llvm/bin" "$target/bin"
"$target/bin/clang++" --version > /dev/null
