"""The library that seals links, and its speed."""

from __future__ import annotations

from kvoffload.peers.seal_library import FAST, find_seal_library, time_seal_rate


def test_it_tells_what_seals_and_how_fast() -> None:
    found = find_seal_library()
    assert found.describe() == f"{found.name} ({found.file})"
    assert found.is_fast == (found.version >= FAST)
    assert time_seal_rate() > 0
