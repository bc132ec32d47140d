"""Copies on a GPU that several tests make."""

from __future__ import annotations

from kvoffload.kvspec import LAYOUTS, KVGeometry
from tests.kit.kvspec.builders import in_layout, qwen3next

CASES = {
    **{f"{name}-{blocks}": (in_layout, name, blocks) for name in LAYOUTS for blocks in (2, 64)},
    "qwen3next-2": (qwen3next, "", 2),
}


def make_geometry(case: str) -> KVGeometry:
    build, layout, blocks = CASES[case]
    return build(layout, num_layers=3, num_blocks=blocks) if layout else build(blocks)  # type: ignore[operator]
