"""`kvoffload serve`: serves, ends on a signal, leaves nothing behind."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvoffload.cli import serve as serve_module
from kvoffload.cli.serve import AUTO_LIMIT_BYTES, choose_memory_bytes, make_terms
from kvoffload.config import Settings
from kvoffload.protocol import Counts, Stats
from kvoffload.units import GIB, MIB
from tests.unit.cli.test_app import run
from tests.unit.daemon.raw_client import RawClient
from tests.unit.daemon.test_server import hashes_of, register_of, save


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_serves_until_it_is_asked_to_end(tmp_path: Path, number: signal.Signals) -> None:
    path = tmp_path / "s"
    command = [sys.executable, "-c", "from kvoffload.cli.app import main; main()", "serve"]
    command += ["--set", f"server={path}", "--set", "memory=128MiB"]
    command += ["--set", "segment_size=64MiB", "--adopt-wait", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        assert server.stdout.readline() == f"kvoffload serves 128MiB on {path}, process {server.pid}\n"
        client = RawClient(path, register_of())
        save(client, hashes_of(3), 5)
        counts = client.ask(Stats())
        assert isinstance(counts, Counts)
        assert (counts.capacity_bytes, counts.readable) == (128 * MIB, 3)
        client.close()
        server.send_signal(number)
        assert server.wait(60) == 0
        assert server.stderr is not None
        assert server.stderr.read() == ""
    assert list(tmp_path.iterdir()) == []


def test_without_a_socket_one_line_says_what_to_do() -> None:
    done = run("serve")
    assert done.returncode == 2
    assert done.stderr == ("kvoffload: no socket to serve on; say `kvoffload serve --set server=/run/kvoffload.sock`\n")


def test_a_path_that_cannot_be_used_is_one_line(tmp_path: Path) -> None:
    done = run("serve", "--set", f"server={tmp_path}/none/s", "--set", "memory=64MiB")
    assert done.returncode == 2
    assert done.stderr.startswith(f"kvoffload: socket {tmp_path}/none/s cannot be used: No such file")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("memory", "free", "expected"),
    [
        ("auto", 64 * GIB, AUTO_LIMIT_BYTES),
        ("auto", 7 * GIB, 3 * GIB),
        ("auto", GIB, 512 * MIB),
        (10 * GIB + 5, 0, 10 * GIB),
        (64 * MIB, 0, 64 * MIB),
    ],
)
def test_memory_is_whole_segments(monkeypatch: pytest.MonkeyPatch, memory: int | str, free: int, expected: int) -> None:
    monkeypatch.setattr(serve_module, "memory_headroom_bytes", lambda: free)
    settings = Settings(memory=memory)  # type: ignore[arg-type]
    chosen = choose_memory_bytes(settings)
    assert chosen == expected
    terms = make_terms(settings, chosen)
    assert terms.memory_bytes % terms.segment_bytes == 0
