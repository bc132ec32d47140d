"""An engine whose layers are divided among the stages of a pipeline saves from its first request on, and restores what
it saved, bit-equal to its own hit. A block is there for all stages or for none, in records of each stage's own size.

vLLM's CPU build computes in pipelines once a stage has the tensors that it takes over from the one before; with a GPU
the engine's warm-up makes them. The tiny GDN model does not start so: vLLM finds that stages with and without an
attention layer want different layouts.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from kvoffload.native import sha256
from tests.vllm import connector_probe as probe
from tests.vllm.engine import Engine, EnginePool, Json, make_prompt, make_room, start_engine
from tests.vllm.equality import answer, check_every_repeat, restorable, restored_answer
from tests.vllm.tiny_models import DENSE, SLIDING, TinyModel

pytestmark = pytest.mark.vllm

LENGTHS = (257, 640, 1281)


@contextmanager
def serving(engines: EnginePool, model: TinyModel, **arguments: object) -> Iterator[Engine]:
    """Starts an engine that has not served a request yet."""
    arguments = {**probe.TWO_STAGES, "kv_transfer_config": probe.transfer(), **arguments}
    engine = start_engine(model, engines.model_folder(model), has_own_processes=True, **arguments)
    try:
        probe.prepare(engine)
        assert all(engine.ask_workers(make_room))
        yield engine
    finally:
        engine.close()


def list_records(_worker: Any, entries: list[tuple[int, int]]) -> Json:
    """Digest and size of this rank's part of each record, as far as it has one."""
    held = probe.worker_side().records
    assert held is not None
    records = [probe.record(group, address) for group, address in entries if held.part.is_mine[group]]
    return [(sha256(record.data).hex(), len(record)) for record in records]


def break_jobs(worker: Any, rank: int) -> Json:
    """Makes every job of this rank fail before its copy begins."""
    if worker.rank == rank:

        def fail(*_: object) -> None:
            raise RuntimeError("broken for a test")

        probe.worker_side()._begin = fail  # type: ignore[method-assign]  # private: nothing else fails one rank alone
    return True


def mend_jobs(worker: Any) -> Json:
    vars(probe.worker_side()).pop("_begin", None)
    return True


def check_no_byte_is_stored_twice(engine: Engine) -> None:
    """Of what the server has stored every byte is of a record, and no record is there twice."""
    entries = [(entry.group, entry.address) for entry in probe.entries(engine)]
    records = [tuple(record) for of_rank in engine.ask_workers(list_records, entries) for record in of_rank]
    stored_bytes = probe.ask_core(engine, "inspect_scheduler")["stored_bytes"]
    distinct_bytes = sum(size for _, size in set(records))
    assert len(records) >= len(entries) > 0
    assert stored_bytes / distinct_bytes == 1.0


def check_what_one_stage_lacks_is_a_miss(engine: Engine, model: TinyModel) -> None:
    """Whichever it is: the others' records of the block are not asked for."""
    for stage in range(2):
        prompt, length = make_prompt(950 + stage, 641), restorable(model, 641)
        before = set(probe.entries(engine))
        local = answer(engine, prompt)
        engine.drain()
        added = [entry for entry in probe.entries(engine) if entry not in before and entry.group == stage]
        assert len(added) == length // model.block_size
        probe.ask_core(engine, "invalidate_entry", stage, added[-1].name)
        restored = restored_answer(engine, prompt)
        assert restored.cached == length - model.block_size
        assert restored.tokens == local.tokens
        probe.ask_core(engine, "invalidate_entry", stage, added[0].name)
        assert restored_answer(engine, prompt).cached == 0
        # It was saved again as a whole.
        assert restored_answer(engine, prompt).cached == length


def check_a_fault_of_one_stage_is_a_miss_of_all(engine: Engine, model: TinyModel) -> None:
    prompt, length = make_prompt(960, 641), restorable(model, 641)
    before = set(probe.entries(engine))
    engine.ask_workers(break_jobs, 1)
    computed = answer(engine, prompt)
    engine.drain()
    assert set(probe.entries(engine)) == before, "nothing is half published"
    assert restored_answer(engine, prompt) == computed
    engine.ask_workers(mend_jobs)
    assert restored_answer(engine, prompt) == computed
    own_hit = answer(engine, prompt)
    restored = restored_answer(engine, prompt)
    assert (own_hit.cached, restored.cached, restored) == (length, length, own_hit)
    engine.ask_workers(break_jobs, 1)
    assert restored_answer(engine, prompt) == computed
    engine.drain()
    assert {entry.name for entry in probe.entries(engine)} == {entry.name for entry in before}
    engine.ask_workers(mend_jobs)


def check_pipeline(engine: Engine, model: TinyModel) -> None:
    """Checks what it answers, and that nothing was hidden."""
    check_every_repeat(engine, model, LENGTHS)
    engine.drain()
    held = probe.ask_core(engine, "inspect_scheduler")
    assert held["planned_loads"] == 1 + sum(restorable(model, length) > 0 for length in LENGTHS)
    assert (held["faults"], held["doomed_loads"], held["pins"]) == (0, 0, 0)
    assert probe.faults(engine) == {}


@pytest.mark.campaign
def test_every_repeat_is_restored_and_the_first_request_was_saved(engines: EnginePool) -> None:
    with serving(engines, DENSE) as engine:
        check_pipeline(engine, DENSE)


def test_stages_of_unequal_length_store_each_byte_once_and_a_block_as_a_whole(
    engines: EnginePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", "3,1")
    transfer = probe.transfer(verify="always", policy="recompute")
    with serving(engines, DENSE, kv_transfer_config=transfer) as engine:
        sizes = engine.ask_workers(probe.record_bytes)
        assert sizes[0][0] == 3 * sizes[1][0]
        check_pipeline(engine, DENSE)
        check_no_byte_is_stored_twice(engine)
        check_what_one_stage_lacks_is_a_miss(engine, DENSE)
        check_a_fault_of_one_stage_is_a_miss_of_all(engine, DENSE)


@pytest.mark.campaign
@pytest.mark.parametrize(
    ("model", "arguments"),
    [(SLIDING, {}), (DENSE, {"tensor_parallel_size": 2}), (DENSE, {"pipeline_parallel_size": 3})],
    ids=["sliding", "dense-two-ranks-a-stage", "dense-three-stages"],
)
def test_every_kind_of_pipeline_restores(engines: EnginePool, model: TinyModel, arguments: dict[str, object]) -> None:
    with serving(engines, model, **arguments) as engine:
        check_pipeline(engine, model)
