"""A recorded trace says which blocks were asked for, within a bound, and recording never blocks the server."""

from __future__ import annotations

import json
import logging
import stat
import threading
from pathlib import Path

import numpy as np
import pytest

from kvoffload.cache.trace import find_block_tokens, read_trace
from kvoffload.cli import prompt_recorder
from kvoffload.cli.prompt_recorder import PromptRecorder
from kvoffload.errors import ConfigError

TAGS = np.arange(1, 9, dtype="<u8").tobytes()


def test_what_is_recorded_is_a_trace(tmp_path: Path) -> None:
    path, now_s = tmp_path / "trace.jsonl", [100.0]
    recorder = PromptRecorder(path, clock=lambda: now_s[0])
    recorder.note(0, 16, 130, TAGS)
    now_s[0] = 101.5
    recorder.note(0, 16, 64, TAGS[:32])
    recorder.close()
    assert find_block_tokens(path) == 16
    first, second = read_trace(path, block_tokens=16)
    assert (first.timestamp_ms, first.input_length, first.hash_ids) == (0.0, 130, tuple(range(1, 9)))
    assert (second.timestamp_ms, second.hash_ids) == (1500.0, (1, 2, 3, 4))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_blocks_of_another_identity_are_others(tmp_path: Path) -> None:
    recorder = PromptRecorder(tmp_path / "t")
    for name_space in (0, 1, 2):
        recorder.note(name_space, 16, 128, TAGS)
    recorder.close()
    ids = [set(request.hash_ids) for request in read_trace(tmp_path / "t", block_tokens=16)]
    assert len(set.union(*ids)) == 24


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "t").write_text("mine")
    with pytest.raises(ConfigError, match=r"--record .* cannot be made: File exists"):
        PromptRecorder(tmp_path / "t")
    assert (tmp_path / "t").read_text() == "mine"
    with pytest.raises(ConfigError, match="No such file or directory"):
        PromptRecorder(tmp_path / "nowhere" / "t")


def test_a_full_file_is_said_once_and_has_whole_lines(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    recorder = PromptRecorder(tmp_path / "t", limit_bytes=1000)
    with caplog.at_level(logging.WARNING):
        for _ in range(100):
            recorder.note(0, 16, 128, TAGS)
        recorder.close()
    lines = (tmp_path / "t").read_text().splitlines()
    assert 0 < len(lines) < 100
    assert all(json.loads(line)["input_length"] == 128 for line in lines)
    assert len(caplog.messages) == 2, "it is said once that the file is full, and at the end what is not in it"
    assert f"{100 - len(lines)} prompts are not in" in caplog.messages[-1]


def test_whoever_notes_waits_for_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(prompt_recorder, "QUEUED", 3)
    may_write = threading.Event()
    real = prompt_recorder.format_line
    monkeypatch.setattr(prompt_recorder, "format_line", lambda *one: may_write.wait() and real(*one))
    recorder = PromptRecorder(tmp_path / "t")
    for _ in range(50):
        recorder.note(0, 16, 128, TAGS)
    may_write.set()
    with caplog.at_level(logging.WARNING):
        recorder.close()
    written = len((tmp_path / "t").read_text().splitlines())
    assert written in (3, 4)
    assert f"{50 - written} prompts are not in" in caplog.messages[-1]


@pytest.mark.parametrize(
    "first", ["", "no json\n", "[1]\n", '{"block_tokens": "16"}\n', '{"block_tokens": 0}\n', "{}\n"]
)
def test_a_trace_that_does_not_say_has_the_published_blocks(tmp_path: Path, first: str) -> None:
    (tmp_path / "t").write_text(first)
    assert find_block_tokens(tmp_path / "t") == 512
    assert find_block_tokens(tmp_path / "absent") == 512
