#!/usr/bin/env bash
# QEMU's emulator of aarch64 and Debian 12's Python for it, in a folder of their own, without root:
# `requirements/emulator.sh FOLDER`.
set -euo pipefail

target=$(realpath -m "$1")
source "$(dirname "$0")/debian.sh"
unpack_debian "$target/qemu" qemu-user-static
architecture=arm64 unpack_debian "$target/root" python3.11-minimal libpython3.11-minimal libpython3.11-stdlib libc6 \
  libgcc-s1 libstdc++6 zlib1g libexpat1 libffi8 libssl3 libuuid1 libbz2-1.0 liblzma5 libsqlite3-0
touch "$target/made"
