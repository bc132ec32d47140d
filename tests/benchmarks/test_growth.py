"""How cost grows is measured for every size, at sizes of which many fit into a test."""

from __future__ import annotations

from benchmarks.growth import POOLS_GIB, WALK, Size, draw, measure
from kvoffload.units import GIB, MIB


def test_every_size_is_measured_beside_the_smallest_and_drawn() -> None:
    rows = list(measure(entries=(131_072, 200_000), turns=2, starts=0))
    assert [row["what"] for row in rows] == ["entries"] * 2 + ["pool"] * 3 + ["engines"] * 3 + ["tenants"] * 3
    assert [row["pool_gib"] for row in rows[2:5]] == list(POOLS_GIB)
    assert rows[-1]["tenants"] == rows[-4]["engines"] == 64
    for row in rows:
        assert row["entries"] >= 131_072
        assert all(found["ns"] > 0 and found["times"] > 0 for found in row["operations"].values())
        assert row["index_bytes_an_entry"] > 64
    assert all(("adoption_s" in row) == (row["what"] == "entries") for row in rows)
    picture = draw(rows)
    assert picture.startswith("<svg")
    assert WALK in picture


def test_records_fill_the_pool() -> None:
    for entries, record_bytes in ((1 << 20, 256 * 1024), (1_000_000, 256 * 1024), (262_144, MIB)):
        assert Size(entries, 256 * GIB).record_bytes == record_bytes
