"""docs/protocol.md suffices to write a client: one that knows nothing of kvoffload saves, another loads."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvoffload.cache import CacheSettings
from kvoffload.server.loop import CacheServer, ServerPlan
from kvoffload.units import MIB
from tests.kit import server as kit

SCRIPT = Path(kit.__file__).with_name("foreign_client.py")


@pytest.fixture
def path(tmp_path: Path) -> Iterator[Path]:
    settings = CacheSettings(memory_bytes=128 * MIB, segment_bytes=64 * MIB)
    server = CacheServer(ServerPlan(socket=tmp_path / "s", memory={"": settings}))
    thread = threading.Thread(target=server.run)
    thread.start()
    yield tmp_path / "s"
    server.stop()
    thread.join(60)
    assert not thread.is_alive()
    server.close()


def run(path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    # From another folder and without ours on its path.
    command = [sys.executable, "-P", str(SCRIPT), str(path), *arguments]
    return subprocess.run(command, cwd="/", capture_output=True, text=True, check=False, timeout=500)


def test_one_that_knows_nothing_of_kvoffload_saves_and_another_loads(path: Path) -> None:
    for engine, what, count in (("first", "save", "200"), ("second", "load", "200"), ("third", "load", "7")):
        done = run(path, engine, what, count)
        assert (done.stdout, done.stderr) == (f"{what} of {count} blocks is done\n", "")
    missed = run(path, "second", "load", "201")
    assert missed.stderr == "outcome 0, boundary 3200\n"


def test_it_is_as_short_as_it_should_be() -> None:
    text = SCRIPT.read_text()
    assert text.count("\n") <= 150
    assert "import kvoffload" not in text
    assert "from kvoffload" not in text
