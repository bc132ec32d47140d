"""The report's table."""

from __future__ import annotations

from dataclasses import replace

from kvoffload.kvspec import Exclusion, Padding, prove_complete
from tests.kit.kvspec.builders import attention, dense, one_group, qwen3next


def test_the_table_says_who_owns_the_bytes() -> None:
    geometry = dense(2, num_layers=2)
    shared, elsewhere = attention("layers.2", alias_of="layers.0"), attention("draft", excluded="on the host")
    (kv,) = geometry.allocations
    geometry = replace(
        geometry,
        groups=(one_group(*geometry.groups[0].layers, shared, elsewhere),),
        allocations=(replace(kv, size_bytes=266),),
        paddings=(Padding(allocation="kv", base=256, length=8),),
        exclusions=(Exclusion(name="workspace", allocation="kv", base=264, length=2),),
    )
    assert prove_complete(geometry).claims == {"page": 256, "padding": 8, "exclusion": 2}
    lines = [" ".join(line.split()) for line in str(prove_complete(geometry)).splitlines()]
    assert lines == [
        "2 blocks, 1 allocations, every byte accounted for",
        "allocation kv 266 B",
        "layer layers.0, part kv 128 B",
        "layer layers.1, part kv 128 B",
        "exclusion workspace 2 B",
        "padding 8 B",
        "layer layers.2 uses the pages of layers.0",
        "layer draft is excluded: on the host",
    ]


def test_overlaid_groups_are_shown_with_what_they_share() -> None:
    text = str(prove_complete(qwen3next(2)))
    assert f"-{3 * 2 * 268_288:,} B" in text
    assert "groups group 0, group 1, group 2, group 3 overlay each other" in text
