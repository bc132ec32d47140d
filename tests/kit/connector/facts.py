"""Facts of ranks and groups, as workers report them to the scheduler's side."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kvoffload.cache import GroupRule
from kvoffload.connector.common.step_plan import GroupFacts, WorkerFacts
from kvoffload.kvspec import ReuseRule


def group_facts(index: int, reuse: ReuseRule = ReuseRule.PREFIX, *, block_size: int = 4, window: int = 0) -> GroupFacts:
    rule = GroupRule(block_size=block_size, reuse=reuse, window=window)
    return GroupFacts(index=index, name=f"group {index}", rule=rule, record_bytes=64)


GROUPS = (group_facts(0), group_facts(2, ReuseRule.WINDOW, block_size=8, window=6))


def facts(rank: int = 0, **changes: Any) -> WorkerFacts:
    return replace(
        WorkerFacts(
            rank=rank,
            fingerprint=b"f" * 32,
            description={"model": "acme/tiny"},
            groups=GROUPS,
            num_blocks=8,
            cache_bytes=1000,
        ),
        **changes,
    )
