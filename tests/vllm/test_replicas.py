"""Two ranks that have the same KV head store a block once, each of them about half of the blocks; ranks that turn out
to compute different keys store their own.

A request whose prompt was restored answers as after the engine's own hit, bit for bit: with the bytes of another rank
it would not, where these differ.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import pytest

from tests.vllm import connector_probe as probe
from tests.vllm.engine import Engine, EnginePool, Json, make_prompt, start_engine
from tests.vllm.equality import answer, restorable, restored_answer
from tests.vllm.tiny_models import DENSE, GDN, MLA, GroupShape, TinyModel, build_dense, build_gdn

pytestmark = pytest.mark.vllm

_DENSE_PAGE = 128 * 2 * 64 * 2  # tokens, keys and values, head dimension, bytes of a bfloat16
ONE_HEAD = TinyModel(
    name="dense-one-head",
    build=partial(build_dense, kv_heads=1),
    groups=(GroupShape("FullAttentionSpec", (0, 1, 2, 3), 128, _DENSE_PAGE, _DENSE_PAGE),),
    hash_block_size=DENSE.hash_block_size,
    layout=DENSE.layout,
)
HYBRID = TinyModel(
    name="gdn-one-head",
    build=partial(build_gdn, kv_heads=1),
    groups=GDN.groups,
    hash_block_size=GDN.hash_block_size,
    layout=GDN.layout,
    engine_args=GDN.engine_args,
)
LENGTHS = (257, 640, 1281, 2700)


def watch_writes(_worker: Any) -> Json:
    """Counts from now on how many records this rank writes."""
    side: Any = probe.worker_side()
    side.written, plan_save = 0, side.records.plan_save

    def watched(memory: Any, job: Any) -> Any:
        side.written += int(side.records.part.find_written(job).sum())
        return plan_save(memory, job)

    side.records.plan_save = watched
    return True


def count_writes(_worker: Any) -> Json:
    return int(probe.worker_side().written)  # type: ignore[attr-defined]


def list_replicas(_worker: Any) -> Json:
    """By group: how many ranks in a row hold the same bytes, as this one has registered."""
    facts = probe.worker_side().facts
    assert facts is not None
    return [group.replicas for group in facts.groups]


def list_shards(_worker: Any) -> Json:
    """Lists the number of parts of each group's blocks in the server's memory."""
    client: Any = probe.worker_side().cache
    return [group.shards for group in client.settings.register.groups]


def stretch_keys(worker: Any, rank: int) -> Json:
    """Makes this rank compute keys and values that no other rank computes."""
    if worker.rank != rank:
        return 0
    layers = worker.model_runner.model.model.layers
    for layer in layers:
        layer.self_attn.qkv_proj.register_forward_hook(_stretch)
    return len(layers)


def _stretch(_module: Any, _given: Any, result: Any) -> Any:
    output, *rest = result
    return (output * 1.25, *rest)


@contextmanager
def serving(engines: EnginePool, model: TinyModel, **arguments: object) -> Iterator[Engine]:
    """An engine of two ranks that no other test uses."""
    arguments = {**probe.TWO_RANKS, "kv_transfer_config": probe.transfer(), **arguments}
    engine = start_engine(model, engines.model_folder(model), has_own_processes=True, **arguments)
    try:
        probe.prepare(engine)
        yield engine
    finally:
        engine.close()


def check_restored(engine: Engine, model: TinyModel, lengths: tuple[int, ...], *, seed: int) -> None:
    for at, length in enumerate(lengths, start=seed):
        prompt, expected = make_prompt(at, length), restorable(model, length)
        assert answer(engine, prompt).cached == 0
        local = answer(engine, prompt)
        restored = restored_answer(engine, prompt)
        assert (restored.cached, restored) == (expected, local)


def check_nothing_is_held(engine: Engine) -> None:
    engine.drain()
    held = probe.ask_core(engine, "inspect_scheduler")
    assert {name: held[name] for name in ("faults", "doomed_loads", "pins", "leases", "reserved")} == {
        "faults": 0,
        "doomed_loads": 0,
        "pins": 0,
        "leases": 0,
        "reserved": 0,
    }
    assert probe.faults(engine) == {}


def test_ranks_with_one_head_store_a_block_once_and_share_the_work(engines: EnginePool) -> None:
    with serving(engines, ONE_HEAD) as engine:
        assert engine.ask_workers(list_replicas) == [[2], [2]]
        assert engine.ask_workers(list_shards) == [[1], [1]]
        engine.ask_workers(watch_writes)
        before = probe.ask_core(engine, "inspect_scheduler")["readable"]
        check_restored(engine, ONE_HEAD, LENGTHS, seed=950)
        check_nothing_is_held(engine)
        entries, written = probe.entries(engine), engine.ask_workers(count_writes)
        after = probe.ask_core(engine, "inspect_scheduler")["readable"]
        assert after - before == len(entries) == sum(written) > 30
        assert min(written) > len(entries) / 4
        # Every distinct byte is stored once: slots have no room for another rank's.
        [record_bytes] = engine.ask_workers(probe.record_bytes)[0]
        assert np.diff(sorted(entry.address for entry in entries)).min() == record_bytes


def test_a_hybrid_keeps_what_its_attention_layers_have_in_common(engines: EnginePool) -> None:
    with serving(engines, HYBRID) as engine:
        (replicas, others) = engine.ask_workers(list_replicas)
        assert replicas == others
        assert dict(zip([group.kind for group in HYBRID.groups], replicas, strict=True)) == {
            "MambaSpec": 1,
            "FullAttentionSpec": 2,
        }
        assert engine.ask_workers(list_shards) == [[2 // count for count in replicas]] * 2
        check_restored(engine, HYBRID, (641, 1281, 2700), seed=960)
        check_nothing_is_held(engine)


def test_ranks_that_hold_different_bytes_store_them_apart(engines: EnginePool) -> None:
    with serving(engines, ONE_HEAD) as engine:
        assert sum(engine.ask_workers(stretch_keys, 1)) == 4
        before = probe.ask_core(engine, "inspect_scheduler")
        first = make_prompt(970, 641)
        local = answer(engine, first)
        engine.drain()
        # Nothing of it was published, so nothing is found of it.
        assert probe.ask_core(engine, "inspect_scheduler")["readable"] == before["readable"]
        assert engine.ask_workers(list_replicas) == [[1], [1]]
        assert engine.ask_workers(list_shards) == [[2], [2]]
        missed = restored_answer(engine, first)
        assert (missed.cached, missed) == (0, local)
        engine.drain()
        check_restored(engine, ONE_HEAD, LENGTHS, seed=971)
        check_nothing_is_held(engine)
        assert len(probe.entries(engine)) > 30


@pytest.mark.campaign
def test_ranks_with_one_latent_share_the_work(engines: EnginePool) -> None:
    """vLLM has no prefix cache of its own for this model on a CPU."""
    with serving(engines, MLA, max_num_batched_tokens=4096) as engine:
        assert engine.ask_workers(list_shards) == [[1], [1]]
        engine.ask_workers(watch_writes)
        prompt = make_prompt(980, 1281)
        assert answer(engine, prompt).cached == 0
        restored = restored_answer(engine, prompt)
        assert restored.cached == restorable(MLA, 1281)
        assert restored_answer(engine, prompt) == restored
        check_nothing_is_held(engine)
        assert min(engine.ask_workers(count_writes)) > 20
