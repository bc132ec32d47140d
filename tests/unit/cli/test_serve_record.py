"""A real server records the requests of engines, and the record can be replayed."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

from tests.kit.cli.commands import run
from tests.kit.web.prompt_load import BLOCK, PromptLoad

TURNS = 80
SEGMENT = "64MiB"


def test_a_recorded_trace_is_replayed_as_it_was(tmp_path: Path) -> None:
    path, trace = tmp_path / "s", tmp_path / "trace.jsonl"
    command = [sys.executable, "-m", "kvoffload", "serve", "--record", str(trace)]
    for one in (f"server={path}", f"memory={SEGMENT}", f"segment_size={SEGMENT}"):
        command += ["--set", one]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server:
        try:
            assert server.stdout is not None
            assert server.stdout.readline().startswith("kvoffload serves")
            load = PromptLoad(path)
            for _ in range(TURNS):
                load.turn(conversations=10)
            load.await_told()
            load.close()
            server.send_signal(signal.SIGTERM)
            assert server.wait(60) == 0
        finally:
            server.kill()
    lines = [json.loads(line) for line in trace.read_text().splitlines()]
    assert len(lines) == TURNS
    assert {line["block_tokens"] for line in lines} == {BLOCK}
    done = run("replay", str(trace), "--policy", "lru", "--capacity", "100", "--json")
    assert done.returncode == 0, done.stderr
    (lru, optimum) = (json.loads(line) for line in done.stdout.splitlines())
    references = sum(len(line["hash_ids"]) for line in lines)
    distinct = len({one for line in lines for one in line["hash_ids"]})
    assert lru["references"] == references
    assert lru["hits"] == optimum["hits"] == references - distinct


def test_a_file_that_is_there_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "t").write_text("mine")
    done = run(
        "serve", "--set", f"server={tmp_path / 's'}", "--set", f"memory={SEGMENT}", "--record", str(tmp_path / "t")
    )
    assert done.returncode != 0
    assert "--record" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert (tmp_path / "t").read_text() == "mine"
