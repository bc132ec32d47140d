"""One engine computes prompts, another decodes from what the first has saved: vLLM's producer and consumer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.vllm import connector_probe as probe
from tests.vllm.cache_server import SharedServer
from tests.vllm.disk_servers import stats_of
from tests.vllm.engine import Engine, EnginePool, Json, make_prompt, make_sampling, start_engine
from tests.vllm.equality import Answer, answer, read_answer, restorable
from tests.vllm.tiny_models import DENSE, GDN, SLIDING, TinyModel

if TYPE_CHECKING:
    from vllm import RequestOutput

pytestmark = pytest.mark.vllm

LENGTHS = (1300, 1280)
"""One ends within a block, the other with one."""
STEPS_WITHOUT = 50
CHUNKS = {"max_num_batched_tokens": 700}


@contextmanager
def serving(folder: Path) -> Iterator[SharedServer]:
    with SharedServer(folder) as server:
        server.start()
        yield server


@contextmanager
def engine_of(
    engines: EnginePool, role: str, server: SharedServer, model: TinyModel, **arguments: object
) -> Iterator[Engine]:
    """Starts an engine with this role. It waits for what it expects as long as a setting may say."""
    transfer = probe.transfer(role=role, server=str(server.socket), arrival_deadline="60s", promote_deadline="30s")
    engine = start_engine(model, engines.model_folder(model), kv_transfer_config=transfer, **CHUNKS, **arguments)  # type: ignore[arg-type]
    try:
        probe.prepare(engine)
        yield engine
        probe.drain(engine)
    finally:
        engine.close()


class Waiting:
    """A request at an engine in this process, which somebody else's save has to come for."""

    def __init__(self, engine: Engine, prompt: list[int], **wishes: Json) -> None:
        self._engine = engine.llm.llm_engine
        sampling = make_sampling(max_tokens=8, logprobs=3, **wishes)
        self._engine.add_request("waiting", {"prompt_token_ids": prompt}, sampling)

    def step(self) -> RequestOutput | None:
        """Lets the engine take one step; what it has answered, once that is complete."""
        return next((one for one in self._engine.step() if one.finished), None)  # type: ignore[misc]

    def wait(self) -> Answer:
        """The engine does not wait for ever."""
        while (output := self.step()) is None:
            pass
        return read_answer(output)


@pytest.mark.parametrize("model", [DENSE, SLIDING, GDN], ids=lambda model: model.name)
def test_a_decoder_waits_for_what_a_prefill_engine_computes(
    engines: EnginePool, tmp_path: Path, model: TinyModel
) -> None:
    engines.leave_process()
    with (
        serving(tmp_path) as server,
        engine_of(engines, "kv_producer", server, model, has_own_processes=True, **probe.INSPECTED) as producer,
        engine_of(engines, "kv_consumer", server, model) as consumer,
    ):
        for length in LENGTHS:
            prompt, expected = make_prompt(length, length), restorable(model, length)
            waiting = Waiting(consumer, prompt, expect_tokens=length)
            assert [waiting.step() for _ in range(STEPS_WITHOUT)] == [None] * STEPS_WITHOUT
            assert producer.generate(prompt, max_tokens=1).num_cached_tokens == 0
            restored = waiting.wait()
            assert restored.cached == expected, "nothing but the rest is computed"
            local = answer(consumer, prompt)
            assert local.cached == expected
            assert restored == local
        # What the first answer tells is what a proxy passes on; what is there already is not waited for.
        told = producer.generate(prompt, max_tokens=1).kv_transfer_params
        assert told == {"expect_tokens": length}
        before = stats_of(consumer).readable
        consumer.reset_local()
        assert read_answer(consumer.generate(prompt, logprobs=3, **told)) == restored
        assert stats_of(consumer).readable == before, "who only decodes saves nothing"
        assert probe.faults(consumer) == {}
        producer.reset_local()
        assert producer.generate(prompt, max_tokens=1).num_cached_tokens == expected, "a prefill engine has hits, too"
