"""Coded and plain records are measured in turn over a wire of a fixed rate."""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest

from benchmarks.coded_wire import STORES, compare, measure, wire
from kvoffload.bench.valkey import find_command
from kvoffload.errors import BenchmarkError
from tests.kit.tiers.tier_contract import Records


@pytest.fixture
def _possible() -> None:
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    if shutil.which("ip") is None or shutil.which("tc") is None:
        pytest.skip("ip and tc (Debian's iproute2) are not installed")
    try:
        find_command("redis-server")
        with wire("1gbit"):
            pass
    except BenchmarkError as fault:
        pytest.skip(str(fault))
    except subprocess.CalledProcessError as fault:
        pytest.skip(f"no wire with a rate here: {fault.stderr!r}")


@pytest.mark.usefixtures("_possible")
@pytest.mark.parametrize("store", STORES)
def test_every_way_to_code_is_measured_on_the_same_records(store: str) -> None:
    numbers = Records(0, 4, 1 << 20, filled=True, has_numbers=True).memory
    found = measure([memoryview(record.tobytes()) for record in numbers], "1gbit", STORES[store], rounds=2)
    assert list(found) == ["off", "on", "auto"]
    assert (found["off"]["send_coded"], found["on"]["send_coded"]) == (0, 1)
    assert (found["off"]["read_coded"], found["on"]["read_coded"]) == (0, 0 if store == "valkey" else 1)
    assert all(one[f"{way}_ms"] > 0 for one in found.values() for way in ("send", "read"))
    assert (found["off"]["send_gain"], found["off"]["read_gain"]) == (1, 1)


def test_what_a_tier_takes_is_compared_turn_by_turn() -> None:
    assert compare([2.0, 40.0, 9.0], [1.0, 40.0, 3.0]) == 2.0
