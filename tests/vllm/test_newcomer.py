"""A newcomer's walk, by the commands of the README: clone, demo, serve, an engine at work, and all that looks at it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import struct
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from tests.house.tree import ROOT
from tests.kit.server.tiers import await_that
from tests.kit.web.browser import browsing
from tests.vllm.smollm2 import MISSING, is_installed

pytestmark = pytest.mark.vllm

WAIT_S = 120.0


@dataclass
class Walk:
    """A clone that shares the set-up of this tree, and what was started in it."""

    clone: Path
    folder: Path
    running: dict[str, subprocess.Popen[str]] = field(default_factory=dict)

    @property
    def socket(self) -> Path:
        return self.folder / "s"

    def type(self, *words: str, code: int | None = 0) -> str:
        """Returns what a command prints that ends by itself. None: it may find something wrong."""
        done = subprocess.run(
            words, cwd=self.clone, env=self._environment, capture_output=True, text=True, check=False, timeout=900
        )
        assert code in (None, done.returncode), (words, done.stdout[-4000:], done.stderr[-4000:])
        return done.stdout

    def begin(self, name: str, *words: str) -> str:
        """The first line of a command that goes on."""
        self.running[name] = subprocess.Popen(
            words, cwd=self.clone, env=self._environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        output = self.running[name].stdout
        assert output is not None
        return output.readline()

    def end(self, name: str) -> None:
        """Ends it as Ctrl-C or a service manager does."""
        with self.running.pop(name) as process:
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0, name

    def ask(self, *words: str) -> list[dict[str, Any]]:
        """The lines of a command with --json."""
        return [json.loads(line) for line in self.type(*words, "--json", *self.server).splitlines()]

    @property
    def server(self) -> tuple[str, str]:
        return "--set", f"server={self.socket}"

    @property
    def _environment(self) -> dict[str, str]:
        return {**os.environ, "PATH": f"{ROOT / '.venv' / 'bin'}:{os.environ['PATH']}"}


@pytest.fixture(scope="module")
def walk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Walk]:
    if shutil.which("make") is None or not (ROOT / ".git").exists():
        pytest.skip("git's folder or make is missing: there is nothing to clone, or to make it with")
    folder = tmp_path_factory.mktemp("newcomer")
    clone = folder / "kvoffload"
    subprocess.run(["git", "clone", "-q", "--depth", "1", f"file://{ROOT}", str(clone)], check=True, timeout=120)
    (clone / ".venv").symlink_to(ROOT / ".venv")
    walk = Walk(clone, folder)
    yield walk
    for process in walk.running.values():
        with process:
            process.kill()


@pytest.fixture(scope="module")
def working(walk: Walk) -> Walk:
    """A server that records, an engine that works at it, and the page."""
    trace = ("--record", str(walk.folder / "trace.jsonl"))
    told = walk.begin("server", "kvoffload", "serve", *walk.server, "--set", "memory=256MiB", *trace)
    assert told.startswith(f"kvoffload serves 256MiB on {walk.socket}")
    told = walk.begin("engine", "python", "examples/06_working_engine.py", str(walk.socket))
    assert told.startswith("25 turns: ")
    return walk


@pytest.mark.timeout(900)
def test_make_demo(walk: Walk) -> None:
    """`examples/demo.py`, without the set-up, which this tree has had."""
    told = walk.type("make", "-o", ".venv/stamps/native", "-o", ".venv/stamps/text", "demo")
    assert "answers and logprobs, restored against the engine's own cache: equal" in told
    assert "kvoffload.connector.facade.KVOffloadConnector" in told
    assert ElementTree.parse(walk.clone / ".cache/demo/demo.svg").getroot().tag.endswith("svg")
    if is_installed():
        assert "answers, restored against the engine's own cache: equal" in told
        assert "Ada" in told.partition("Who is Ada")[2]
    else:
        assert MISSING in told


def test_top_once(working: Walk) -> None:
    # The outcomes of prompts reach the server a moment after the answers.
    await_that(lambda: working.ask("kvoffload", "top", "--once")[0]["prompts"]["totals"]["hit_memory"] > 0)
    [row] = working.ask("kvoffload", "top", "--once")
    assert row["up"]
    assert "tokens    so far: " in working.type("kvoffload", "top", "--once", *working.server)


def test_the_page_while_the_engine_works(working: Walk, tmp_path: Path) -> None:
    line = working.begin("web", "kvoffload", "web", *working.server, "--set", "http=tcp://127.0.0.1:0")
    with browsing(tmp_path / "browser") as browser:
        browser.open(line.split()[-1])
        browser.look_like(width=1120)
        hits = "Number(document.querySelector('[data-path=\"prompts.totals.hit_memory\"]')?.dataset.told)"
        browser.wait_for(f"{hits} > 0")
        first = browser.run(hits)
        browser.wait_for(f"{hits} > {first}")
        browser.photograph(tmp_path / "page.png")
        assert browser.complaints == []
    picture = (tmp_path / "page.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert struct.unpack(">2I", picture[16:24]) == (1120, 900)
    assert len(picture) > 20_000
    working.end("web")


def test_doctor_knows_the_server(working: Walk) -> None:
    told = working.type("kvoffload", "doctor", "--json", *working.server, code=None)
    rows = {row["check"]: row for row in map(json.loads, told.splitlines())}
    assert rows["server"]["verdict"] == "ok"
    assert all(row["remedy"] for row in rows.values() if row["verdict"] == "fail")


def test_plan_of_the_model_of_the_demo(walk: Walk) -> None:
    models = [file.parent for file in (walk.clone / ".cache/demo").rglob("config.json")]
    assert models, "the demo leaves its model"
    told = walk.type("kvoffload", "plan", str(models[0]), "--memory", "64GiB")
    assert "bytes" in told
    assert "tokens" in told


def test_inspect(working: Walk) -> None:
    engine = next(row for row in working.ask("kvoffload", "inspect", "sessions") if row["role"] == "scheduler")
    assert engine["report"]
    report = working.type("kvoffload", "inspect", "report", engine["engine"], *working.server)
    assert "bytes a block" in report
    [identity] = working.ask("kvoffload", "inspect", "identities")
    assert len(identity["groups"]) == 1
    blocks = working.ask("kvoffload", "inspect", "blocks", "--count", "5")
    assert len(blocks) == 5
    rows = working.ask("kvoffload", "inspect", "block", blocks[0]["hash"])
    assert blocks[0]["group"] in [row["group"] for row in rows]


def test_replay_of_what_was_recorded(working: Walk) -> None:
    end_s = time.monotonic() + WAIT_S
    while working.ask("kvoffload", "top", "--once")[0]["prompts"]["asked_blocks"] < 1000:
        assert time.monotonic() < end_s
    working.end("engine")
    working.end("server")
    table = working.type("kvoffload", "replay", str(working.folder / "trace.jsonl"))
    for policy in ("lru", "slru", "s3fifo", "arc", "prefix", "optimum"):
        assert policy in table
