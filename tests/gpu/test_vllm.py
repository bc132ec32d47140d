"""Real vLLM on a GPU, where its own CUDA build is installed: what one engine saved, another restores bit for bit."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import distributions
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from tests.vllm.engine import Engine, make_prompt, prepare_environment, start_engine
from tests.vllm.tiny_models import DENSE, GDN, MLA, SLIDING, TinyModel, build_mla

if TYPE_CHECKING:
    from tests.vllm.equality import Answer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU: torch finds no CUDA device"),
    pytest.mark.skipif(
        not any(found.name == "vllm" for found in distributions()), reason="vLLM's build for CUDA is not installed"
    ),
]

LENGTHS = (129, 700, 1281)
ARGUMENTS: Mapping[str, object] = {"dtype": "bfloat16"}
CHUNKED: Mapping[str, object] = {"max_num_batched_tokens": 320}


@dataclass(frozen=True)
class Family:
    model: TinyModel
    arguments: Mapping[str, object]


FAMILIES = {
    "dense": Family(DENSE, CHUNKED),
    "dense, fp8": Family(DENSE, {**CHUNKED, "kv_cache_dtype": "fp8", "attention_backend": "TRITON_ATTN"}),
    "sliding": Family(SLIDING, CHUNKED),
    "recurrent": Family(
        GDN,
        {
            "max_num_batched_tokens": 2048,
            "mamba_cache_mode": "align",
            "mamba_ssm_cache_dtype": "float32",
            "gdn_prefill_backend": "triton",  # FlashInfer's would be compiled first, where it is installed
        },
    ),
    # With head sizes that FlashAttention takes.
    "MLA": Family(
        replace(MLA, build=partial(build_mla, nope_size=128, value_size=128)), {"attention_backend": "TRITON_MLA"}
    ),
}


@pytest.fixture(scope="module", autouse=True)
def environment() -> None:
    """vLLM reads it when it is imported. Kernels that time their variants and choose would differ between engines."""
    prepare_environment(VLLM_PLUGINS="kvoffload", VLLM_USE_FLASHINFER_SAMPLER="0")
    with contextlib.suppress(ImportError):
        from triton.runtime.autotuner import Autotuner

        begin = Autotuner.__init__
        Autotuner.__init__ = lambda self, function, names, configs, *more, **named: begin(
            self, function, names, configs and configs[:1], *more, **named
        )


@contextlib.contextmanager
def running(family: Family, folder: Path, server: Path | None) -> Iterator[Engine]:
    from tests.vllm import connector_probe as probe

    transfer = {} if server is None else {"kv_transfer_config": probe.transfer(server=str(server))}
    model = replace(family.model, engine_args={})
    engine = start_engine(model, folder, **{**ARGUMENTS, **family.arguments, **transfer})
    try:
        probe.prepare(engine)
        yield engine
    finally:
        engine.close()


def cold_and_own(engine: Engine) -> dict[int, tuple[Answer, Answer]]:
    from tests.vllm.equality import answer

    return {n: (answer(engine, make_prompt(n, n)), answer(engine, make_prompt(n, n))) for n in LENGTHS}


def check_restored(engine: Engine, own: Mapping[int, Answer]) -> None:
    from tests.vllm import connector_probe as probe
    from tests.vllm.equality import restored_answer

    for length, expected in own.items():
        with probe.watch_loads(engine) as loads:
            assert restored_answer(engine, make_prompt(length, length)) == expected
        assert sum(loads) == expected.cached


@pytest.mark.parametrize("name", FAMILIES)
def test_restored_equals_the_engines_own_hit_in_the_same_engine_and_in_a_new_one(name: str, tmp_path: Path) -> None:
    from tests.vllm import connector_probe as probe
    from tests.vllm.cache_server import SharedServer
    from tests.vllm.equality import restored_answer

    family, folder = FAMILIES[name], tmp_path / "model"
    family.model.build(folder)
    with SharedServer(tmp_path) as server:
        server.start()
        with running(family, folder, server.socket) as engine:
            answers = cold_and_own(engine)
            own = {length: hit for length, (_, hit) in answers.items()}
            check_restored(engine, own)
            # Or what was compared would not depend on what was restored.
            last = LENGTHS[-1]
            entries = probe.entries(engine)
            for group in {entry.group for entry in entries}:
                with contextlib.ExitStack() as zeros:
                    for entry in entries:
                        if entry.group == group:
                            zeros.enter_context(probe.zeroed(engine, entry))
                    assert restored_answer(engine, make_prompt(last, last)) != own[last]
            assert probe.faults(engine) == {}
        with running(family, folder, server.socket) as engine:
            check_restored(engine, own)
            assert probe.faults(engine) == {}
    with running(family, folder, None) as engine:
        assert cold_and_own(engine) == answers
