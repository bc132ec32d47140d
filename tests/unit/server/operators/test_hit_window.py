"""Sums of the last day: what is new in the curve at each look, however often it halves its counts."""

from __future__ import annotations

from kvoffload.cache import CurvePoint, MemoryCurve
from kvoffload.protocol import Insight, Inspect
from kvoffload.server.operators.hit_window import LOOK_NS, MARK_NS, MARKS, HitSums, HitWindow
from tests.kit.cache.cache_model import HYBRID, PLAIN, SMALL, make_chain
from tests.kit.server.explained import explain, store
from tests.kit.server.harness import CacheWithoutProcesses, Server

SECOND_NS = 1_000_000_000


def curve(asked: int, *hits: int, one_in: int = 1) -> MemoryCurve:
    points = tuple(CurvePoint(memory=2.0**at, hit_blocks=count, hit_bytes=0) for at, count in enumerate(hits))
    return MemoryCurve(asked_blocks=asked, one_in=one_in, points=points)


def test_it_has_what_came_since_its_first_look() -> None:
    window = HitWindow()
    assert (window.span_s, window.sums) == (0, HitSums())
    window.look(SECOND_NS, curve(100, 10, 20), HitSums(saved_us=5, hit_memory=1, evicted=7))
    window.look(4 * SECOND_NS, curve(160, 40, 70), HitSums(saved_us=9, hit_memory=11, hit_lower=3, evicted=8))
    assert window.span_s == 3
    assert window.sums == HitSums(
        saved_us=4, hit_memory=10, hit_lower=3, evicted=1, asked_blocks=60, hit_blocks=(30, 50)
    )


def test_counts_that_were_halved_are_added_up_all_the_same() -> None:
    """A curve halves its counts every 10,000 blocks; a twentieth of that comes between two looks."""
    window, told, asked, hits = HitWindow(), [0.0, 0.0], 0, 0
    window.look(0, curve(0, 0), HitSums())
    for turn in range(1, 400):
        told = [told[0] + 500, told[1] + 100 + turn % 7]
        asked, hits = asked + 500, hits + 100 + turn % 7
        if turn % 20 == 0:
            told = [one / 2 for one in told]
            told = [told[0] + 250, told[1] + 50]
            asked, hits = asked + 250, hits + 50
        window.look(turn * LOOK_NS, curve(int(told[0]), int(told[1])), HitSums())
    assert abs(window.sums.asked_blocks / asked - 1) < 0.03
    assert abs(window.sums.hit_blocks[0] / hits - 1) < 0.03
    assert abs(window.sums.hit_blocks[0] / window.sums.asked_blocks - hits / asked) < 0.002


def test_a_few_blocks_less_are_no_halving() -> None:
    """Blocks from before the curve began are counted, and taken back when they turn out to be unknown."""
    window = HitWindow()
    window.look(0, curve(1000, 500), HitSums())
    window.look(1, curve(990, 500), HitSums())
    assert window.sums == HitSums(hit_blocks=(0,))


def test_with_another_sample_it_begins_again() -> None:
    window = HitWindow()
    window.look(0, curve(0, 0), HitSums())
    window.look(SECOND_NS, curve(500, 100), HitSums(saved_us=7))
    window.look(5 * SECOND_NS, curve(20, 4, one_in=8), HitSums(saved_us=9))
    assert (window.span_s, window.sums) == (0, HitSums(hit_blocks=(0,)))


def test_it_is_a_day_long_and_bounded() -> None:
    window = HitWindow()
    for turn in range(3 * MARKS):
        window.look(turn * MARK_NS, curve(turn, turn), HitSums(saved_us=turn))
    assert window.span_s == MARKS * MARK_NS // SECOND_NS == 86400
    assert window.sums == HitSums(saved_us=MARKS, asked_blocks=MARKS, hit_blocks=(MARKS,))


def test_a_server_tells_what_its_prompts_got_and_would_have_got() -> None:
    with Server() as server:
        engine = server.process().join(PLAIN)
        server.core.advance(SECOND_NS)
        store(engine, make_chain(1, 3))
        explain(engine, b"", asked=130, promised=100, lower=40, saved_us=7)
        server.core.advance(31 * SECOND_NS)
        told = server.process("top").watch().ask(Inspect())
    assert isinstance(told, Insight)
    assert (told.window_s, told.window_saved_us, told.window_blocks) == (30, 7, 3)
    assert (told.window_hit_memory, told.window_hit_lower, told.window_evicted) == (60, 40, 0)
    assert not told.window_has_other_groups
    assert told.window_hits == (0,) * len(told.curve)


def test_the_window_begins_soon_after_the_memory_is_there() -> None:
    with Server(memory=None) as server:
        server.core.advance(SECOND_NS)
        server.attach("main", CacheWithoutProcesses.create(SMALL))
        server.core.advance(3 * SECOND_NS)
        server.core.advance(7 * SECOND_NS)
        assert server.process("top").watch().ask(Inspect()).window_s == 4


def test_a_server_says_whether_a_model_has_windows_or_states() -> None:
    with Server() as server:
        engine = server.process().join(HYBRID)
        assert engine.ask(Inspect()).window_has_other_groups
