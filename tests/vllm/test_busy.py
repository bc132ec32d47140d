"""A short form of the benchmark on a busy machine: an engine with default settings, next to processes that spin."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.busy.__main__ import Runner
from benchmarks.busy.repeats import NOT_COUNTED
from kvoffload.protocol import Miss

pytestmark = pytest.mark.vllm

PROMPTS = 4


def test_repeats_are_restored_next_to_processes_that_spin(tmp_path: Path) -> None:
    """Some repeats may come before their save has ended, if the machine has still more work."""
    runner = Runner(tmp_path, prompts=PROMPTS, say=print)
    [found] = runner.measure("spinning 2", "private", ())
    assert found.asked == PROMPTS
    assert found.restored >= PROMPTS / 2, found
    assert found.restored + sum(found.reasons.values()) == PROMPTS
    assert set(found.reasons) <= {NOT_COUNTED, *(miss.label for miss in Miss)}
