"""Counts that no server has told."""

from __future__ import annotations

from dataclasses import replace
from hashlib import sha256
from typing import Any

from kvoffload.cache import CacheStats, CurvePoint, MemoryCurve, PlaceUsage, TenantUsage
from kvoffload.client.insight import HitWindow, ServerInsight, TimedCalls
from kvoffload.client.inspector import EngineSurvey
from kvoffload.protocol import IdentityField, LedgerKind, LedgerRow, Role
from kvoffload.protocol.survey import IdentityRead, JoinedProcess
from kvoffload.units import GIB

STATS = CacheStats(
    capacity_bytes=16 * GIB,
    ready_bytes=16 * GIB,
    used_bytes=4 * GIB,
    readable=1000,
    reserved=3,
    quarantined=0,
    leases=2,
    sessions=5,
    namespaces=1,
    index_bytes=1 << 20,
    hits=100,
    misses=50,
    refused=0,
    duplicates=7,
    evicted=10,
    mismatches=0,
    moved_bytes=0,
    lost_touches=0,
    tenants=(TenantUsage(name="", quota_bytes=0, used_bytes=4 * GIB),),
)
LEDGER = tuple(
    LedgerRow(
        kind=kind,
        name="" if is_rest else f"a {kind.label}",
        is_rest=is_rest,
        prompts=10,
        asked=500,
        promised=350,
        lower=50,
        saved_us=6_250_000,
        read_bytes=7 << 20,
        written_bytes=9 << 20,
        memory_kib_s=1 << 20,
        tier_read_bytes=1 << 20,
        tier_written_bytes=2 << 20,
    )
    for kind in LedgerKind
    for is_rest in (True, False)
)
INSIGHT = ServerInsight(
    outcomes={"hit_memory": 600, "hit_lower": 100, "never_seen": 250, "evicted": 50},
    errors={"busy": 3},
    timings=(
        TimedCalls(name="call", label="acquire", counts=(0, 5, 2, *[0] * 9), sum_s=1e-5),
        TimedCalls(name="promotion", label="disk", counts=(1, *[0] * 10), sum_s=5e-4),
        TimedCalls(name="residence", label="", counts=(0, 4, *[0] * 8), sum_s=20.0),
    ),
    asked_blocks=200,
    distinct_blocks=50,
    saved_s=12.5,
    hints={"retain.done": 7, "hand_over.partly": 1},
    hint_tokens={"hit_retained": 4096, "gave_way": 512},
    retained=3,
    retained_bytes=3 << 20,
    retained_limit_bytes=8 << 20,
    curve=MemoryCurve(
        asked_blocks=400,
        asked_bytes=400 << 20,
        one_in=2,
        points=(
            CurvePoint(memory=0.5, hit_blocks=100, hit_bytes=100 << 20),
            CurvePoint(memory=1.0, hit_blocks=200, hit_bytes=200 << 20),
        ),
    ),
    window=HitWindow(
        span_s=86400.0,
        saved_s=7200.0,
        hit_memory=600,
        evicted=50,
        asked_blocks=40_000,
        hit_blocks={0.25: 5_000, 0.5: 10_000, 1.0: 20_000, 2.0: 30_000, 4.0: 35_000},
    ),
    ledger=LEDGER,
    occupied_byte_s={"memory": 2 << 30, "disk": 1 << 30},
)
DISK = PlaceUsage(
    tier="disk",
    name="/nvme0/kv",
    state="ready",
    reason="",
    capacity_bytes=100 * GIB,
    used_bytes=GIB,
    records=9,
    coded_records=6,
    coded_bytes=3 * GIB,
    coded_stored_bytes=2 * GIB,
)


def stats(**changes: Any) -> CacheStats:
    return replace(STATS, **changes)


def survey(*engines: IdentityRead) -> EngineSurvey:
    """An engine of one process for each of these identities."""
    processes = tuple(
        JoinedProcess(
            engine=f"engine {at}", role=Role.SCHEDULER, rank=0, pid=1, uid=2, fingerprint=read.fingerprint.hex()[:12]
        )
        for at, read in enumerate(engines)
    )
    return EngineSurvey(
        processes=processes,
        identities={one.fingerprint: read for one, read in zip(processes, engines, strict=True)},
    )


def identity(model: str, *, engine: str = "vllm 0.31.0", block_tokens: int = 64, **parts: str) -> IdentityRead:
    told = {"engine": engine, "model": model, **parts}
    return IdentityRead(
        total=1,
        fingerprint=sha256(f"{block_tokens} {told}".encode()).digest(),
        ranks=1,
        hash_algorithm="sha256",
        hash_block_size=block_tokens,
        identity=tuple(IdentityField(name=name, value=value) for name, value in told.items()),
    )


DIFFERING = survey(
    identity("Qwen3", block_tokens=64, revision="abc"), identity("Qwen3", block_tokens=128, revision="abc")
)
"""Two engines of the same weights, of which the second has blocks of twice as many tokens."""
