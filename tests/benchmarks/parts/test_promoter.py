"""Requests that wait for the disk go on until they are ended."""

from __future__ import annotations

import time
from pathlib import Path

from benchmarks.parts.promoter import HIT_BLOCKS, HIT_RECORD_BYTES, start_promoter
from kvoffload.bench.child import Child
from kvoffload.bench.served import join, make_chain, save_chain

WAIT_S = 60.0


def test_what_memory_has_lost_is_asked_for_over_and_over(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir(mode=0o700)
    arguments = (tmp_path / "s", 64, 0, "lru", tmp_path / "disk", 512)
    with (
        Child("kvoffload.bench.served", *arguments),
        join(tmp_path / "s", "saver", record_bytes=HIT_RECORD_BYTES) as client,
    ):
        for seed in range(24):
            save_chain(client, make_chain(HIT_BLOCKS, 1000 + seed))
            while client.stats().traffic["disk"]["waiting_bytes"]:
                time.sleep(0.001)
        end_s = time.monotonic() + WAIT_S
        with start_promoter(tmp_path / "s", 24):
            while client.stats().traffic["disk"]["promoted"] < 100:
                assert time.monotonic() < end_s
                time.sleep(0.01)
        assert client.stats().traffic["disk"]["quarantined"] == 0
