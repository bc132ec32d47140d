"""The default configuration, as somebody tries it first: what the first request saves, its repeat finds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.house.tree import ROOT
from tests.vllm.engine import EnginePool
from tests.vllm.equality import restorable
from tests.vllm.tiny_models import DENSE

pytestmark = pytest.mark.vllm

ENGINE = """
import os, sys, tempfile
from pathlib import Path
from tests.vllm.engine import make_prompt, prepare_environment, start_engine
prepare_environment()
from tests.vllm import connector_probe
from tests.vllm.tiny_models import DENSE
transfer = {"kv_connector": "KVOffloadConnector", "kv_role": "kv_both"}
# All else is the default: an answer that a busy machine makes late is a miss by design, and not what is asked here.
transfer["kv_connector_extra_config"] = {"acquire_deadline": "10s"}
prompt = make_prompt(seed=1, length=1400)
for place in sys.argv[2:]:
    os.environ["TMPDIR"] = tempfile.tempdir = place
    engine = start_engine(DENSE, Path(sys.argv[1]), kv_transfer_config=transfer)
    connector_probe.prepare(engine)  # a repeat comes when what was saved has arrived
    cached = []
    for _ in range(2):
        cached.append(engine.generate(prompt, max_tokens=1).num_cached_tokens)
        engine.reset_local()
    print("cached:", *cached, flush=True)
    engine.close()
"""


def test_the_first_request_is_saved_and_its_repeat_hits(engines: EnginePool, tmp_path: Path) -> None:
    """With the default memory, of which an engine's start waits for nothing; three times, each with a server that knows
    nothing yet, the first in a process that knows nothing either."""
    places = [tmp_path / str(number) for number in range(3)]
    for place in places:
        place.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", ENGINE, str(engines.model_folder(DENSE)), *map(str, places)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("cached:")]
    assert lines == [f"cached: 0 {restorable(DENSE, 1400)}"] * len(places), done.stderr
