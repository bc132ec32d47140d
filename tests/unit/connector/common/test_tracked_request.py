"""State that begins with a request."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from tests.kit.connector.engine_configs import full, window
from tests.kit.connector.scripted import ScriptedEngine


def test_progress_is_of_one_request() -> None:
    engine = ScriptedEngine((["a"], full(4)), (["c"], window(4)), retention_interval=0)
    for name in "ab":
        engine.arrive(name, range(30))
    one, other = (engine.side.requests[name] for name in "ab")
    assert not one.is_tainted
    assert one.progress.next == other.progress.next == [0, 0]
    assert one.progress.next is not other.progress.next
    assert one.progress.ends is not other.progress.ends
    assert one != other
