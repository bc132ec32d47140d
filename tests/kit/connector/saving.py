"""Engines that save, and what they saved."""

from __future__ import annotations

from typing import Any

from kvoffload.connector.common.step_plan import StepPlan
from tests.kit.connector.engine_configs import full, recurrent, window
from tests.kit.connector.scripted import ScriptedEngine, list_moves

TWO_SIZES = ((["a", "b"], full(8)), (["c"], window(4, tokens=6, head_size=16)))


DENSE = ((["a"], full(4)),)


HYBRID = ((["r"], recurrent(4)), (["a"], full(4)))


def make_engine(groups: object = DENSE, **changes: Any) -> ScriptedEngine:
    return ScriptedEngine(*groups, **changes)  # type: ignore[misc, arg-type]


def saved_blocks(plan: StepPlan, group: int = 0) -> list[int]:
    return [move.block for move in list_moves(*plan.saves) if move.group == group]


MIXED = ((["a"], full(4)), (["c"], window(4, tokens=6)))


def names_of(engine: ScriptedEngine, group: int = 0) -> list[bytes]:
    return [one.name for one in engine.cache.published if one.group == group and one.shard == 0]


def hashes_of(engine: ScriptedEngine, request_id: str) -> list[bytes]:
    return list(engine.requests[request_id].block_hashes)


def save_prompt(engine: ScriptedEngine, request_id: str, tokens: range, **wishes: Any) -> StepPlan:
    """Its saves are on their way."""
    engine.admit(engine.arrive(request_id, tokens, **wishes))
    return engine.step()
