"""Engines of which one computes prompts and another decodes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from tests.vllm import connector_probe as probe
from tests.vllm.cache_server import SharedServer
from tests.vllm.engine import Engine, EnginePool, Json, make_sampling, start_engine
from tests.vllm.equality import Answer, read_answer
from tests.vllm.tiny_models import TinyModel

if TYPE_CHECKING:
    from vllm import RequestOutput

CHUNKS = {"max_num_batched_tokens": 700}
STEPS_WITHOUT = 50


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
    """A request at an engine in this process, which waits for the save of another engine."""

    def __init__(self, engine: Engine, prompt: list[int], **wishes: Json) -> None:
        self._engine = engine.llm.llm_engine
        sampling = make_sampling(max_tokens=8, logprobs=3, **wishes)
        self._engine.add_request("waiting", {"prompt_token_ids": prompt}, sampling)

    def step(self) -> RequestOutput | None:
        """Lets the engine take one step; what it has answered, once that is complete."""
        return next((one for one in self._engine.step() if one.finished), None)  # type: ignore[misc]

    def stay(self) -> None:
        """Lets the engine take some steps, and checks that none of them answers."""
        assert [self.step() for _ in range(STEPS_WITHOUT)] == [None] * STEPS_WITHOUT

    def wait(self) -> Answer:
        """The engine does not wait for ever."""
        while (output := self.step()) is None:
            pass
        return read_answer(output)
