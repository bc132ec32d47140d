"""Loads are refused only when they are clearly slower than computing, and never for ever."""

from __future__ import annotations

from collections.abc import Iterable
from random import Random

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from hypothesis import given
from hypothesis import strategies as st

from kvoffload.connector.loads.judge import (
    CLEARLY_SLOWER,
    FREE_PROBES,
    FREE_SAMPLES,
    FREE_SHARE,
    MAX_REFUSALS,
    MIN_SAMPLES,
    SLOWEST_OF,
    LoadJudge,
)
from kvoffload.protocol import Miss
from kvoffload.units import GIB, MIB
from tests.kit.connector.timed import TimedEngine, TrueCosts, draw_prompt
from tests.kit.connector.warm import note_misses

STEP_S = 0.02
BYTES_PER_S = 10e9
TOKENS_PER_S = 10_000


def load_s(size_bytes: int, *, slowed: float = 1.0) -> float:
    return slowed * (STEP_S + size_bytes / BYTES_PER_S)


def judge_of(*, loads: Iterable[tuple[int, float]], tokens_per_s: float = TOKENS_PER_S) -> LoadJudge:
    judge = LoadJudge()
    for size_bytes, seconds in loads:
        judge.note_load(size_bytes, seconds)
    for tokens in (100, 1000, 2000, 4000):
        judge.note_prefill(tokens, tokens / tokens_per_s)
    return judge


def ordinary_loads(*, slowed: float = 1.0) -> list[tuple[int, float]]:
    sizes = [1 * MIB, 2 * GIB, 20 * MIB, 300 * MIB, 5 * MIB, 100 * MIB, 1 * GIB, 2 * MIB]
    return [(size, load_s(size, slowed=slowed)) for size in sizes]


@pytest.mark.parametrize(("loads", "prefills"), [(0, 0), (MIN_SAMPLES, MIN_SAMPLES - 1), (MIN_SAMPLES - 1, 100)])
def test_with_few_samples_everything_is_loaded(loads: int, prefills: int) -> None:
    judge = LoadJudge()
    for _ in range(loads):
        judge.note_load(1, 1000.0)
    for _ in range(prefills):
        judge.note_prefill(10**6, 0.001)
    assert all(judge.favours_load(1, 1 * GIB) for _ in range(3 * MAX_REFUSALS))


@pytest.mark.parametrize(
    ("tokens", "size_bytes", "favoured"),
    [
        # 16 tokens compute in 1.6 ms, and a load takes a step of 20 ms whatever its size.
        (16, 1, False),
        (16, 2 * MIB, False),
        # 200 tokens compute in 20 ms.
        (200, 1 * MIB, True),
        # 8192 tokens compute in 819 ms; at 128 KiB a token they load in 127 ms.
        (8192, 1 * GIB, True),
        # A model with very large records: 12 GiB take 1.3 s.
        (8192, 12 * GIB, False),
    ],
)
def test_a_load_is_weighed_by_its_step_and_its_bytes(tokens: int, size_bytes: int, favoured: bool) -> None:
    assert judge_of(loads=ordinary_loads()).favours_load(tokens, size_bytes) is favoured


@pytest.mark.parametrize(("margin", "favoured"), [(0.98, True), (1.02, False)])
def test_only_what_is_clearly_slower_is_refused(margin: float, favoured: bool) -> None:
    tokens = 4096
    seconds = tokens / TOKENS_PER_S * CLEARLY_SLOWER * margin
    size_bytes = int((seconds - STEP_S) * BYTES_PER_S)
    assert judge_of(loads=ordinary_loads()).favours_load(tokens, size_bytes) is favoured


@pytest.mark.parametrize(("tokens", "size_bytes", "favoured"), [(1000, 100 * MIB, True), (10_000, 10_000 * MIB, False)])
def test_loads_of_one_size_are_taken_for_a_plain_bandwidth(tokens: int, size_bytes: int, favoured: bool) -> None:
    judge = judge_of(loads=[(100 * MIB, 0.1)] * 20, tokens_per_s=10_000 if favoured else 2_000_000)
    assert judge.favours_load(tokens, size_bytes) is favoured


def test_noise_that_turns_the_line_does_not_make_large_loads_free_or_small_ones_negative() -> None:
    downhill = judge_of(loads=[(1 * MIB, 0.9), (900 * MIB, 0.1)] * 8)
    assert not downhill.favours_load(100, 1 * GIB)
    assert not downhill.favours_load(1, 1)
    steep = judge_of(loads=[(100 * MIB, 0.01), (200 * MIB, 1.0)] * 8)
    # Through (100 MiB, 10 ms) and (200 MiB, 1 s) a line would cross nothing at 99 MiB.
    assert not steep.favours_load(1, 50 * MIB)


@pytest.mark.parametrize(
    ("amount", "seconds"), [(0, 1.0), (-5, 1.0), (5, 0.0), (5, -1.0), (5, float("nan")), (5, float("inf"))]
)
def test_samples_that_cannot_be_are_ignored(amount: int, seconds: float) -> None:
    judge, plain = judge_of(loads=ordinary_loads()), judge_of(loads=ordinary_loads())
    for _ in range(50):
        judge.note_load(amount, seconds)
        judge.note_prefill(amount, seconds)
    asked = [(tokens, tokens * size) for tokens in (16, 200, 8192) for size in (1, 128 << 10, 2 * MIB)]
    assert [judge.favours_load(*one) for one in asked] == [plain.favours_load(*one) for one in asked]


def test_one_in_so_many_is_allowed_as_a_probe() -> None:
    judge = judge_of(loads=ordinary_loads(slowed=1000))
    answers = [judge.favours_load(100, 1 * MIB) for _ in range(3 * (MAX_REFUSALS + 1))]
    assert answers == ([False] * MAX_REFUSALS + [True]) * 3


def test_refusals_count_in_a_row_only() -> None:
    judge = judge_of(loads=ordinary_loads())
    for _ in range(5):
        assert not any(judge.favours_load(16, 1) for _ in range(MAX_REFUSALS))
        assert judge.favours_load(8192, 1 * GIB)


@pytest.mark.parametrize("bad_s", [1.0, 60.0, 3600.0])
@pytest.mark.parametrize("before", [0, 3, 40])
def test_one_bad_measurement_is_overcome_by_a_few_probes(bad_s: float, before: int) -> None:
    sizes = [8 * MIB, 64 * MIB, 512 * MIB]
    loads = [(size, load_s(size)) for size in (sizes * 20)[: max(before, MIN_SAMPLES)]]
    loads.insert(before, (64 * MIB, bad_s))
    judge = judge_of(loads=loads)
    refused = 0
    for number in range(1000):
        size = sizes[number % 3]
        if judge.favours_load(4096, size):
            judge.note_load(size, load_s(size))
        else:
            refused += 1
    assert refused <= 10 * MAX_REFUSALS
    assert all(judge.favours_load(4096, size) for size in sizes)


def test_loads_that_have_become_slow_are_refused_soon() -> None:
    judge = judge_of(loads=ordinary_loads())
    answers = []
    for size, seconds in ordinary_loads(slowed=50) * 2:
        answers.append(judge.favours_load(1000, size))
        judge.note_load(size, seconds)
    assert not any(answers[8:])


def test_what_a_token_takes_is_known_when_enough_was_measured() -> None:
    judge = LoadJudge()
    for _ in range(MIN_SAMPLES - 1):
        judge.note_prefill(1000, 0.05)
    assert judge.token_ns == 0
    judge.note_prefill(1000, 0.05)
    assert judge.token_ns == 50_000


def test_the_first_sample_counts_no_more_than_the_next() -> None:
    judge = LoadJudge()
    for seconds in (10.0, 0.1, 0.1, 0.1):
        judge.note_load(100 * MIB, 1.0)
        judge.note_prefill(1000, seconds)
    # All four together: 2.6 ms a token.
    assert not judge.favours_load(200, 100 * MIB)
    assert judge.favours_load(400, 100 * MIB)


def test_computing_that_has_become_slow_favours_loads_again() -> None:
    judge = judge_of(loads=ordinary_loads(), tokens_per_s=1e6)
    assert not judge.favours_load(4096, 512 * MIB)
    for _ in range(30):
        judge.note_prefill(2048, 0.2)
    assert judge.favours_load(4096, 512 * MIB)


@given(st.lists(st.tuples(st.integers(1, 1 << 40), st.floats(1e-6, 1e5)), min_size=MIN_SAMPLES, max_size=40))
def test_whatever_was_measured_a_probe_comes(loads: list[tuple[int, float]]) -> None:
    judge = judge_of(loads=loads)
    assert any(judge.favours_load(1, 1 << 30) for _ in range(MAX_REFUSALS + 1))


# ---- what it measures on an engine whose true costs are known ----


def serve_mixed(engine: TimedEngine, *, burst: int) -> None:
    """Serves new prompts and prompts that are kept, while requests decode; kept ones come `burst` at once."""
    random = Random(burst)
    kept = [draw_prompt(random, random.randrange(200, 2000)) for _ in range(2 * max(burst, MIN_SAMPLES))]
    engine.keep(kept)
    for number in range(24):
        engine.come(f"new {number}", draw_prompt(random, random.randrange(100, 5000)))
        for _ in range(random.randrange(12)):
            engine.turn()
    for first in range(0, len(kept), burst):
        for number, prompt in enumerate(kept[first : first + burst], first):
            engine.come(f"again {number}", prompt)
        engine.come(f"beside {first}", draw_prompt(random, 1500))
        engine.work()


@pytest.mark.parametrize("burst", [1, 8, 64])
@pytest.mark.parametrize("is_uniproc", [True, False], ids=["uniproc", "multiproc"])
@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("is_async", [True, False], ids=["async", "sync"])
def test_what_it_measures_is_what_things_take(is_async: bool, drafts: int, is_uniproc: bool, burst: int) -> None:
    engine = TimedEngine(TrueCosts(), is_async=is_async, drafts=drafts, is_uniproc=is_uniproc)
    noted = note_misses(engine)
    serve_mixed(engine, burst=burst)
    judge = engine.parts.judge
    assert judge.token_ns == pytest.approx(engine.costs.token_s * 1e9, rel=0.1)
    record_bytes = engine.geometry.groups[0].record_bytes
    for blocks in (1, 10, 100, 500):
        assert judge.predict_load_s(blocks * record_bytes) == pytest.approx(
            engine.true_load_s(blocks * record_bytes), rel=0.1
        )
    assert Miss.SLOWER_THAN_COMPUTING not in [reason for _, reason in noted]
    assert engine.connector.faults == {}


@pytest.mark.parametrize("burst", [1, 8, 64])
@pytest.mark.parametrize("is_async", [True, False], ids=["async", "sync"])
@pytest.mark.parametrize("loaded_token_s", [5e-6, 48e-6, 62e-6, 100e-6])
def test_what_is_truly_faster_is_loaded_and_what_is_clearly_slower_is_not(
    loaded_token_s: float, is_async: bool, burst: int
) -> None:
    costs = TrueCosts(loaded_token_s=loaded_token_s, load_s=0)
    engine = TimedEngine(costs, is_async=is_async, drafts=3, is_uniproc=True)
    noted = note_misses(engine)
    serve_mixed(engine, burst=burst)
    refused = [name for name, reason in noted if reason is Miss.SLOWER_THAN_COMPUTING]
    if loaded_token_s <= costs.token_s:
        assert not refused
    else:
        # The first ones are loaded to see what it takes, and one in so many after them.
        asked = 2 * max(burst, MIN_SAMPLES)
        measured = max(burst, MIN_SAMPLES)
        assert len(refused) >= (asked - measured) * MAX_REFUSALS // (MAX_REFUSALS + 1)


# ---- what a step that decodes computes for nothing ----

DECODING_S = 0.01


def note_beside(judge: LoadJudge, tokens: int, *, part: float = 0.0, times: int = FREE_SAMPLES) -> None:
    """A step took that part longer because so many tokens were computed in it."""
    for _ in range(times):
        judge.note_decoding(8, DECODING_S)
        judge.note_prefill(tokens, DECODING_S * (1 + part), decoding=8)


def test_what_is_computed_for_nothing_is_not_loaded() -> None:
    judge = LoadJudge()
    assert judge.favours_load(40, 1)
    note_beside(judge, 50, times=FREE_SAMPLES - 1)
    assert judge.favours_load(40, 1)
    note_beside(judge, 50, times=1)
    assert not judge.favours_load(40, 1)


def test_how_much_that_is_is_found_by_trying_twice() -> None:
    judge, limit = LoadJudge(), 400
    note_beside(judge, 20)
    assert judge.favours_load(300, 1), "too far beyond it"
    for tokens in (40, 100, 240):
        assert not judge.favours_load(tokens, 1)
        judge.computing = 0
        note_beside(judge, tokens)
    for _ in range(FREE_PROBES):
        assert not judge.favours_load(600, 1)
        judge.computing = 0
        note_beside(judge, 600, part=600 / limit - 1, times=1)
    assert judge.favours_load(600, 1)
    assert not judge.favours_load(200, 1)


@pytest.mark.parametrize("part", [2 * FREE_SHARE, -2 * FREE_SHARE, -0.9])
def test_what_differs_from_what_was_expected_is_not_for_nothing(part: float) -> None:
    judge = LoadJudge()
    note_beside(judge, 50, part=part)
    assert judge.favours_load(40, 1)


def test_all_that_a_step_computes_counts_together() -> None:
    judge = LoadJudge()
    note_beside(judge, 63)
    for tokens in (100, 200, 400):
        note_beside(judge, tokens, part=0.5)
    assert not judge.favours_load(30, 1)
    assert not judge.favours_load(16, 1, rest=10)
    assert judge.favours_load(16, 1), "56 of them are computed by others of this step"
    judge.computing = 8192
    assert judge.favours_load(16, 1), "somebody's prompt is being computed"
    judge.computing = 0
    assert not judge.favours_load(16, 1)
    assert judge.favours_load(16, 1, rest=8192)


def test_steps_that_compute_for_nothing_do_not_tell_what_a_token_takes() -> None:
    judge = LoadJudge()
    note_beside(judge, 100, part=0.01)
    for _ in range(MIN_SAMPLES):
        judge.note_prefill(8000, 8000 / TOKENS_PER_S + DECODING_S, decoding=8)
    note_beside(judge, 100, part=0.01, times=30)
    assert judge.token_ns == pytest.approx(1e9 / TOKENS_PER_S, rel=0.1)


@pytest.mark.parametrize("is_async", [True, False], ids=["async", "sync"])
@pytest.mark.parametrize("free_tokens", [0, 300])
def test_an_engine_computes_what_its_steps_have_room_for(free_tokens: int, is_async: bool) -> None:
    """Turns of 40 new tokens behind 200 that were saved, one at a time, while 8 requests decode."""
    engine = TimedEngine(TrueCosts(free_tokens=free_tokens), is_async=is_async, drafts=0, is_uniproc=False)
    noted = note_misses(engine)
    random = Random(5)
    kept = [draw_prompt(random, 208) for _ in range(60)]
    engine.keep(kept)
    for number, prompt in enumerate(kept):
        engine.come(f"beside {number}", draw_prompt(random, 20))
        for _ in range(5):
            engine.turn()
        engine.come(f"again {number}", prompt + draw_prompt(random, 40))
        for _ in range(5):
            engine.turn()
    engine.work()
    computed = [name for name, reason in noted if reason is Miss.SLOWER_THAN_COMPUTING]
    assert len(computed) >= 20 if free_tokens else not computed
    assert engine.connector.faults == {}


def test_one_step_that_hung_is_overcome() -> None:
    judge = LoadJudge()
    judge.note_decoding(8, 60.0)
    for _ in range(100):
        judge.note_decoding(8, 0.01)
        judge.note_prefill(2000, 0.01 + 2000 / TOKENS_PER_S, decoding=8)
    assert judge.token_ns == pytest.approx(1e9 / TOKENS_PER_S, rel=0.1)


def test_without_a_step_that_only_decodes_a_whole_step_counts() -> None:
    judge = judge_of(loads=ordinary_loads())
    for _ in range(30):
        judge.note_prefill(1000, 0.2, decoding=100)
    assert judge.token_ns == pytest.approx(200_000, rel=0.1)


@pytest.mark.parametrize("place", range(8))
@pytest.mark.parametrize(("tokens", "size_bytes"), [(16, 1), (200, 1 * MIB), (8192, 1 * GIB), (8192, 12 * GIB)])
def test_one_slow_copy_among_eight_changes_no_decision(place: int, tokens: int, size_bytes: int) -> None:
    """A copy is held up now and then where other processes use the processors, by a hundred times what it takes."""
    loads = ordinary_loads()
    size, seconds = loads[place]
    held_up = [*loads[:place], (size, 100 * seconds), *loads[place + 1 :]]
    expected = judge_of(loads=loads).favours_load(tokens, size_bytes)
    assert judge_of(loads=held_up).favours_load(tokens, size_bytes) is expected


def test_copies_that_have_all_become_slow_are_noticed_by_the_second_one() -> None:
    judge = judge_of(loads=ordinary_loads())
    assert judge.favours_load(8192, 1 * GIB)
    for _ in range(2):
        judge.note_load(1 * GIB, 100.0)
    assert not judge.favours_load(8192, 1 * GIB)


def test_a_slow_copy_is_left_out_for_eight_loads_and_then_forgotten() -> None:
    judge = judge_of(loads=ordinary_loads())
    for seconds in [100.0, *[load_s(1 * GIB)] * (2 * SLOWEST_OF), 100.0]:
        judge.note_load(1 * GIB, seconds)
    assert judge.favours_load(8192, 1 * GIB)
