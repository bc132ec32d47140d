"""DeepSeek-V4 on the real engine: windows of latents, compressed latents, an indexer's keys, and states of compressors.

Its hits end where 256 tokens do. There the engine's own hits end too, and what is restored equals them bit for bit.
"""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.vllm import connector_probe as probe
from tests.vllm.cache_server import SharedServer
from tests.vllm.engine import EnginePool, make_prompt
from tests.vllm.equality import (
    CHUNKS,
    FLOAT32_ROUNDING,
    Case,
    answer,
    check_every_byte,
    check_own_hit,
    check_restored_bytes,
    one_boundary,
    restorable,
    restored_answer,
    second_turns,
)
from tests.vllm.restarted import start
from tests.vllm.tiny_deepseek_v4 import DEEPSEEK_V4, INDEX_KEYS_BYTES, INDEXED_TOKENS

pytestmark = pytest.mark.vllm

LENGTHS = (255, 256, 257, 513, 700, 1281, INDEXED_TOKENS + 260)
CASE = Case("deepseek-v4", DEEPSEEK_V4, CHUNKS, LENGTHS)
LATENTS = 3
"""The group of compressed latents and of an indexer's keys."""
KEPT = {0: 2, 1: 2, 2: 2, LATENTS: 1, 4: 2, 5: 16}
"""How many blocks of each group a prompt of one boundary leaves: of windows of 128, 8 and 128 tokens the last ones."""
READ = {0: 2, 1: 2, 2: 2, LATENTS: 1, 4: 1}
"""How many of them an answer depends on. At a boundary all latents of 128 tokens are whole, so nothing reads the states
that they were made of; the next latent of 4 tokens is made of these and of the 4 before the boundary."""


def test_a_restored_run_equals_the_engines_own_hit_bit_for_bit(engines: EnginePool) -> None:
    check_own_hit(engines, CASE)


def test_restored_blocks_hold_the_bytes_that_were_saved(engines: EnginePool) -> None:
    check_restored_bytes(engines, CASE)


def test_every_byte_of_the_engines_cache_is_accounted_for(engines: EnginePool) -> None:
    check_every_byte(engines, CASE)


def test_zeros_in_the_records_that_are_read_change_the_answer_and_in_others_nothing(engines: EnginePool) -> None:
    engine, prompt = CASE.acquire(engines), one_boundary(DEEPSEEK_V4)
    answer(engine, prompt)
    right, seen = restored_answer(engine, prompt), Counter[int]()
    entries = probe.entries(engine)
    assert Counter(entry.group for entry in entries) == KEPT
    for entry in entries:
        with probe.zeroed(engine, entry):
            wrong = restored_answer(engine, prompt)
        assert wrong.cached == DEEPSEEK_V4.block_size, entry
        assert wrong == right or wrong.distance(right) > 10 * FLOAT32_ROUNDING, entry
        seen[entry.group] += wrong != right
    assert +seen == READ
    assert restored_answer(engine, prompt) == right


def test_zeros_in_an_indexers_keys_change_the_answer_of_a_long_prompt(engines: EnginePool) -> None:
    """Up to `INDEXED_TOKENS` all latents are read, whatever their keys are."""
    engine, prompt = CASE.acquire(engines), make_prompt(seed=9, length=INDEXED_TOKENS + 260)
    for asked, is_long in ((prompt, True), (prompt[: INDEXED_TOKENS - 250], False)):
        answer(engine, asked)
        right = restored_answer(engine, asked)
        with ExitStack() as zeros:
            for entry in probe.entries(engine):
                if entry.group == LATENTS:
                    zeros.enter_context(probe.zeroed(engine, entry, size_bytes=INDEX_KEYS_BYTES))
            wrong = restored_answer(engine, asked)
        assert (right.cached, wrong.cached) == (restorable(DEEPSEEK_V4, len(asked)),) * 2
        assert (wrong != right) == is_long
        assert restored_answer(engine, asked) == right


def test_a_hit_may_begin_with_the_engines_own_blocks_and_end_with_restored_ones(engines: EnginePool) -> None:
    engine, prompt = CASE.acquire(engines), make_prompt(seed=6, length=1400)
    answer(engine, prompt)
    local = answer(engine, prompt)
    engine.reset_local()
    beginning = answer(engine, prompt[:600])
    with probe.watch_loads(engine) as loads:
        mixed = answer(engine, prompt)
    # Windows were kept at the last boundary only.
    assert (beginning.cached, mixed.cached, loads) == (0, 1280, [1280 - 512])
    assert mixed == local
    assert probe.faults(engine) == {}


def test_an_engine_that_retains_decoded_boundaries_has_them_all_restored(engines: EnginePool) -> None:
    """After three more tokens it has dropped a block of a window of 8 that ended there."""
    retaining = Case("retaining", DEEPSEEK_V4, CHUNKS | {"prefix_cache_retention_interval": DEEPSEEK_V4.block_size})
    engine = retaining.acquire(engines)
    for said in (80, 81, 200, 230, 331):
        local, external, restored = second_turns(engine, said=said)
        expected = (1200 + said - 1) // DEEPSEEK_V4.block_size * DEEPSEEK_V4.block_size
        assert (local.cached, restored.cached, external) == (expected, expected, []), said
        assert restored == local, said


def test_an_engine_that_was_started_again_hits_at_its_first_request(engines: EnginePool, tmp_path: Path) -> None:
    engines.leave_process()
    prompt, expected = make_prompt(seed=21, length=1400), restorable(DEEPSEEK_V4, 1400)
    with SharedServer(tmp_path) as server:
        server.start()
        answers = []
        for _ in range(2):
            engine = start(engines, server, DEEPSEEK_V4)
            try:
                answers += [answer(engine, prompt), answer(engine, prompt)]
                engine.drain()
                assert probe.faults(engine) == {}
            finally:
                engine.close()
    assert [one.cached for one in answers] == [0, expected, expected, expected]
    assert answers[1:] == [answers[1]] * 3
