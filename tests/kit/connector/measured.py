"""Engines whose measures are read."""

from __future__ import annotations

from typing import Any

from tests.kit.connector.saving import DENSE
from tests.kit.connector.scripted import ScriptedEngine
from tests.kit.connector.warm import warm_engine


def take(engine: ScriptedEngine) -> dict[str, Any]:
    """Takes what vLLM gets when the time has come."""
    engine.connector.measures.not_before_s = 0.0
    stats = engine.connector.get_kv_connector_stats()
    return {} if stats is None else dict(stats.data)


def measured_engine(**changes: Any) -> ScriptedEngine:
    """Of whose first prompt everything is cached, and nothing is measured yet."""
    engine = warm_engine(DENSE, **changes)
    engine.connector.measures.clock = lambda: engine.now_s
    take(engine)
    return engine
