"""Loads before they are loads: what is asked of the cache, when it answers, how a hit comes to be of no use."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.kit.connector.warm import note_misses

pytest.importorskip("vllm", reason="vLLM is not installed")

import numpy as np
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange

from kvoffload.cache import AcquireOutcome
from kvoffload.connector.common.step_plan import WorkerReport
from kvoffload.connector.loads.judge import MAX_REFUSALS, MIN_SAMPLES
from kvoffload.connector.loads.question import READY_WAIT_S
from kvoffload.connector.loads.restores import MAX_EARLY
from kvoffload.protocol import Miss
from tests.kit.connector.engine_configs import full
from tests.kit.connector.scripted import Admission, ScriptedEngine, list_moves
from tests.kit.connector.warm import DENSE, TWO_SIZES, leave_free, load_apart, warm_engine

TOKEN_S = 1.0


def holding_engine() -> ScriptedEngine:
    """Its cache does not answer until it is told to."""
    engine = warm_engine(DENSE)
    engine.cache.holds_answers = True
    return engine


# ---- when it is asked, and when it answers ----


def test_a_request_is_asked_for_when_it_arrives() -> None:
    engine = warm_engine(DENSE)
    request = engine.arrive("second", range(30))
    assert engine.cache.asked == [(0, 28)]
    assert engine.match(request) == 28
    assert engine.cache.asked == [(0, 28)]


def test_nothing_is_asked_for_that_the_engine_has_itself() -> None:
    engine = ScriptedEngine(*DENSE)
    engine.serve("first", range(30))
    engine.arrive("second", range(30))
    assert engine.cache.asked == []


@pytest.mark.parametrize("tokens", [3, 4, 100])
def test_nothing_is_asked_for_that_is_not_there(tokens: int) -> None:
    engine = warm_engine(DENSE)
    request = engine.arrive("second", range(100, 100 + tokens))
    assert engine.match(request) == 0
    assert engine.cache.asked == []


def test_so_many_are_asked_for_early_and_the_others_when_they_are_scheduled() -> None:
    engine = warm_engine(DENSE)
    requests = [engine.arrive(f"r{number}", range(30)) for number in range(MAX_EARLY + 2)]
    assert len(engine.cache.asked) == engine.cache.stats().leases == MAX_EARLY
    assert engine.match(requests[-1]) == 28
    assert len(engine.cache.asked) == MAX_EARLY + 1


def test_an_answer_that_is_not_there_yet_is_asked_for_again_and_not_a_miss() -> None:
    engine = holding_engine()
    request = engine.arrive("second", range(30))
    assert engine.match(request) is None
    assert engine.match(request) is None
    assert len(engine.cache.asked) == 1
    engine.cache.answer()
    assert engine.match(request) == 28


def test_the_steps_budget_is_waited_for() -> None:
    engine = holding_engine()
    engine.cache.answers_when_waited = True
    assert engine.match(engine.arrive("second", range(30))) == 28


def test_every_plan_begins_a_new_budget() -> None:
    engine = warm_engine(DENSE)
    before = engine.cache.steps
    engine.step()
    assert engine.cache.steps == before + 1


def test_an_answer_that_never_comes_is_a_miss_until_something_changes() -> None:
    engine = holding_engine()
    noted = note_misses(engine)
    request = engine.arrive("second", range(30))
    assert engine.match(request) is None
    engine.cache.answer(is_lost=True)
    assert engine.match(request) is None, "what was asked early is asked again"
    engine.cache.answer(is_lost=True)
    assert [engine.match(request) for _ in range(3)] == [0, 0, 0]
    assert noted == [("second", Miss.SLOW_TO_ANSWER)]
    assert len(engine.cache.asked) == 2
    engine.cache.holds_answers = False
    engine.serve("saver", range(100, 130))
    assert engine.match(request) == 28


@pytest.mark.parametrize(
    ("prompt", "is_served", "refusal", "reason"),
    [
        (range(30), True, AcquireOutcome.OVER_LIMIT, Miss.REFUSED),
        (range(30), True, AcquireOutcome.NO_ROOM, Miss.REFUSED),
        (range(30), False, None, Miss.NOT_SERVED),
        (range(100, 130), True, None, Miss.NEVER_SEEN),
        (range(4), True, None, Miss.TOO_SHORT),
    ],
)
def test_a_miss_has_its_reason_once(
    prompt: range, is_served: bool, refusal: AcquireOutcome | None, reason: Miss
) -> None:
    engine = warm_engine(DENSE)
    noted = note_misses(engine)
    engine.cache.is_served, engine.cache.refusal = is_served, refusal
    request = engine.arrive("second", prompt)
    assert [engine.match(request), engine.match(request)] == [0, 0]
    assert noted == [("second", reason)]
    assert engine.cache.stats().leases == 0


# ---- what a request wishes ----


def test_a_request_that_wishes_no_load_is_not_asked_for() -> None:
    engine = warm_engine(DENSE)
    request = engine.arrive("second", range(30), skip_load=True)
    assert engine.match(request) == 0
    assert engine.cache.asked == []
    assert engine.admit(request) == Admission(0, 0)


@pytest.mark.parametrize(("most", "external"), [(0, 0), (3, 0), (4, 4), (11, 8), (28, 28), (1000, 28)])
def test_at_most_so_many_tokens_are_loaded(most: int, external: int) -> None:
    engine = warm_engine(DENSE)
    assert engine.match(engine.arrive("second", range(30), max_load_tokens=most)) == external


def test_at_most_so_many_tokens_beyond_the_engines_own() -> None:
    engine = ScriptedEngine(*DENSE)
    engine.serve("first", range(30))
    engine.forget()
    engine.serve("short", range(10))  # the engine itself has 8 tokens of it now
    request = engine.arrive("second", range(30), max_load_tokens=4)
    assert engine.connector.get_num_new_matched_tokens(request, 8) == (4, True)


def test_wishes_that_are_not_allowed_are_ignored_and_told(caplog: pytest.LogCaptureFixture) -> None:
    engine = warm_engine(DENSE)
    assert engine.match(engine.arrive("second", range(30), skip_load="yes")) == 28
    assert "request second: skip_load='yes' is ignored" in caplog.text


# ---- hits that are not used ----


def gets_it_itself(engine: ScriptedEngine) -> None:
    other = engine.arrive("other", range(30))
    engine.admit(other)
    engine.report(engine.step())
    assert engine.match(engine.requests["second"]) == 0
    engine.finish(other)


def is_gone(engine: ScriptedEngine) -> None:
    engine.finish(engine.requests["second"])


def is_reset(engine: ScriptedEngine) -> None:
    assert engine.connector.reset_cache() is True
    engine.forget()
    assert engine.match(engine.requests["second"]) == 0


def grows(engine: ScriptedEngine) -> None:
    """It was preempted, and what it has decoded is asked for as well."""
    engine.decode(engine.requests["second"])
    engine.cache.holds_answers = True
    assert engine.match(engine.requests["second"]) is None


def runs_without_it(engine: ScriptedEngine) -> None:
    """The guard refuses the load, and its prompt is computed in steps."""
    request = engine.requests["second"]
    hog = leave_free(engine, 4)
    assert engine.match(request) == 0
    assert engine.cache.stats().leases == 1, "there may be room for it in the next step"
    assert engine.admit(request, chunk=4) == Admission(0, 0)
    engine.report(engine.step())
    engine.pool.free_blocks(hog)


def is_slower(engine: ScriptedEngine) -> None:
    for _ in range(MIN_SAMPLES):
        engine.parts.judge.note_load(1, 1000.0)
        engine.parts.judge.note_prefill(64, 0.001)
    noted = note_misses(engine)
    request = engine.requests["second"]
    assert [engine.match(request) for _ in range(3)] == [0, 0, 0]
    assert noted == [("second", Miss.SLOWER_THAN_COMPUTING)]
    favours = [engine.parts.judge.favours_load(64, 1) for _ in range(MAX_REFUSALS)]
    assert favours.index(True) == MAX_REFUSALS - 1, "it is asked once for each request"


@pytest.mark.parametrize("event", [gets_it_itself, is_gone, is_reset, grows, runs_without_it, is_slower])
@pytest.mark.parametrize("is_early", [False, True], ids=["matched", "asked for only"])
def test_a_hit_that_is_not_used_is_given_back(event: Callable[[ScriptedEngine], None], is_early: bool) -> None:
    engine = warm_engine(DENSE)
    request = engine.arrive("second", range(30))
    if not is_early and event is not is_slower:
        assert engine.match(request) == 28
    assert engine.cache.stats().leases == 1
    event(engine)
    assert engine.cache.stats().leases == 0


@pytest.mark.parametrize(
    ("begin", "end", "is_loaded"),
    [(2, 9, True), (20, 28, True), (20, 29, False), (29, 30, False)],
    ids=["within the hit", "up to its end", "beyond its end", "behind it"],
)
def test_a_hit_that_spares_the_encoder_an_image_is_loaded_even_if_its_tokens_cost_less(
    begin: int, end: int, is_loaded: bool
) -> None:
    engine = warm_engine(DENSE)
    engine.parts.judge.favours_load = lambda tokens, size_bytes, rest: False
    request = engine.arrive("second", range(30))
    position = PlaceholderRange(offset=begin, length=end - begin)
    request.mm_features = [MultiModalFeatureSpec(data=None, modality="image", identifier="a", mm_position=position)]
    assert engine.match(request) == (28 if is_loaded else 0)


@pytest.mark.parametrize("event", [is_gone, is_reset])
def test_an_answer_that_nobody_wants_any_more_is_given_back(event: Callable[[ScriptedEngine], None]) -> None:
    engine = holding_engine()
    engine.arrive("second", range(30))
    event(engine)
    engine.cache.answer()
    assert engine.cache.stats().hits == 1
    assert engine.cache.stats().leases == 0


def test_a_lease_stays_good_while_the_engines_own_hit_grows() -> None:
    engine = ScriptedEngine(*DENSE)
    engine.serve("first", range(30))
    engine.forget()
    request = engine.arrive("second", range(30))
    assert engine.match(request) == 28
    other = engine.arrive("other", range(10), skip_load=True)
    engine.admit(other)
    engine.report(engine.step())
    assert engine.admit(request) == Admission(local=8, external=20)
    (load,) = engine.step().loads
    assert [move.block for move in list_moves(load)] == engine.manager.get_block_ids("second")[0][2:7]
    assert len(engine.cache.asked) == 1


@pytest.mark.parametrize(
    ("cached", "external"), [(30, 0), (60, 16)], ids=["and nobody has more", "and the cache has more by then"]
)
def test_a_hit_that_the_engine_came_beyond_before_the_answer_is_not_reported(cached: int, external: int) -> None:
    engine = holding_engine()
    second = engine.arrive("second", range(60))
    assert engine.cache.asked == [(0, 28)]
    engine.cache.holds_answers = False
    engine.serve("longer", range(cached))
    engine.forget()
    other = engine.arrive("other", range(41), skip_load=True, skip_save=True)
    engine.admit(other)
    engine.report(engine.step())
    engine.cache.answers_when_waited = True
    assert engine.match(second) == external
    engine.finish(second)
    assert engine.cache.stats().leases == 0


# ---- where the workers may copy ----


def test_a_hit_is_not_reported_before_every_rank_may_copy() -> None:
    engine = warm_engine(DENSE, ranks=2)
    noted = note_misses(engine)
    places = engine.places
    engine.hear(WorkerReport(places={1: ()}))
    request = engine.arrive("second", range(30))
    assert engine.match(request) is None
    engine.hear(WorkerReport(places={1: places}))
    assert engine.match(request) == 28
    assert noted == []


def test_workers_that_do_not_join_in_time_make_it_a_miss() -> None:
    engine = warm_engine(DENSE)
    noted = note_misses(engine)
    engine.hear(WorkerReport(places={0: ()}))
    request = engine.arrive("second", range(30))
    engine.now_s += READY_WAIT_S * 2  # in the engine's queue
    assert engine.match(request) is None
    engine.now_s += READY_WAIT_S * 0.9
    assert engine.match(request) is None
    engine.now_s += READY_WAIT_S * 0.2
    assert engine.match(request) == 0
    assert engine.cache.stats().leases == 0
    assert noted == [("second", Miss.NOT_SERVED)]


# ---- what a load tells ----


@pytest.mark.parametrize("ranks", [1, 2])
def test_loads_are_checked_against_the_digests_of_all_shards_if_that_is_asked_for(ranks: int) -> None:
    engine = ScriptedEngine(*TWO_SIZES, ranks=ranks, extra={"verify": "always"})
    engine.serve("first", range(30))
    engine.forget()
    engine.admit(engine.arrive("second", range(30)))
    (load,) = engine.step().loads
    assert load.wanted is not None
    assert load.wanted.digests.shape == (ranks, len(load.moves))
    published = {(one.group, one.name, one.shard): one.digest for one in engine.cache.published}
    for at, group in enumerate(load.moves.groups.tolist()):
        name = load.wanted.hashes[32 * at : 32 * at + 32]
        assert load.wanted.digests[:, at].tolist() == [published[group, name, shard] for shard in range(ranks)]


def test_nothing_is_checked_otherwise() -> None:
    engine = warm_engine(DENSE)
    engine.admit(engine.arrive("second", range(30)))
    (load,) = engine.step().loads
    assert load.wanted is None


def test_the_judge_hears_how_long_loads_take(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = load_apart(warm_engine(DENSE, ranks=2))
    heard: list[tuple[int, float]] = []
    monkeypatch.setattr(engine.parts.judge, "note_load", lambda *sample: heard.append(sample))
    engine.admit(engine.arrive("second", range(30)))
    engine.admit(engine.arrive("third", range(30)))
    plan = engine.step()
    engine.now_s += 2.0
    # The ranks end their copies in different steps; what they waited for is no part of it.
    engine.hear(WorkerReport(copied_s={"second": 0.5}))
    engine.hear(WorkerReport(copied_s={"second": 0.75, "somebody else": 9.0}))
    engine.report(plan, failed=["third"], report=WorkerReport(copied_s={"second": 0.25, "third": 3.0}))
    # A load that failed says nothing.
    assert heard == [(7 * 2 * engine.geometry.groups[0].record_bytes, 0.75)]


def test_the_judge_hears_how_long_prompts_take(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = ScriptedEngine((["a"], full(4)))
    heard: list[tuple[int, float, int]] = []

    def note_prefill(tokens: int, seconds: float, *, decoding: int) -> None:
        heard.append((tokens, seconds, decoding))

    monkeypatch.setattr(engine.parts.judge, "note_prefill", note_prefill)
    plans = []
    for tokens in (63, 64, 100):
        engine.admit(engine.arrive(f"of {tokens}", np.random.default_rng(tokens).integers(0, 99, tokens).tolist()))
        plans.append(engine.step())
    engine.hear(WorkerReport())
    for plan in plans:
        engine.now_s += 1.0
        engine.report(plan)
    # Of the first one it cannot be told. The second ends as many seconds later as it runs; the third was begun before.
    assert heard == [(64, 1.0, 0), (100, 1.0, 0)]


# ---- loads that wait for each other ----


def parked_engine(tokens: int) -> ScriptedEngine:
    """Of its 40 blocks, those of a prompt of so many tokens wait for a load."""
    engine = ScriptedEngine(*DENSE, num_blocks=40)
    engine.parts.pins.limit = 40
    for name, prompt in (("first", range(tokens)), ("small", range(200, 220))):
        engine.serve(name, prompt)
        engine.forget()
    assert engine.admit(engine.arrive("loaded", range(tokens))) == Admission(0, (tokens - 1) // 4 * 4)
    return engine


@pytest.mark.parametrize(("tokens", "external"), [(82, 16), (86, None)])
def test_with_half_of_the_blocks_waiting_for_loads_no_further_load_is_begun(tokens: int, external: int | None) -> None:
    engine = parked_engine(tokens)
    request = engine.arrive("second", range(200, 220))
    assert engine.match(request) == external
    engine.report(engine.step())
    assert engine.match(request) == 16
    assert len(engine.cache.asked) == 2, "its answer was kept"


def test_who_waits_for_other_loads_does_not_wait_for_ever() -> None:
    engine = parked_engine(90)
    request = engine.arrive("second", range(200, 220))
    engine.now_s += READY_WAIT_S * 2  # in the engine's queue
    assert engine.match(request) is None
    engine.now_s += READY_WAIT_S * 1.1
    assert engine.admit(request) == Admission(0, 0)
    engine.report(engine.step())
    for name in ("loaded", "second"):
        engine.finish(engine.requests[name])
    engine.step()
    engine.assert_at_rest()


# ---- loads that wait for room ----


def crowded_engine(*, free: int) -> tuple[ScriptedEngine, object]:
    """Makes an engine that knows how long computing takes, and of which all blocks but so many are held."""
    engine = warm_engine(DENSE)
    for _ in range(MIN_SAMPLES):
        engine.parts.judge.note_prefill(64, 64 * TOKEN_S)
    return engine, leave_free(engine, free)


def test_a_hit_for_which_there_is_no_room_waits_until_there_is() -> None:
    engine, hog = crowded_engine(free=8)
    noted = note_misses(engine)
    request = engine.arrive("second", range(30))
    assert engine.match(request) is None
    engine.report(engine.step())
    engine.now_s += 28 * TOKEN_S * 0.9
    assert engine.match(request) is None
    engine.pool.free_blocks(hog)
    assert engine.admit(request) == Admission(0, 28)
    assert noted == []
    assert len(engine.cache.asked) == 1, "its answer was kept"


def test_who_waits_for_room_waits_no_longer_than_computing_takes() -> None:
    engine, hog = crowded_engine(free=8)
    noted = note_misses(engine)
    request = engine.arrive("second", range(30))
    engine.now_s += READY_WAIT_S  # in the engine's queue
    assert engine.match(request) is None
    engine.now_s += 28 * TOKEN_S * 1.1
    assert engine.admit(request, chunk=4) == Admission(0, 0)
    engine.report(engine.step())
    assert noted == [("second", Miss.NO_ROOM)]
    engine.pool.free_blocks(hog)
    engine.finish(request)
    engine.step()
    engine.assert_at_rest()


def test_a_later_request_does_not_pass_one_that_waits_for_room() -> None:
    engine, hog = crowded_engine(free=8)
    first, second = engine.arrive("second", range(30)), engine.arrive("third", range(200, 204))
    assert engine.match(first) is None
    assert engine.match(second) is None
    engine.pool.free_blocks(hog)
    assert engine.match(second) is None, "it is not its turn"
    assert engine.match(first) == 28
    assert engine.match(second) == 0


@pytest.mark.parametrize("way", ["ended", "waited long enough"])
def test_who_waits_for_room_no_more_is_in_nobodys_way(way: str) -> None:
    engine, _ = crowded_engine(free=8)
    first, second = engine.arrive("second", range(30)), engine.arrive("third", range(200, 204))
    assert engine.match(first) is None
    assert engine.match(second) is None
    if way == "ended":
        engine.finish(first)
    else:
        engine.now_s += 28 * TOKEN_S * 1.1
    assert engine.match(second) == 0


def test_nobody_waits_for_room_that_there_will_never_be() -> None:
    engine = ScriptedEngine(*DENSE, num_blocks=9)
    engine.parts.pins.limit = 9
    engine.serve("first", range(20))
    engine.forget()
    for _ in range(MIN_SAMPLES):
        engine.parts.judge.note_prefill(64, 64 * TOKEN_S)
    # Eight blocks, and one to spare.
    assert engine.match(engine.arrive("second", range(32))) == 0
    assert engine.match(engine.arrive("third", range(28))) == 20


def test_a_late_answer_is_waited_for_by_its_worth() -> None:
    """A quarter of what computing takes is the most that a server that never answers may cost."""
    engine = warm_engine(DENSE)
    engine.match(engine.arrive("unmeasured", range(30)))
    assert engine.cache.wait_s == 0.0
    for _ in range(4):
        engine.parts.judge.note_prefill(1000, 10.0)
    engine.match(engine.arrive("measured", range(30)))
    assert engine.cache.wait_s == pytest.approx(28 * 0.01 / 4)
