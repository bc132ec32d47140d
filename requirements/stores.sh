#!/usr/bin/env bash
# Debian's redis-server, prometheus, chromium and the libraries of Mooncake's client, in a folder of their own, without
# root: `requirements/stores.sh FOLDER`.
set -euo pipefail

packages=(redis-server redis-tools libjemalloc2 liblzf1 prometheus libibverbs1 ibverbs-providers librdmacm1 libnl-3-200
  libnl-route-3-200 libnuma1 liburing2 chromium-headless-shell chromium-common fonts-dejavu-core libasound2
  libasyncns0 libatk1.0-0 libatspi2.0-0 libdav1d6 libdbus-1-3 libdouble-conversion3 libdrm2 libflac12
  libfontconfig1 libfreetype6 libgbm1 libgraphite2-3 libharfbuzz0b libharfbuzz-subset0 libjpeg62-turbo libminizip1
  libmp3lame0 libmpg123-0 libnspr4 libnss3 libogg0 libopenh264-7 libopenjp2-7 libopus0 libpng16-16 libpulse0
  libsndfile1 libvorbis0a libvorbisenc2 libwayland-server0 libx11-6 libx11-xcb1 libxau6 libxcb1 libxcomposite1
  libxdamage1 libxdmcp6 libxext6 libxfixes3 libxi6 libxkbcommon0 libxnvctrl0 libxrandr2 libxrender1)
target=$(realpath -m "$1")
source "$(dirname "$0")/debian.sh"
unpack_debian "$target" "${packages[@]}"
# One folder of libraries: libnl's is in another one than the rest.
if [[ -d $target/lib ]]; then
  cp -a "$target/lib/." "$target/usr/lib/"
  rm -r "$target/lib"
fi
