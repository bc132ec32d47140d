"""Rules that any simulated fleet must keep, on a made-up trace."""

from __future__ import annotations

import dataclasses
import json
import math
import random
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from benchmarks.fleets.costs import Costs, read_costs
from benchmarks.fleets.fleet import FleetRun
from benchmarks.fleets.remotes import Homes, SharedStore
from benchmarks.fleets.settings import Fleet, Kind, Routing, Tally
from benchmarks.fleets.wire import Wire
from benchmarks.fleets.workload import Workload, make_workload
from kvoffload import native
from kvoffload.cache.trace import TraceRequest

ROOT = Path(__file__).parents[2]
QUIET = 1e-4
"""A load at which each request has ended before the next one comes."""
REMOTES = [
    {"kind": Kind.NONE},
    {"kind": Kind.STORE, "store_blocks": 150},
    {"kind": Kind.STORE, "store_blocks": 150, "tells_uses": True},
    {"kind": Kind.HOMES, "tells_uses": True},
    {"kind": Kind.HOMES, "home_share": 1.0, "home_policy": "lru"},
    {"kind": Kind.HOMES, "home_share": 0.5, "run_blocks": 4},
    {"kind": Kind.PEERS},
]
NAMES = ["none", "store", "store-told", "homes-told", "homes-apart", "homes-half-in-runs", "peers"]


@cache
def work() -> Workload:
    """Conversations that grow, behind two system prompts, in bursts."""
    rng = random.Random(11)
    talks: list[list[int]] = []
    new_id = iter(range(10, 100_000))
    requests = []
    for at in range(500):
        if talks and rng.random() < 0.6:
            talk = talks[-1 - min(int(rng.expovariate(0.15)), len(talks) - 1)]
        else:
            talk = [at % 2]
            talks.append(talk)
        talk += [next(new_id) for _ in range(rng.randint(1, 4))]
        requests.append(
            TraceRequest(
                timestamp_ms=3000 * (at // 7),
                input_length=512 * len(talk) + rng.randrange(512),
                output_length=10,
                hash_ids=tuple(talk),
            )
        )
    requests.append(TraceRequest(timestamp_ms=300_000, input_length=100, output_length=1, hash_ids=()))
    return make_workload(requests)


@cache
def costs() -> Costs:
    return read_costs(ROOT / "benchmarks/fleet_costs.toml")


def run(**settings: object) -> tuple[FleetRun, Tally]:
    fleet = Fleet(**({"nodes": 4, "engine_blocks": 10, "memory_blocks": 50} | settings))  # type: ignore[arg-type]
    fleet_run = FleetRun(work(), fleet, costs())
    return fleet_run, fleet_run.run()


def hits(tally: Tally) -> int:
    return int((tally.engine_hits + tally.memory_hits + tally.remote_hits).sum())


# ---- against what is known ----


@pytest.mark.parametrize("policy", ["lru", "prefix"])
@pytest.mark.parametrize("capacity", [40, 200])
def test_one_node_without_haste_is_the_replay(policy: str, capacity: int) -> None:
    _, tally = run(nodes=1, engine_blocks=0, memory_blocks=capacity, policy=policy, load=QUIET)
    assert hits(tally) == native.replay_policy(work().trace, policy, capacity, False)["hits"] > 0


@pytest.mark.parametrize("settings", REMOTES, ids=NAMES)
@pytest.mark.parametrize("routing", Routing)
def test_no_fleet_passes_the_optimum_of_all_its_memory(settings: dict[str, object], routing: Routing) -> None:
    """Only the optimum bounds them: a policy may do worse on a larger memory. And only one after the other: what is
    admitted later than it was asked for is more than the optimum may do."""
    fleet, tally = run(**settings, routing=routing, load=QUIET)
    settings_of = fleet.settings
    total = 4 * 60 + (settings_of.store_blocks if settings_of.kind is Kind.STORE else 0)
    assert 0 < hits(tally) <= native.count_optimal_hits(work().trace, total)["hits"]


def test_a_pool_that_forgets_nothing_is_the_limit_of_all_fleets() -> None:
    """Then there are no anomalies of policies: what one memory has seen, several have seen at most."""
    distinct = work().trace.block_count
    _, whole = run(kind=Kind.POOL, memory_blocks=distinct, load=QUIET)
    assert hits(whole) == work().trace.reference_count - distinct
    for settings in REMOTES:
        _, tally = run(**(settings | {"memory_blocks": distinct, "store_blocks": distinct, "load": QUIET}))
        assert hits(tally) <= hits(whole)


# ---- conservation ----


@pytest.mark.parametrize("settings", REMOTES, ids=NAMES)
@pytest.mark.parametrize("events", ["none", "fails", "fails and joins"])
def test_bytes_that_leave_arrive_and_every_request_ends_once(settings: dict[str, object], events: str) -> None:
    fails = ((0.3, 1), (0.4, 2)) if events != "none" else ()
    joins = ((0.6, 1),) if events == "fails and joins" else ()
    fleet, tally = run(**settings, place="mooncake", fails=fails, joins=joins)
    remote = fleet.remote
    ins = [node.link_in for node in fleet.nodes]
    outs = [node.link_out for node in fleet.nodes]
    senders, takers = ([remote.wire_out], [remote.wire_in]) if isinstance(remote, SharedStore) else (outs, ins)
    assert tally.read_bytes == sum(wire.read_bytes for wire in ins) == sum(wire.read_bytes for wire in senders)
    assert tally.written_bytes == sum(wire.written_bytes for wire in outs)
    assert tally.written_bytes == sum(wire.written_bytes for wire in takers)
    assert (tally.read_bytes > 0) == (settings["kind"] is not Kind.NONE)
    assert tally.completed == len(work().blocks)
    assert np.isfinite(tally.ttft_s).all()
    assert (tally.ttft_s > 0).all()
    lengths = [len(blocks) for blocks in work().blocks]
    assert (tally.engine_hits + tally.memory_hits + tally.remote_hits <= lengths).all()
    assert (tally.lost_blocks > 0) == (events != "none" and fleet.settings.memory_blocks > 0)
    if events == "none":
        assert tally.rerouted == 0


@pytest.mark.parametrize("settings", REMOTES, ids=NAMES)
def test_a_run_is_the_same_again(settings: dict[str, object]) -> None:
    events = {"fails": ((0.3, 1),), "joins": ((0.5, 1),), "routing": Routing.PREFIX}
    first, second = (dataclasses.asdict(run(**(settings | events))[1]) for _ in range(2))
    for name, value in first.items():
        assert np.array_equal(value, second[name]), name


def test_what_is_set_aside_for_homes_has_one_copy_in_the_fleet() -> None:
    fleet, tally = run(kind=Kind.HOMES, home_share=1.0, memory_blocks=400)
    homes = fleet.remote
    assert isinstance(homes, Homes)
    blocks = np.arange(work().trace.block_count, dtype=np.uint32)
    copies = sum(np.frombuffer(memory.holds(blocks), np.uint8).astype(int) for memory in homes.memories)
    assert copies.max() == 1
    assert copies.sum() == work().trace.block_count
    assert tally.lost_blocks == 0


def test_a_home_that_fails_gives_its_records_to_others_and_gets_them_back() -> None:
    fleet, _ = run(kind=Kind.HOMES, home_share=1.0)
    homes = fleet.remote
    assert isinstance(homes, Homes)
    before = homes.homes.copy()
    fleet.nodes[2].is_up = False
    homes.change(fleet.nodes)
    assert set(homes.homes) == {0, 1, 3}
    assert (homes.homes[before != 2] == before[before != 2]).all()
    fleet.nodes[2].is_up = True
    homes.change(fleet.nodes)
    assert (homes.homes == before).all()


def test_a_failed_node_serves_nobody_until_it_joins() -> None:
    _, without = run(kind=Kind.HOMES, home_share=1.0, fails=((0.0, 0), (0.0, 1), (0.0, 2)))
    _, alone = run(kind=Kind.HOMES, home_share=1.0, nodes=4, fails=((0.0, 0), (0.0, 1), (0.0, 2)), joins=((0.2, 0),))
    assert without.served_bytes == [0, 0, 0, 0]
    assert without.read_bytes == 0
    assert alone.read_bytes > 0


# ---- parts ----


def test_reads_go_before_writes_and_both_take_their_time() -> None:
    wire = Wire(100.0)
    assert wire.write(0.0, 200) == 2.0
    assert wire.read(1.0, 100) == 2.0
    assert wire.behind_s(1.0) == 2.0
    assert wire.expect_read(1.5, 50) == 2.5
    assert wire.write(1.5, 100) == 4.0
    assert wire.read(9.0, 100) == 10.0
    assert (wire.read_bytes, wire.written_bytes) == (200, 300)


def test_a_place_that_is_too_slow_is_not_read_and_its_queue_drops_writes() -> None:
    slow = dataclasses.replace(costs().places["s3"], name="slow", node_bytes_per_s=3e8, place_bytes_per_s=math.inf)
    fleet = Fleet(nodes=2, engine_blocks=10, memory_blocks=50, kind=Kind.STORE, place="slow", store_blocks=900)
    settings = dataclasses.replace(costs(), places=costs().places | {"slow": slow})
    tally = FleetRun(work(), fleet, settings).run()
    assert tally.read_bytes == 0
    assert tally.too_slow_blocks > 0
    assert tally.dropped_blocks > 0
    assert tally.completed == len(work().blocks)


def test_what_does_not_come_by_the_deadline_is_computed() -> None:
    """An engine that is slow enough for any wait; only the deadline decides."""
    slow = dataclasses.replace(costs(), model=dataclasses.replace(costs().model, flops_per_s=1e11))
    fleet = Fleet(nodes=2, engine_blocks=0, memory_blocks=0, kind=Kind.STORE, place="mooncake", store_blocks=9000)
    read = []
    for deadline_s in (0.0, 0.02, 0.05, 100.0):
        settings = dataclasses.replace(slow, deadline_s=deadline_s)
        tally = FleetRun(work(), dataclasses.replace(fleet, load=QUIET), settings).run()
        read.append(tally.read_bytes)
        assert tally.read_bytes == tally.remote_hits.sum() * (64 << 20)
        assert (tally.too_slow_blocks > 0) == (deadline_s < 1)
    assert 0 == read[0] < read[1] < read[2] < read[3]


def test_smaller_blocks_are_the_same_trace() -> None:
    requests = [
        TraceRequest(timestamp_ms=at, input_length=1100, output_length=1, hash_ids=(1, 2, 10 + at)) for at in range(3)
    ]
    whole, parts = make_workload(requests), make_workload(requests, split=4)
    assert (whole.trace.block_count, parts.trace.block_count) == (2, 8)
    assert parts.block_tokens == 128
    assert parts.blocks[1].tolist() == list(range(8))
    assert parts.list_run_starts(4).tolist() == [0] * 4 + [4] * 4
    assert parts.list_run_starts(0).tolist() == [0] * 8
    assert parts.list_hash_starts(1).tolist() == list(range(8))
    starts = parts.list_hash_starts(3)
    assert all(start in (block, starts[block - 1]) for block, start in enumerate(starts))
    assert len(parts.hashes) == 8 * 32
    assert whole.times_s.tolist() == [0.0, 0.001, 0.002]


def test_every_figure_has_its_source() -> None:
    assert all(costs().sources.values())
    assert {name for name, place in costs().places.items() if place.is_measured} == {"valkey"}


def test_pictures_are_the_same_bytes_again(tmp_path: Path) -> None:
    from benchmarks.fleets.pictures import draw_all

    _, *rows = [json.loads(line) for line in (ROOT / "benchmarks/results/fleet.json").read_text().splitlines()]
    for folder in ("first", "second"):
        draw_all(rows, tmp_path / folder)
    for first in sorted((tmp_path / "first").iterdir()):
        assert first.read_bytes() == (tmp_path / "second" / first.name).read_bytes()
        assert (ROOT / "docs/pictures" / first.name).exists()


def test_the_page_shows_what_the_results_say() -> None:
    from benchmarks.fleets.tables import make_tables

    _, *rows = [json.loads(line) for line in (ROOT / "benchmarks/results/fleet.json").read_text().splitlines()]
    page, tables = (ROOT / "docs/fleet.md").read_text(), make_tables(rows)
    for name in ("nodes: hit rate, %", "speeds", "failures"):
        assert page.count(tables[name]) == 1, f"{name}: the page does not have this table"
