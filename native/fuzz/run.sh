#!/usr/bin/env bash
# Every native target for SECONDS: `native/fuzz/run.sh SECONDS CLANG`. CLANG is the folder of requirements/clang.sh,
# filled if it is empty. Without Clang the targets run on inputs made at random. What breaks one lies in
# build/fuzz/found; the others run all the same.
set -euo pipefail

seconds=$1
clang=$(realpath -m "$2")
cd "$(dirname "$0")/../.."
mapfile -t names < <(sed -n 's/^kvoffload_fuzz_target(\([a-z_]*\) .*/\1/p' native/fuzz/CMakeLists.txt)
options=(-S native -G Ninja -DKVOFFLOAD_TESTS=ON -DKVOFFLOAD_CUDA=OFF -DCMAKE_BUILD_TYPE=RelWithDebInfo
  "-DKVOFFLOAD_SANITIZE=address;undefined")

build() { { cmake -B "$1" "${@:3}" "${options[@]}" && cmake --build "$1" --target $2; } > "$1.log" 2>&1 || { cat "$1.log"; exit 1; }; }

mkdir -p build/fuzz/found
# Clang's package has no symbolizer; GCC's says where in the sources a fault is, too.
export ASAN_SYMBOLIZER_PATH=${ASAN_SYMBOLIZER_PATH:-$(command -v llvm-symbolizer || command -v addr2line || true)}
[[ -x $clang/bin/clang++ ]] || bash requirements/clang.sh "$clang" || true
failed=()
if [[ -x $clang/bin/clang++ ]]; then
  build build/fuzz/clang "fuzz_cache ${names[*]/#/fuzz_} ${names[*]/#/replay_}" \
    -DKVOFFLOAD_FUZZ=ON "-DCMAKE_CXX_COMPILER=$clang/bin/clang++"
  for name in cache "${names[@]}"; do
    corpus=build/fuzz/corpus/$name program=build/fuzz/clang/fuzz/fuzz_$name
    mkdir -p "$corpus"
    if [[ $name == cache ]]; then program=build/fuzz/clang/tests/fuzz_cache; else
      "build/fuzz/clang/fuzz/replay_$name" --seeds "$corpus"
    fi
    echo "-- $name"
    "$program" -max_total_time="$seconds" -max_len=4096 -timeout=20 -rss_limit_mb=3000 -print_final_stats=1 \
      -artifact_prefix="build/fuzz/found/$name-" "$corpus" > "build/fuzz/$name.log" 2>&1 || failed+=("$name")
    grep -E 'number_of_executed_units|^Done' "build/fuzz/$name.log" || true
  done
else
  echo "not to be had here: Clang; inputs are made at random"
  build build/fuzz/gcc "${names[*]/#/replay_}"
  for name in "${names[@]}"; do
    echo "-- $name"
    "build/fuzz/gcc/fuzz/replay_$name" --for "$seconds" "$RANDOM" 2>&1 | tee "build/fuzz/$name.log" || failed+=("$name")
  done
fi
for name in "${failed[@]}"; do
  echo "FAIL  $name: build/fuzz/$name.log"
  grep -E -m 5 'ERROR|FAIL|SUMMARY|error:' "build/fuzz/$name.log" || tail -n 5 "build/fuzz/$name.log"
done
[[ ${#failed[@]} == 0 ]]
