"""10_sglang_and_vllm/run.py starts 10_sglang_and_vllm/with_vllm.py and 10_sglang_and_vllm/with_sglang.py."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.sglang.engine import ARGUMENTS, ROOT, VLLM_PYTHON, engine_environment

pytestmark = pytest.mark.sglang

BUILD = "import sys, pathlib; from tests.vllm.tiny_models import DENSE; DENSE.build(pathlib.Path(sys.argv[1]))"
VLLM_ARGUMENTS = {"enforce_eager": True, "max_model_len": 1024, "kv_cache_memory_bytes": 64 << 20}
SGLANG_ARGUMENTS = {name: value for name, value in ARGUMENTS.items() if name not in {"device", "page_size"}}


def test_the_example_runs(tmp_path: Path) -> None:
    if not VLLM_PYTHON.exists():
        pytest.skip("there is no .venv with vLLM (`make setup` makes it)")
    model = tmp_path / "model"
    subprocess.run([sys.executable, "-c", BUILD, str(model)], cwd=ROOT, check=True, capture_output=True)
    command = [str(VLLM_PYTHON), "examples/10_sglang_and_vllm/run.py", str(model)]
    command += ["--vllm", str(VLLM_PYTHON), "--vllm-arguments", json.dumps(VLLM_ARGUMENTS)]
    command += ["--sglang", sys.executable, "--sglang-arguments", json.dumps(SGLANG_ARGUMENTS)]
    environment = engine_environment()
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=540, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    assert [line.split()[0] for line in done.stdout.splitlines()[1:]] == ["vLLM", "SGLang:", "20"], done.stdout
