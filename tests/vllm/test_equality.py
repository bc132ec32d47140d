"""Restored blocks equal the engine's own prefix hit bit for bit, on the real engine.

A cold run is no measure: its chunks have other shapes than those after a hit, the engine's own hits included, and
bfloat16 rounds them differently. So each prompt runs cold, then from the engine's own cache, then, with that dropped,
from ours; the last two must agree in every token and every logprob. That the comparison can fail is shown record by
record: zeros in its place change the answer.
"""

from __future__ import annotations

import itertools

import pytest

from tests.vllm import connector_probe as probe
from tests.vllm.engine import Engine, EnginePool, cache_shapes, make_prompt
from tests.vllm.equality import (
    CHUNKS,
    FLOAT32_ROUNDING,
    GDN_CHUNKS,
    LOCAL_CASES,
    MIN_MARGIN,
    MLA_CASE,
    MLA_LENGTHS,
    SLIDING_CASE,
    Case,
    answer,
    check_every_byte,
    check_own_hit,
    check_restored_bytes,
    check_zeros_are_seen,
    each,
    one_boundary,
    restorable,
    restored_answer,
    second_turns,
)
from tests.vllm.tiny_models import DENSE, GDN, MLA, SLIDING, TinyModel

pytestmark = pytest.mark.vllm


TWO_RANKS_CASE = Case("gdn-two-ranks", GDN, probe.TWO_RANKS, (640, 641, 1281, 2700), has_own_processes=True)
MLA_FLOAT32_CASE = Case("mla-float32", MLA, {"dtype": "float32"}, MLA_LENGTHS)


def has_states(model: TinyModel) -> bool:
    return "MambaSpec" in model.layer_kinds


@each(*LOCAL_CASES, TWO_RANKS_CASE)
def test_a_restored_run_equals_the_engines_own_hit_bit_for_bit(engines: EnginePool, case: Case) -> None:
    check_own_hit(engines, case)


def test_where_the_engines_own_hits_end_within_a_block_ours_are_whole_blocks(engines: EnginePool) -> None:
    from vllm.config import CacheConfig

    if not hasattr(CacheConfig, "prefix_match_unit"):
        pytest.skip("this vLLM hashes no part of a block")
    engine = Case("gdn-units", GDN, GDN_CHUNKS | {"prefix_match_unit": 16}).acquire(engines)
    prompt = make_prompt(seed=31, length=1700)
    assert answer(engine, prompt).cached == 0
    local = answer(engine, prompt)
    restored = restored_answer(engine, prompt)
    assert (local.cached, restored.cached) == (1696, restorable(GDN, 1700)) == (1696, 1280)
    assert restored == local
    # The engine's own part of a block gives way to a longer hit.
    engine.reset_local()
    assert answer(engine, prompt[:700]).cached == 0
    assert answer(engine, prompt[:700]).cached == 688
    assert answer(engine, prompt) == restored
    assert answer(engine, prompt).cached == 1696
    assert probe.faults(engine) == {}


@each(*LOCAL_CASES, MLA_CASE)
def test_restored_blocks_hold_the_bytes_that_were_saved(engines: EnginePool, case: Case) -> None:
    check_restored_bytes(engines, case)


@each(*LOCAL_CASES, MLA_CASE)
def test_zeros_in_the_record_of_any_group_change_the_answer(engines: EnginePool, case: Case) -> None:
    check_zeros_are_seen(engines, case)


@each(*LOCAL_CASES)
def test_a_hit_may_begin_with_the_engines_own_blocks_and_end_with_restored_ones(
    engines: EnginePool, case: Case
) -> None:
    engine, prompt = case.acquire(engines), make_prompt(seed=6, length=2300)
    answer(engine, prompt)
    local = answer(engine, prompt)
    engine.reset_local()
    beginning = answer(engine, prompt[:1000])
    with probe.watch_loads(engine) as loads:
        mixed = answer(engine, prompt)
    own, whole = restorable(case.model, 1000), restorable(case.model, 2300)
    # A state was kept at the last boundary only, and windows there.
    assert beginning.cached == (own if case.keeps_all_boundaries else 0)
    assert (mixed.cached, loads) == (whole, [whole - own])
    assert mixed == local


def test_where_two_prompts_part_the_third_one_hits(engines: EnginePool) -> None:
    """It is not known beforehand that 896 tokens are shared, so no window was kept there with the first prompt."""
    engine, shared = SLIDING_CASE.acquire(engines), make_prompt(seed=11, length=900)
    first, second, third = (shared + make_prompt(seed=seed, length=500) for seed in (12, 13, 14))
    assert answer(engine, first).cached == 0
    assert restored_answer(engine, second).cached == 0
    restored = restored_answer(engine, third)
    engine.forget()
    # In three whole steps, as before: some processors round otherwise in a step of another length.
    answer(engine, first[: 3 * CHUNKS["max_num_batched_tokens"]])
    local = answer(engine, third)
    assert (local.cached, restored.cached) == (896, 896)
    assert restored == local
    assert probe.faults(engine) == {}


def test_blocks_that_are_computed_again_keep_the_bytes_of_the_first_computation(engines: EnginePool) -> None:
    """The third prompt is restored up to where the second one ended. The part that it has in common with the first one
    goes on behind that place, and is computed again, in another shape than the first time."""
    engine, shared = SLIDING_CASE.acquire(engines), make_prompt(seed=15, length=900)
    long, parting = (shared + make_prompt(seed=seed, length=300) for seed in (16, 17))
    answer(engine, long)
    first = answer(engine, long)
    before = restored_digests(engine, long)
    assert restored_answer(engine, shared[:390]).cached == 0
    assert restored_answer(engine, parting).cached == 384
    restored = restored_answer(engine, parting)
    assert restored.cached == restorable(SLIDING, 1200)
    assert restored_answer(engine, parting) == restored
    shared_blocks = 900 // SLIDING.block_size
    assert restored_digests(engine, parting)[:shared_blocks] == before[:shared_blocks]
    assert restored_digests(engine, long) == before
    assert restored_answer(engine, long) == first
    assert probe.faults(engine) == {}


def restored_digests(engine: Engine, prompt: list[int]) -> list[object]:
    """Returns the digests of the records of full attention from which this prompt is restored, in order."""
    full = next(at for at, group in enumerate(SLIDING.groups) if group.kind == "FullAttentionSpec")
    with probe.watch_load_jobs(engine) as jobs:
        assert restored_answer(engine, prompt).cached == restorable(SLIDING, len(prompt))
    (job,) = jobs
    moves = zip(job.moves.groups.tolist(), job.moves.addresses.tolist(), strict=True)
    records = [(group, address) for group, address in moves if group == full]
    assert len(records) == restorable(SLIDING, len(prompt)) // SLIDING.block_size
    return [engine.ask_workers(probe.record_digests, [record]) for record in records]


@each(*LOCAL_CASES, MLA_CASE, TWO_RANKS_CASE)
def test_every_byte_of_the_engines_cache_is_accounted_for(engines: EnginePool, case: Case) -> None:
    check_every_byte(engines, case)


def test_two_ranks_share_the_heads(engines: EnginePool) -> None:
    engine = TWO_RANKS_CASE.acquire(engines)
    whole, shapes = GDN.groups, cache_shapes(engine)
    assert len(shapes) == 2
    for shape in shapes:
        assert [group.page_bytes * 2 for group in shape.groups] == [group.page_bytes for group in whole]
        assert [group.padded_page_bytes * 2 for group in shape.groups] == [group.padded_page_bytes for group in whole]
    assert len(engine.generate(make_prompt(seed=6, length=700)).outputs[0].token_ids) == 8


@each(*LOCAL_CASES[:4])
def test_a_conversation_goes_on_from_blocks_that_were_decoded(engines: EnginePool, case: Case) -> None:
    """After 1,200 + 81 tokens 1,280 are in the cache, for the last one was never computed; after one fewer, 1,279.

    The engine drops window blocks while it decodes, so that its own hit ends a block earlier than ours, unless it keeps
    them all. Recurrent states of decoded tokens are not kept unless the engine is told to.
    """
    engine = case.acquire(engines)
    for said in (80, 81):
        local, external, restored = second_turns(engine, said=said)
        written = (1200 + said - 1) // case.model.block_size * case.model.block_size
        expected = restorable(case.model, 1200) if has_states(case.model) else written
        assert (local.cached, restored.cached) == (expected, expected), said
        assert external == ([128] if case is SLIDING_CASE and said == 81 else []), said
        assert restored == local, said


@pytest.mark.parametrize("model", [SLIDING, GDN], ids=lambda model: model.name)
def test_an_engine_that_retains_decoded_boundaries_has_them_all_restored(engines: EnginePool, model: TinyModel) -> None:
    """`prefix_cache_retention_interval`, which multi-turn use of recurrent models depends on."""
    chunks = GDN_CHUNKS if has_states(model) else CHUNKS
    engine = Case("retaining", model, chunks | {"prefix_cache_retention_interval": model.block_size}).acquire(engines)
    for said in (80, 81):
        local, external, restored = second_turns(engine, said=said)
        expected = (1200 + said - 1) // model.block_size * model.block_size
        assert (local.cached, restored.cached, external) == (expected, expected, []), said
        assert restored == local, said


def test_zeros_in_any_record_of_any_rank_change_the_answer(engines: EnginePool) -> None:
    case = TWO_RANKS_CASE
    engine, prompt = case.acquire(engines), one_boundary(case.model)
    answer(engine, prompt)
    right = restored_answer(engine, prompt)
    entries = probe.entries(engine)
    assert sorted(entry.group for entry in entries) == list(range(len(case.model.groups)))
    digests = engine.ask_workers(probe.record_digests, [(entry.group, entry.address) for entry in entries])
    assert len({digest for rank in digests for digest in rank}) == 2 * len(entries), "each rank has bytes of its own"
    for rank, entry in itertools.product(range(2), entries):
        with probe.zeroed(engine, entry, rank=rank):
            wrong = restored_answer(engine, prompt)
        assert wrong.cached == case.model.block_size
        assert wrong != right, (rank, entry)
        assert wrong.distance(right) > 10 * FLOAT32_ROUNDING, (rank, entry)
    assert restored_answer(engine, prompt) == right


def test_restored_latents_give_the_answers_of_an_engine_without_connector(engines: EnginePool) -> None:
    """There is no hit of the engine's own to compare with; in float32 rounding is too small to matter."""
    case = MLA_FLOAT32_CASE
    prompts = {length: make_prompt(length, length) for length in case.lengths}
    plain = engines.acquire(case.model, **case.arguments)
    cold = {length: answer(plain, prompt) for length, prompt in prompts.items()}
    engine = case.acquire(engines)
    for length, prompt in prompts.items():
        assert cold[length].margin > MIN_MARGIN, f"the prompt of {length} tokens has two answers, choose another seed"
        assert answer(engine, prompt) == cold[length], length
        engine.reset_local()
        restored = answer(engine, prompt)
        assert restored.cached == restorable(case.model, length)
        assert restored.tokens == cold[length].tokens, length
        assert restored.distance(cold[length]) < FLOAT32_ROUNDING, length
    assert probe.faults(engine) == {}


def test_a_prompt_may_be_restored_to_its_end(engines: EnginePool) -> None:
    """One token is computed, in a step of another shape than any other: in float32 that makes no other answer."""
    engine = engines.acquire(DENSE, kv_transfer_config=probe.transfer(whole_prompts=True), **CHUNKS, dtype="float32")
    for length in (128, 129, 256, 640, 1280):
        prompt = make_prompt(length, length)
        cold = answer(engine, prompt)
        assert cold.margin > MIN_MARGIN, f"the prompt of {length} tokens has two answers, choose another seed"
        with probe.watch_loads(engine) as loads:
            restored = restored_answer(engine, prompt)
        assert (cold.cached, loads) == (0, [length // DENSE.block_size * DENSE.block_size])
        assert restored.cached == loads[0]
        assert restored.tokens == cold.tokens, length
        assert restored.distance(cold) < FLOAT32_ROUNDING, length
    assert probe.faults(engine) == {}


def test_a_record_with_a_flipped_bit_ends_the_hit_before_it_and_is_saved_again(engines: EnginePool) -> None:
    """One bit of one record out of five, found before the hit is reported: no request fails by it."""
    engine = engines.acquire(DENSE, kv_transfer_config=probe.transfer(verify="always"), **CHUNKS)
    prompt = make_prompt(seed=10, length=700)
    answer(engine, prompt[:300])
    short = answer(engine, prompt)
    engine.forget()
    answer(engine, prompt)
    right, entries = restored_answer(engine, prompt), probe.entries(engine)
    assert (short.cached, right.cached, len(entries)) == (256, 640, 5)
    bad = entries[2]
    (size_bytes,) = engine.ask_workers(probe.record_bytes)[0]
    digest = engine.ask_workers(probe.record_digests, [(bad.group, bad.address)])
    before = probe.pool_stats(engine)["mismatches"]
    engine.reset_local()
    engine.ask_workers(probe.flip_bit, bad.group, bad.address, size_bytes // 2)
    partly = answer(engine, prompt)
    assert (partly.cached, partly) == (short.cached, short)
    probe.drain(engine)
    assert probe.pool_stats(engine)["mismatches"] == before + 1
    (again,) = (entry for entry in probe.entries(engine) if entry.name == bad.name)
    assert engine.ask_workers(probe.record_digests, [(again.group, again.address)]) == digest
    final = restored_answer(engine, prompt)
    assert (final.cached, final) == (right.cached, right)
    assert (probe.pins(engine), probe.faults(engine)) == (0, {})
