"""Pages that are not all alike, on the real engine: layers of different sizes in one group, and blocks that the kernels
see in pieces.

In the first the number of blocks cannot be read from any tensor (vLLM #38554); in the second a block is several
entries of its tensor's first dimension, and of two such dimensions only the declaration tells which (vLLM #37236).
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.vllm.engine import EnginePool, Json
from tests.vllm.equality import CHUNKS, Case, check_own_hit, check_restored_bytes, check_zeros_are_seen, each
from tests.vllm.tiny_models import DENSE, UNEVEN

pytestmark = pytest.mark.vllm

KERNEL_TOKENS = 32
BLOCK_TOKENS = 256
(_DENSE_GROUP,) = DENSE.groups
_LARGE_GROUP = replace(_DENSE_GROUP, block_size=BLOCK_TOKENS, page_bytes=2 * _DENSE_GROUP.page_bytes)
LARGE_BLOCKS = replace(DENSE, groups=(_LARGE_GROUP,))

UNEVEN_CASE = Case("uneven", UNEVEN, CHUNKS)
PIECES_CASE = Case("pieces", LARGE_BLOCKS, CHUNKS | {"block_size": BLOCK_TOKENS})


@pytest.fixture(autouse=True)
def small_kernels(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines that start for PIECES_CASE have kernels that take blocks of one size only, as many GPU kernels do."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    if case is PIECES_CASE:
        sizes = staticmethod(lambda kv_cache_spec=None: [KERNEL_TOKENS])
        monkeypatch.setattr(CPUAttentionBackend, "get_supported_kernel_block_sizes", sizes)


@each(UNEVEN_CASE, PIECES_CASE, scope="module")
def test_the_engine_is_what_these_tests_are_about(engines: EnginePool, case: Case) -> None:
    engine = case.acquire(engines)
    (found,) = engine.ask_workers(_describe)
    (group,) = case.model.groups
    assert found["kind"] == group.kind
    assert sum(found["page_bytes"]) == group.page_bytes * (len(found["page_bytes"]) if case is PIECES_CASE else 1)
    assert len(set(found["page_bytes"])) == (2 if case is UNEVEN_CASE else 1)
    kernel_blocks = BLOCK_TOKENS // KERNEL_TOKENS if case is PIECES_CASE else 1
    assert found["entries"] == found["num_blocks"] * kernel_blocks


@each(UNEVEN_CASE, PIECES_CASE, scope="module")
def test_a_restored_run_equals_the_engines_own_hit_bit_for_bit(engines: EnginePool, case: Case) -> None:
    check_own_hit(engines, case)


@each(UNEVEN_CASE, PIECES_CASE, scope="module")
def test_restored_blocks_hold_the_bytes_that_were_saved(engines: EnginePool, case: Case) -> None:
    check_restored_bytes(engines, case)


@each(UNEVEN_CASE, PIECES_CASE, scope="module")
def test_zeros_in_the_record_of_any_group_change_the_answer(engines: EnginePool, case: Case) -> None:
    check_zeros_are_seen(engines, case)


def _describe(worker: object) -> Json:
    runner = worker.model_runner  # type: ignore[attr-defined]
    (group,) = runner.kv_cache_config.kv_cache_groups
    specs = getattr(group.kv_cache_spec, "kv_cache_specs", {"": group.kv_cache_spec})
    return {
        "kind": type(group.kv_cache_spec).__name__,
        "num_blocks": runner.kv_cache_config.num_blocks,
        "page_bytes": [spec.real_page_size_bytes for spec in specs.values()],
        "entries": runner.kv_caches[0].shape[0],
    }
