#!/usr/bin/env bash
# Build, GPU tests and GPU benchmarks with the python3 that is there (torch, numpy, pytest, nanobind, scikit-build-core),
# without network; with vLLM's build for CUDA there, real vLLM too. WHEELS names a folder with wheels that the machine
# lacks. Results: benchmarks/results/<gpu>.json.
set -euo pipefail
cd "$(dirname "$0")/.."

python="${PYTHON:-python3}"
site="$PWD/build/gpu-site"
rm -rf "$site"
export PIP_NO_INDEX=1 PIP_DISABLE_PIP_VERSION_CHECK=1

if [ -n "${WHEELS:-}" ]; then
    echo "== gpu 1/4: wheels from $WHEELS"
    "$python" -m pip install -q --no-deps --target "$site" "$WHEELS"/*.whl
else
    echo "== gpu 1/4: no WHEELS given, using what $python has"
fi
echo "== gpu 2/4: build"
"$python" -m pip install -q --no-build-isolation --no-deps --target "$site" .

# Tests and benchmarks run from the tree, so the extension is lent to it while they do.
trap 'rm -f kvoffload/_native*.so' EXIT
cp "$site"/kvoffload/_native*.so kvoffload/
export PYTHONPATH="$PWD:$site${PYTHONPATH:+:$PYTHONPATH}"
echo "== gpu 3/4: tests"
"$python" -m pytest -q -o addopts="" -m gpu tests/gpu tests/examples/test_mini_engine.py tests/unit/bench/test_copy_gpu.py || { status=$?; [ "$status" -eq 5 ] && echo "no GPU test ran" || exit "$status"; }
echo "== gpu 4/4: benchmarks"
"$python" -m benchmarks.gpu_results benchmarks/results
