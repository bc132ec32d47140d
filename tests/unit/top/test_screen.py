"""The screen fits a terminal, however small, and shows what matters."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from kvoffload.cache import MemoryCurve, TenantUsage
from kvoffload.client.insight import HitWindow
from kvoffload.top.samples import Sample, compare
from kvoffload.top.screen import draw, number, size
from kvoffload.units import GIB, KIB, MIB
from tests.kit.top.made_up import DIFFERING, DISK, INSIGHT, LEDGER, identity, stats, survey


def show(now: Sample, before: Sample | None = None, width: int = 100) -> str:
    out = io.StringIO()
    Console(file=out, width=width, force_terminal=False).print(draw("kv.sock", now, compare(before, now)))
    return out.getvalue()


def test_what_matters_is_said() -> None:
    before = Sample(time_s=0.0, stats=stats())
    bad = replace(DISK, tier="valkey", state="absent", reason="no answer within 1 s", capacity_bytes=0)
    now = Sample(
        time_s=1.0, stats=stats(hits=190, misses=60, places=(DISK, bad), traffic={"disk": {"written_bytes": 4 * GIB}})
    )
    text = show(now, before)
    for part in (
        "25% of 16 GiB",
        "1,000 blocks",
        "90.0% hit",
        "90 hits",
        "disk",
        "1 GiB of 100 GiB, 75% coded 1.50 x",
        "valkey is absent: no answer within 1 s",
        "5 processes, 1 identity",
        "2 leases, 3 slots held ready",
    ):
        assert part in text, part


def test_without_a_server_the_command_that_starts_one_is_named() -> None:
    text = show(Sample(time_s=0.0, stats=None, fault="kv.sock is not there"))
    assert "`kvoffload serve --set server=kv.sock` starts one" in text
    assert "starts one" not in show(Sample(time_s=0.0, stats=None, fault="kv.sock is no socket"))


def test_engines_that_share_no_blocks_are_told_with_the_setting_that_differs() -> None:
    sample = Sample(time_s=0.0, stats=stats(), survey=DIFFERING)
    assert "engines   share no blocks: Qwen3: hash_block_tokens 64 and 128" in show(sample)
    assert "engines" not in show(Sample(time_s=0.0, stats=stats(), survey=None))


def test_each_kind_of_engine_is_told_with_its_version_its_model_and_its_sessions() -> None:
    joined = survey(identity("Qwen3"), identity("Qwen3", salt="s"), identity("/m/tiny", engine="sglang 0.5.23"))
    text = show(Sample(time_s=0.0, stats=stats(), survey=joined), width=140)
    assert (
        "engines   vllm 0.31.0 Qwen3 (2 sessions, 2 processes), sglang 0.5.23 /m/tiny (1 session, 1 process)\n" in text
    )
    unknown = show(Sample(time_s=0.0, stats=stats(), survey=survey(identity("", engine=""))))
    assert "engines   of an unknown kind (1 session, 1 process)" in unknown
    many = survey(*(identity(f"model {at}") for at in range(6)))
    assert "2 more kinds" in show(Sample(time_s=0.0, stats=stats(), survey=many), width=400)


def test_what_became_of_prompts_is_said_a_second_and_the_most_frequent_first() -> None:
    before = Sample(time_s=0.0, stats=stats(), insight=INSIGHT)
    later = replace(INSIGHT, outcomes={**INSIGHT.outcomes, "hit_memory": 700, "evicted": 350})
    text = show(Sample(time_s=2.0, stats=stats(), insight=later), before)
    assert "tokens    a second: 150 evicted, 50 from memory; with endless memory: 75.0% of blocks" in text


def test_an_endless_memory_that_would_hit_less_than_was_hit_is_not_told() -> None:
    adopted = replace(INSIGHT, asked_blocks=200, distinct_blocks=200)
    text = show(Sample(time_s=0.0, stats=stats(), insight=adopted), width=140)
    assert "600 from memory" in text
    assert "endless memory" not in text


def test_what_became_of_prompts_is_said_so_far_where_nothing_is_asked() -> None:
    idle = show(Sample(time_s=0.0, stats=stats(), insight=INSIGHT), width=140)
    assert "tokens    so far: 600 from memory, 250 never seen, 100 from slower tiers, 50 evicted" in idle
    nobody = replace(INSIGHT, outcomes={}, asked_blocks=0)
    assert "nothing was asked yet" in show(Sample(time_s=0.0, stats=stats(), insight=nobody))


def test_hits_with_other_memory_are_one_line_where_something_was_asked() -> None:
    text = show(Sample(time_s=0.0, stats=stats(), insight=INSIGHT))
    assert "hits      25.0% with 0.5x, 50.0% with 1x the memory" in text
    nothing = show(Sample(time_s=0.0, stats=stats(), insight=replace(INSIGHT, curve=MemoryCurve())))
    assert "the memory" not in nothing


def test_what_other_memory_would_have_brought_is_a_line_for_less_and_one_for_more() -> None:
    lines = show(Sample(time_s=0.0, stats=stats(), insight=INSIGHT), width=140).splitlines()
    assert "memory    4 GiB less would have cost" in "\n".join(lines)
    assert "memory    16 GiB more would have saved 1 hour of prefill in the last 24 hours (±0.1)" in lines
    unknown = show(Sample(time_s=0.0, stats=stats(), insight=replace(INSIGHT, window=HitWindow())), width=140)
    assert "would have" not in unknown


def test_tenants_that_saved_most_are_one_line_if_there_are_any() -> None:
    row = LEDGER[1]
    many = tuple(replace(row, name=f"tenant {at}", saved_us=at * 3_600_000_000) for at in range(6))
    text = show(Sample(time_s=0.0, stats=stats(), insight=replace(INSIGHT, ledger=many)), width=140)
    assert "saved     5 h tenant 5, 4 h tenant 4, 3 h tenant 3, 3 h others\n" in text
    nameless = (replace(row, name=""),)
    assert "saved  " not in show(Sample(time_s=0.0, stats=stats(), insight=replace(INSIGHT, ledger=nameless)))


def test_no_server_is_said() -> None:
    text = show(Sample(time_s=0.0, stats=None, fault="nobody listens"))
    assert "no answer: nobody listens" in text


@pytest.mark.parametrize("width", [30, 80, 200])
def test_no_line_is_longer_than_the_terminal(width: int) -> None:
    tenants = tuple(
        TenantUsage(name=f"tenant {at} " * 5, quota_bytes=at * GIB, used_bytes=at * MIB) for at in range(20)
    )
    lines = show(Sample(time_s=0.0, stats=stats(tenants=tenants, places=(DISK,))), width=width).splitlines()
    assert max(map(len, lines)) <= width
    assert any("12 more" in line for line in lines)


def test_a_narrow_terminal_shows_each_tier_and_its_state() -> None:
    absent = replace(DISK, tier="mooncake", state="absent", reason="no master")
    text = show(Sample(time_s=0.0, stats=stats(places=(DISK, absent), traffic={"disk": {}})), width=60)
    rows = [line.split() for line in text.splitlines()]
    assert ["mooncake", "absent"] in [[row[0], row[-1]] for row in rows if row]
    for part in ("written/s", "late/s", "coded"):
        assert part in text, part


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (KIB, "1 KiB"),
        (1.5 * MIB, "1.5 MiB"),
        (1023 * GIB, "1023 GiB"),
        (2048 * GIB, "2 TiB"),
    ],
)
def test_sizes_are_short(count: float, text: str) -> None:
    assert size(count) == text


@pytest.mark.parametrize(("count", "text"), [(0, "0"), (8, "8"), (0.25, "0.2"), (9.96, "10.0"), (12345.6, "12,346")])
def test_numbers_are_short(count: float, text: str) -> None:
    assert number(count) == text


def test_a_pool_that_grows_is_said() -> None:
    growing = show(Sample(time_s=0.0, stats=stats(ready_bytes=5 * GIB)), width=140)
    assert "25% of 16 GiB (5 GiB are there, it grows), 1,000 blocks" in growing
    assert "grows" not in show(Sample(time_s=0.0, stats=stats()))


def test_a_pool_that_gave_memory_back_says_why() -> None:
    smaller = show(Sample(time_s=0.0, stats=stats(ready_bytes=5 * GIB, memory_reason="cgroup")), width=140)
    assert "of 16 GiB (5 GiB are there, its cgroup got short of memory), 1,000 blocks" in smaller


def test_an_absent_disk_is_said_whole_in_80_columns() -> None:
    why = "disk folder /nvme0/kvoffload: its identity file is damaged or of another version; empty the folder"
    absent = replace(DISK, state="absent", reason=why)
    text = show(Sample(time_s=0.0, stats=stats(places=(absent,), traffic={"disk": {}})), width=80)
    assert why in " ".join(text.split())
    assert "absent" in text
