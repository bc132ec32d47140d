"""A request's receipt says where its tokens came from, to the client, to traces and in vLLM's own terms."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvoffload.client import PendingAcquire
from kvoffload.client.lanes import Pending
from kvoffload.connector.common.receipt import Receipt
from kvoffload.protocol import Promote, Promoted, PromotionOutcome, TierReach
from tests.kit.connector.measured import measured_engine, take
from tests.kit.connector.scripted import Admission, ScriptedEngine

DISK = (("disk", 28),)
COMPLETE = PromotionOutcome.COMPLETE


def tiered_engine(
    monkeypatch: pytest.MonkeyPatch, in_memory: int, *reaches: tuple[str, int], is_late: bool = False
) -> ScriptedEngine:
    """An engine whose first prompt of 30 tokens is saved: memory has `in_memory` of them, and tiers the others."""
    engine = measured_engine()
    engine.cache.has_tiers = True
    start = engine.cache.start_acquire

    def start_acquire(*arguments: Any, far: Any = None, **options: Any) -> PendingAcquire:
        pending = start(*arguments, far=far, **options)
        if far is not None:
            rows = tuple(TierReach(tier=tier, boundary=boundary) for tier, boundary in reaches)
            pending.promotion = Pending(message=Promote(name_space=0, chain=b""), deadline_ns=0, sent_ns=0)
            pending.promotion.end(None if is_late else Promoted(outcome=COMPLETE, boundary=28, reaches=rows))
            pending.in_memory = in_memory
        return pending

    monkeypatch.setattr(engine.cache, "start_acquire", start_acquire)
    return engine


def receipt_of(engine: ScriptedEngine, name: str = "second") -> Receipt:
    receipt = engine.side.requests[name].receipt
    assert isinstance(receipt, Receipt)
    return receipt


def label(engine: ScriptedEngine, tokens: int = 28) -> dict[CacheHitSource, int]:
    return engine.connector.get_external_cache_hit_sources(engine.requests["second"], tokens)


@pytest.mark.parametrize(
    ("in_memory", "reaches", "labels"),
    [
        (28, (), {CacheHitSource.HOST: 28}),
        (0, DISK, {CacheHitSource.DISK: 28}),
        (8, DISK, {CacheHitSource.HOST: 8, CacheHitSource.DISK: 20}),
        (8, (("disk", 16), ("peer", 28)), {CacheHitSource.HOST: 8, CacheHitSource.DISK: 8, CacheHitSource.P2P: 12}),
        (8, (("s3", 28),), {CacheHitSource.HOST: 8, CacheHitSource.EXTERNAL_UNSPECIFIED: 20}),
    ],
)
def test_vllm_is_told_the_tiers_of_a_hit(
    monkeypatch: pytest.MonkeyPatch,
    in_memory: int,
    reaches: tuple[tuple[str, int], ...],
    labels: dict[CacheHitSource, int],
) -> None:
    engine = tiered_engine(monkeypatch, in_memory, *reaches)
    assert engine.admit(engine.arrive("second", range(30))) == Admission(0, 28)
    assert label(engine) == labels


def test_a_hit_without_tiers_is_the_hosts() -> None:
    engine = measured_engine()
    engine.admit(engine.arrive("second", range(30)))
    assert label(engine) == {CacheHitSource.HOST: 28}


def test_a_late_tiers_tokens_have_no_known_source(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = tiered_engine(monkeypatch, 8, is_late=True)
    engine.admit(engine.arrive("second", range(30)))
    assert receipt_of(engine).tokens == {"engine": 0, "computed": 2, "memory": 8, "unknown": 20}
    assert label(engine) == {CacheHitSource.HOST: 8, CacheHitSource.EXTERNAL_UNSPECIFIED: 20}


def test_what_a_tier_brought_for_a_question_that_was_dropped_came_from_that_tier(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = tiered_engine(monkeypatch, 8, ("disk", 20))
    request = engine.arrive("second", range(30))
    engine.parts.restores.drop_answers()
    engine.admit(request)
    assert receipt_of(engine).sources == (("memory", 8), ("disk", 12), ("memory", 8))
    assert take(engine)["kvoffload_hits_total"] == {"memory": 16, "lower": 12}


def test_a_hit_of_which_nothing_is_known_is_unspecified() -> None:
    """Also if the connector has a fault, and for tokens that it does not know of."""
    engine = measured_engine()
    request = engine.arrive("second", range(30))
    assert label(engine) == {CacheHitSource.EXTERNAL_UNSPECIFIED: 28}
    engine.admit(request)
    assert label(engine, 30) == {CacheHitSource.HOST: 28, CacheHitSource.EXTERNAL_UNSPECIFIED: 2}
    assert label(engine, 20) == {CacheHitSource.HOST: 20}
    engine.connector.scheduler_side.parts = None  # type: ignore[union-attr]
    assert label(engine) == {CacheHitSource.EXTERNAL_UNSPECIFIED: 28}
    engine.connector.scheduler_side = None
    assert label(engine) == {CacheHitSource.EXTERNAL_UNSPECIFIED: 28}
    assert engine.connector.faults == {"get_external_cache_hit_sources": 1}


def test_the_answer_has_the_receipt_that_the_request_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = tiered_engine(monkeypatch, 8, *DISK)
    for _ in range(4):
        engine.parts.judge.note_prefill(1000, 0.07)
    engine.serve("second", range(30), receipt=True)
    told = (engine.told["second"] or {})["kvoffload_receipt"]
    assert told["tokens"] == {"engine": 0, "computed": 2, "memory": 8, "disk": 20}
    assert told["saved_s"] == pytest.approx(28 * 70e-6)
    assert told["loaded_bytes"] > 0
    engine.serve("third", range(30))
    assert engine.told["third"] is None, "nobody asked"
    engine.serve("fourth", range(30), receipt=True)
    told = (engine.told["fourth"] or {})["kvoffload_receipt"]
    assert told == {"tokens": {"engine": 28, "computed": 2}, "saved_s": 0.0, "loaded_bytes": 0}


def test_a_failed_load_is_not_on_the_receipt() -> None:
    engine = measured_engine()
    engine.admit(engine.arrive("second", range(30)))
    engine.report(engine.step(), failed=("second",))
    assert receipt_of(engine) == Receipt(engine_tokens=0, computed_tokens=30)


def test_after_a_preemption_the_receipt_is_still_that_of_the_first_run() -> None:
    engine = measured_engine()
    request = engine.arrive("second", range(30))
    engine.admit(request)
    engine.report(engine.step())
    first = receipt_of(engine)
    assert (first.tokens, first.loaded_bytes > 0) == ({"engine": 0, "computed": 2, "memory": 28}, True)
    request.num_preemptions = 1
    request.num_computed_tokens = 0
    engine.manager.free(request)
    engine.pool.reset_prefix_cache()
    engine.admit(request)
    engine.report(engine.step())
    again = receipt_of(engine)
    assert (again.tokens, again.loaded_bytes) == (first.tokens, 2 * first.loaded_bytes)


def test_receipts_end_with_their_requests() -> None:
    engine = measured_engine()
    for number in range(3):
        engine.serve(f"again {number}", range(30))
    assert engine.side.requests == {}
    engine.assert_at_rest()
