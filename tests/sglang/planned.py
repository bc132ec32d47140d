"""The sizes of records that `kvoffload plan` computes for SGLang, and those that a server has from an engine."""

from __future__ import annotations

from pathlib import Path

from kvoffload.client.inspector import Inspector, Row
from kvoffload.plan.model_shape import Keeps, ShapeSettings, read_config
from kvoffload.plan.sglang_pages import PageSettings, read_pages
from kvoffload.plan.sizing import size_model
from kvoffload.types import ReuseRule
from tests.sglang.shared_records import Observer

RULES = {
    Keeps.TOKENS: ReuseRule.PREFIX,
    Keeps.WINDOW: ReuseRule.WINDOW,
    Keeps.STATE: ReuseRule.EXACT_BOUNDARY,
}


def plan_records(model: Path, *, page_tokens: int, kv_dtype: str = "auto") -> dict[str, int]:
    """Returns the bytes of a record by the rule of its group, as `kvoffload plan --engine sglang` has them."""
    settings = PageSettings(shape=ShapeSettings(kv_dtype=kv_dtype), page_tokens=page_tokens)
    sizing = size_model(read_pages(read_config(model), settings))
    return {RULES[group.keeps].label: settings.record_bytes(group) for group in sizing.groups}


def registered_records(observer: Observer) -> dict[str, int]:
    """Returns the same of the engine that has joined a server last."""
    found: list[Row] = []

    def is_told() -> bool:
        found[:] = Inspector(observer.client.look_into).list_identities()
        return bool(found)

    observer.await_that(is_told, "no engine has registered")
    return {group["reuse"]: group["record_bytes"] for group in found[-1]["groups"]}
