"""Engines whose prompts are in the cache already."""

from __future__ import annotations

from dataclasses import replace

from kvoffload.protocol import Miss
from tests.kit.connector.engine_configs import full, window
from tests.kit.connector.scripted import ScriptedEngine

TWO_SIZES = ((["a", "b"], full(8)), (["c"], window(4, tokens=6, head_size=16)))
"""Two groups whose blocks differ in tokens."""


DENSE = ((["a"], full(4)),)


def make_engine(groups: object = TWO_SIZES, **changes: int) -> ScriptedEngine:
    return ScriptedEngine(*groups, **changes)  # type: ignore[misc, arg-type]


def warm_engine(groups: object = TWO_SIZES, *, tokens: int = 30, **changes: int) -> ScriptedEngine:
    """Everything of one prompt is saved and nothing of it is in the engine's own cache."""
    engine = make_engine(groups, **changes)
    engine.serve("first", range(tokens))
    engine.forget()
    engine.assert_at_rest()
    return engine


def leave_free(engine: ScriptedEngine, blocks: int) -> object:
    """Takes all blocks of the engine but so many."""
    return engine.pool.get_new_blocks(engine.pool.get_num_free_blocks() - blocks)


def load_apart(engine: ScriptedEngine) -> ScriptedEngine:
    """Lets requests with one prefix load it side by side, as in an engine without a prefix cache of its own."""
    engine.parts.restores.settings = replace(engine.parts.restores.settings, shares_loads=False)
    return engine


def note_misses(engine: ScriptedEngine) -> list[tuple[str, Miss]]:
    """Every miss that is noted from now on."""
    noted: list[tuple[str, Miss]] = []
    restores = engine.parts.restores
    restores.note_miss = lambda tracked, _local, reason: noted.append((tracked.request.request_id, reason))
    return noted
