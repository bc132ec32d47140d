"""Hostile users of every kind break no promise to an honest user. The campaign checks times, too."""

from __future__ import annotations

import os
from dataclasses import replace
from itertools import islice
from random import Random

import pytest

from kvoffload.protocol import CODEC, MESSAGES, Call, ClientMessage
from kvoffload.protocol.message import Message
from tests.hostile.campaign import (
    ALONE,
    BUSY,
    LIVES,
    ON_ANY_MACHINE,
    Bounds,
    Outcome,
    Round,
    draw_rounds,
    judge,
    judge_acquires,
    run_round,
)
from tests.hostile.ground import LIMITS, STORES, Setup, Watched
from tests.hostile.largest import RIGHT, Largest
from tests.hostile.report import format_report, make_report, run_and_report
from tests.hostile.user import KINDS
from tests.kit.server.blocks import hashes_of

SECONDS = float(os.environ.get("KVOFFLOAD_TESTS_HOSTILE_SECONDS", "1800"))
GRACE_S = 120.0
by_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can start processes of other users")
ATTACKS = {
    "two domains": ("largest", "forged", "kills", "half messages", "writes"),
    "one domain": ("churn", "identities", "wrong keys", "holds, passes descriptors"),
}
STORE = {"two domains": "", "one domain": "valkey: all"}


@by_root
@pytest.mark.parametrize("domains", ATTACKS)
def test_no_mixture_of_hostile_users_takes_anything(domains: str) -> None:
    at = Round(seed=1, number=2, setup=Setup(domains=domains, store=STORE[domains]), kinds=ATTACKS[domains])
    found = run_round(at, seconds=5.0, grace_s=GRACE_S)
    assert [one for one in judge(found, None) if one.promise in ON_ANY_MACHINE] == []
    assert all(found.done[kind] for kind in at.kinds), found.done
    assert found.roles["loads"]["counts"]["compared"] > 0
    if "largest" in at.kinds:
        assert make_report(at.seed, [(found, [])])["never_sent"] == {"largest": [], "random": []}


@by_root
@pytest.mark.campaign
def test_no_mixture_of_hostile_users_breaks_a_promise() -> None:
    """`make hostile` runs it."""
    report = run_and_report(int(os.environ.get("KVOFFLOAD_TESTS_HOSTILE_SEED") or Random().randrange(10**6)), SECONDS)
    assert not report["broken"], f"{len(report['broken'])} promises are broken"


def test_what_breaks_a_promise_is_reported_with_its_time() -> None:
    """Otherwise a round would prove nothing."""
    said = {"is_served": False, "wrong": [(3.0, "block 1")], "lost": [(4.0, "1 block")], "refused": [(5.0, "busy")]}
    times = {"acquires": [(6.0, 2.5)], "marks": [(7.0, 60.0)], "greetings": [(8.0, 1001.0)]}
    asked = [(9.0, "page: ", 1.0), (10.0, "page: status 503", 1.0), (11.0, "gate: no answer", 5000.0)]
    watched = Watched(peak_bytes=2 << 30, asked=asked)
    found = Outcome(at=Round(seed=1, number=2), begun_s=1.0, roles={"loads": said | times}, watched=watched, faults=1)
    found.roles["newcomers"] = said | times
    broken = judge(found, Bounds())
    assert {one.second for one in broken} == {0.0, 2.0, 3.0, 4.0, 6.0, 7.0, 9.0, 10.0}
    assert set(ON_ANY_MACHINE) - {one.promise for one in broken} == {LIVES}
    watched.ends.append((12.0, "SIGABRT"))
    assert [(one.second, one.found) for one in judge(found, None) if one.promise == LIVES] == [(11.0, "SIGABRT")]
    quick = Outcome(at=Round(seed=1, number=3), begun_s=1.0, roles={"loads": {"acquires": [(2.0, 0.1)] * 500}})
    kinds = {"churn": [found, quick], "writes": [found], BUSY: [found]}
    ended = [(replace(one, at=replace(one.at, kinds=(kind,))), []) for kind, those in kinds.items() for one in those]
    late = judge_acquires(ended, Bounds())
    assert [(one.at.number, one.second, one.found) for one in late] == [(2, 5.0, "2.5 ms in all rounds with writes")]
    text = format_report(make_report(1, [(found, broken)]))
    assert text.count("python -m tests.hostile --seed 1 --round 2") == len(broken)


@pytest.mark.parametrize("kind", MESSAGES, ids=lambda kind: kind.__name__)
def test_a_largest_message_is_one_that_the_server_reads(kind: type[Message]) -> None:
    """A message that cannot be decoded would be refused before it costs anything."""
    forged = Largest(names=hashes_of(131_072), right=RIGHT, chance=Random(1)).make(kind)
    frame = forged.pack(number=1, session=5)
    for channel in kind.channels:
        assert len(frame) <= channel.limit_bytes
        if issubclass(kind, ClientMessage):
            assert isinstance(CODEC.decode_call(frame, channel=channel), Call)


def test_a_seed_decides_the_rounds_and_every_kind_has_its_turn() -> None:
    rounds = list(islice(draw_rounds(7), 200))
    assert rounds == list(islice(draw_rounds(7), 200))
    assert rounds != list(islice(draw_rounds(8), 200))
    assert {kind for at in rounds for kind in at.kinds} == {ALONE, BUSY, *KINDS}
    assert {at.kinds for at in rounds if len(at.kinds) == 1} >= {(kind,) for kind in KINDS}
    assert {at.setup.store for at in rounds} == set(STORES)
    assert {at.setup.limit for at in rounds} == set(LIMITS)
