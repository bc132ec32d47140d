"""Prompts that a server explains."""

from __future__ import annotations

from typing import Any

from kvoffload.protocol import (
    Credits,
    Explain,
    Explained,
    Explanation,
    Publish,
    Query,
)
from tests.kit.server.harness import Client


def store(engine: Client, chain: bytes) -> None:
    """All blocks of the chain, as an engine does it."""
    granted = engine.ask(Credits(name_space=engine.name_space, group=0, count=len(chain) // 32))
    assert len(granted.tickets) == 8 * (len(chain) // 32)
    published = Publish(name_space=engine.name_space, group=0, shard=0, tickets=granted.tickets, hashes=chain)
    assert engine.tell(published) is None


def explain(engine: Client, missing: bytes, **changes: Any) -> Explanation:
    query = Query(**({"asked": 64, "promised": 0, "missing": missing} | changes))
    answer = engine.ask(Explain(queries=(query,)))
    assert isinstance(answer, Explained), answer
    (explanation,) = answer.answers
    return explanation
