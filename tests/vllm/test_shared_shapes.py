"""Engines of one model and of different tensor-parallel sizes read each other's blocks, with `shared_shapes`.

What one engine computed is not, to the last bit, what another size computes: the sums of later layers are made in
another order. So an engine that restores has the saved bytes, cut for its ranks, and answers as an engine does in whose
pages these bytes were put by hand.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from kvoffload.errors import UnsupportedError
from tests.vllm import connector_probe as probe
from tests.vllm.cache_server import SharedServer
from tests.vllm.engine import Engine, EnginePool, Json, make_prompt, start_engine
from tests.vllm.equality import answer
from tests.vllm.tiny_models import DENSE, GDN, SLIDING, TinyModel, build_dense

pytestmark = pytest.mark.vllm

LENGTH = 641
RESTORABLE = 640
BLOCKS = RESTORABLE // 128
OWN = "own"
"""A salt: such a request computes the same bytes, and finds nothing of what others saved."""
PAGE_BYTES = DENSE.groups[0].page_bytes
MOST_DISTANCE = 0.05
"""Most distance between keys and values that engines of two sizes compute for one prompt."""

ONE_HEAD = replace(
    DENSE,
    name="one head",
    build=partial(build_dense, kv_heads=1),
    groups=(replace(DENSE.groups[0], page_bytes=PAGE_BYTES // 2, padded_page_bytes=PAGE_BYTES // 2),),
)
"""Both of two ranks hold its only KV head."""

Pages = npt.NDArray[np.uint16]
"""By layer, block, head, token and content: bfloat16 as it lies in memory."""


# ---- engines ----


@contextmanager
def serving(
    engines: EnginePool, server: SharedServer, model: TinyModel, ranks: int, **settings: object
) -> Iterator[Engine]:
    """A new engine on the server, with processes of its own where it has several ranks."""
    engines.leave_process()
    arguments: dict[str, Any] = {"tensor_parallel_size": ranks, "max_num_batched_tokens": 700}
    if ranks > 1:
        arguments |= probe.INSPECTED
    extra = {"server": str(server.socket), "shared_shapes": True, "verify": "always", **probe.PATIENCE, **settings}
    transfer = {"kv_connector": "KVOffloadConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
    engine = start_engine(
        model, engines.model_folder(model), has_own_processes=ranks > 1, kv_transfer_config=transfer, **arguments
    )
    try:
        probe.prepare(engine)
        engine.ask_workers(note_blocks)
        yield engine
        engine.drain()
    finally:
        engine.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedServer]:
    with SharedServer(tmp_path_factory.mktemp("shapes")) as server:
        server.start()
        yield server


# ---- pages, in the workers ----


def note_blocks(_worker: Any) -> Json:
    """From now on this rank notes which blocks its jobs name, in their order."""
    side: Any = probe.worker_side()
    begin = side._begin  # private: no face tells which blocks a job has
    side.noted_blocks = []

    def noting(job: Any, before_forward: Any) -> None:
        side.noted_blocks += job.moves.blocks.tolist()
        begin(job, before_forward)

    side._begin = noting  # private: as above
    return True


def noted_blocks(_worker: Any) -> Json:
    side: Any = probe.worker_side()
    blocks, side.noted_blocks = side.noted_blocks, []
    return list(blocks)


def layer_tensors(worker: Any) -> list[torch.Tensor]:
    """As the engine has them: (block, head, token, content)."""
    layers = worker.vllm_config.compilation_config.static_forward_context
    names = sorted((name for name in layers if name.endswith("attn")), key=lambda name: int(name.split(".")[2]))
    return [layers[name].kv_cache for name in names]


def read_pages(worker: Any, blocks: list[int]) -> Json:
    pages = torch.stack([tensor[blocks] for tensor in layer_tensors(worker)]).contiguous()
    return [list(pages.shape), base64.b64encode(pages.view(torch.uint8).numpy().tobytes()).decode()]


def write_pages(worker: Any, blocks: list[int], shape: list[int], data: str) -> Json:
    """`data`: of all ranks; this one takes its heads."""
    numbers = torch.frombuffer(bytearray(base64.b64decode(data)), dtype=torch.bfloat16).view(shape)
    for tensor, pages in zip(layer_tensors(worker), numbers, strict=True):
        heads = tensor.shape[1]
        first = worker.rank * heads
        tensor[blocks] = pages[:, first : first + heads]
    return True


def pages_of(engine: Engine, blocks: list[int]) -> Pages:
    """Of all ranks, side by side."""
    ranks = [
        np.frombuffer(base64.b64decode(data), np.uint16).reshape(shape)
        for shape, data in engine.ask_workers(read_pages, blocks)
    ]
    return np.concatenate(ranks, axis=2)


def taken_blocks(engine: Engine) -> list[int]:
    """Which blocks the jobs since the last call have named, on every rank the same."""
    first, *others = engine.ask_workers(noted_blocks)
    assert all(other == first for other in others)
    return list(first)


def overwrite(engine: Engine, blocks: list[int], pages: Pages) -> None:
    data = base64.b64encode(np.ascontiguousarray(pages).tobytes()).decode()
    engine.ask_workers(write_pages, blocks, list(pages.shape), data)


def distance(one: Pages, other: Pages) -> float:
    """Relative, in the second norm."""
    mine, theirs = ((pages.astype(np.uint32) << 16).view(np.float32).astype(np.float64) for pages in (one, other))
    return float(np.linalg.norm(mine - theirs) / np.linalg.norm(theirs))


def save(engine: Engine, prompt: list[int]) -> Pages:
    """Returns what the engine computed, as it lies in its pages."""
    taken_blocks(engine)
    assert answer(engine, prompt).cached == 0
    probe.drain(engine)
    return pages_of(engine, taken_blocks(engine)[:BLOCKS])


def check_numbers(computed: Pages, saved: Pages) -> None:
    """Compares pages of engines of two sizes: the first layer is equal to the bit, and is of no other head than this
    one."""
    swapped = computed[:, :, ::-1]
    assert np.array_equal(computed[0], saved[0])
    assert not np.array_equal(swapped[0], saved[0])
    assert distance(swapped[0], saved[0]) > 1
    for layer in range(1, len(saved)):
        assert 0 < distance(computed[layer], saved[layer]) < MOST_DISTANCE
        assert distance(swapped[layer], saved[layer]) > 1


def check_restores(engine: Engine, prompt: list[int], saved: Pages) -> None:
    """The saved bytes, cut for this engine's ranks, and what it answers with them in its own pages."""
    taken_blocks(engine)
    restored = answer(engine, prompt)
    assert restored.cached == RESTORABLE
    assert np.array_equal(pages_of(engine, taken_blocks(engine)[:BLOCKS]), saved)
    assert answer(engine, prompt, salt=OWN).cached == 0
    blocks = taken_blocks(engine)[:BLOCKS]
    computed, own = pages_of(engine, blocks), answer(engine, prompt, salt=OWN)
    assert own.cached == RESTORABLE
    check_numbers(computed, saved)
    overwrite(engine, blocks, saved)
    assert answer(engine, prompt, salt=OWN) == restored != own
    assert probe.faults(engine) == {}


# ---- one saves, another restores ----


def test_what_an_engine_saved_engines_of_other_sizes_restore(engines: EnginePool, server: SharedServer) -> None:
    first, second = (make_prompt(seed=seed, length=LENGTH) for seed in (1001, 1002))
    with serving(engines, server, DENSE, 1) as engine:
        saved = save(engine, first)
    with serving(engines, server, DENSE, 2) as engine:
        check_restores(engine, first, saved)
        saved = save(engine, second)
    with serving(engines, server, DENSE, 1) as engine:
        check_restores(engine, second, saved)
    with serving(engines, server, DENSE, 1, shared_shapes=False) as engine:
        assert [answer(engine, prompt).cached for prompt in (first, second)] == [0, 0]


@pytest.mark.campaign
@pytest.mark.parametrize("model", [SLIDING, ONE_HEAD], ids=lambda model: model.name)
def test_windows_and_heads_that_ranks_have_in_common_are_restored(
    engines: EnginePool, server: SharedServer, model: TinyModel
) -> None:
    """One rank finds the blocks that two ranks saved: every block that it loads holds the bytes of its record."""
    prompt = make_prompt(seed=1003, length=LENGTH)
    with serving(engines, server, model, 2) as engine:
        assert answer(engine, prompt).cached == 0
    with serving(engines, server, model, 1) as engine, probe.watch_load_jobs(engine) as jobs:
        assert answer(engine, prompt).cached == RESTORABLE
        (job,) = jobs
        moves = zip(job.moves.groups.tolist(), job.moves.blocks.tolist(), job.moves.addresses.tolist(), strict=True)
        for group, block, address in moves:
            record = engine.ask_workers(probe.record_digests, [(group, address)])
            assert engine.ask_workers(probe.block_digests, group, [block]) == record
        assert set(job.moves.groups.tolist()) == set(range(len(model.groups)))
        assert probe.faults(engine) == {}


def test_a_model_that_cannot_be_cut_does_not_start(engines: EnginePool, server: SharedServer) -> None:
    from vllm.distributed.kv_transfer.kv_transfer_state import ensure_kv_transfer_shutdown

    with (
        pytest.raises(UnsupportedError, match=r"layer model\.layers\.0\.linear_attn keeps a recurrent state"),
        serving(engines, server, GDN, 1),
    ):
        pass
    # In a process that goes on, vLLM would give the next engine this one's connector.
    ensure_kv_transfer_shutdown()
