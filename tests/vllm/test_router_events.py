"""A router that listens to a real engine hears what the cache server has: stored, removed, by medium, and once more."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import zmq

from tests.vllm import connector_probe as probe
from tests.vllm import pool_probe
from tests.vllm.engine import Engine, EnginePool, make_prompt, start_engine
from tests.vllm.equality import restorable
from tests.vllm.tiny_models import DENSE

if TYPE_CHECKING:
    from vllm.distributed.kv_events import KVEventBatch

pytestmark = pytest.mark.vllm

TOKENS = 1400
WAIT_S = 60.0
TOPIC = "kv@one"


class Router:
    """A router that reads events by vLLM's own decoder, and knows the server's memory from them."""

    def __init__(self, folder: Path) -> None:
        from vllm.distributed.kv_events import KVEventBatch

        self.endpoints = {name: f"ipc://{folder / name}" for name in ("endpoint", "replay_endpoint")}
        self._decode: Callable[[bytes], KVEventBatch] = msgspec.msgpack.Decoder(KVEventBatch).decode
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._heard = self._context.socket(zmq.SUB)
        self._heard.setsockopt_string(zmq.SUBSCRIBE, TOPIC)
        self._heard.connect(self.endpoints["endpoint"])
        self.batches: dict[int, KVEventBatch] = {}

    def listen(self, engine: Engine, is_enough: Callable[[], bool]) -> None:
        """The engine tells after its steps."""
        end = time.monotonic() + WAIT_S
        while not is_enough():
            assert time.monotonic() < end, self.batches
            engine.generate(make_prompt(seed=int(time.monotonic() * 1e6), length=4), max_tokens=2)
            engine.drain()
            while self._heard.poll(20):
                topic, number, payload = self._heard.recv_multipart()
                assert topic == TOPIC.encode()
                self.batches[int.from_bytes(number, "big")] = self._decode(payload)

    def ask_again(self, first: int) -> dict[int, KVEventBatch]:
        """Asks again for what was told from that number on."""
        told: dict[int, Any] = {}
        with self._context.socket(zmq.DEALER) as asking:
            asking.linger = 0
            asking.connect(self.endpoints["replay_endpoint"])
            asking.send_multipart([b"", first.to_bytes(8, "big")])
            while asking.poll(int(WAIT_S * 1000)):
                _, _, number, payload = asking.recv_multipart()
                if int.from_bytes(number, "big", signed=True) < 0:
                    return told
                told[int.from_bytes(number, "big")] = self._decode(payload)
        raise AssertionError(f"the end of what was told does not come: {sorted(told)}")

    def blocks(self, medium: str) -> dict[Any, Any]:
        """Returns the hash before each block that is there, by its own hash."""
        from vllm.distributed.kv_events import BlockRemoved, BlockStored

        there: dict[Any, Any] = {}
        for number in sorted(self.batches):
            for event in self.batches[number].events:
                if isinstance(event, BlockStored) and event.medium == medium:
                    before = event.parent_block_hash
                    for block in event.block_hashes:
                        there[block], before = before, block
                elif isinstance(event, BlockRemoved) and event.medium == medium:
                    for block in event.block_hashes:
                        there.pop(block, None)
        return there

    def tokens(self, medium: str) -> dict[Any, list[int]]:
        """Returns the tokens, by hash, of all blocks that were stored there."""
        from vllm.distributed.kv_events import BlockStored

        stored = [event for batch in self.batches.values() for event in batch.events if isinstance(event, BlockStored)]
        return {
            block: event.token_ids[at * event.block_size : (at + 1) * event.block_size]
            for event in stored
            if event.medium == medium
            for at, block in enumerate(event.block_hashes)
        }

    def close(self) -> None:
        self._heard.close(0)
        self._context.term()


@contextmanager
def listening(engines: EnginePool, folder: Path) -> Iterator[tuple[Engine, Router]]:
    from vllm.config import KVEventsConfig

    router = Router(folder)
    events = KVEventsConfig(enable_kv_cache_events=True, publisher="zmq", topic=TOPIC)
    events.endpoint, events.replay_endpoint = router.endpoints["endpoint"], router.endpoints["replay_endpoint"]
    engines.leave_process()
    folder_of_model = engines.model_folder(DENSE)
    engine = start_engine(DENSE, folder_of_model, kv_transfer_config=probe.transfer(), kv_events_config=events)
    probe.prepare(engine)
    try:
        yield engine, router
    finally:
        engine.close()
        router.close()


def test_a_router_knows_what_the_server_has(engines: EnginePool, tmp_path: Path) -> None:
    from vllm.distributed.kv_events import MEDIUM_CPU, MEDIUM_GPU

    with listening(engines, tmp_path) as (engine, router):
        block_size = engine.llm.llm_engine.vllm_config.cache_config.block_size
        wanted = restorable(DENSE, TOKENS) // block_size
        prompt = make_prompt(seed=71, length=TOKENS)
        engine.generate(prompt)
        engine.drain()
        router.listen(engine, lambda: len(router.blocks(MEDIUM_CPU)) >= wanted)
        there, own = router.blocks(MEDIUM_CPU), router.blocks(MEDIUM_GPU)
        assert there.items() <= own.items(), "under the engine's own hashes, and in its order"
        tokens = router.tokens(MEDIUM_GPU)
        assert router.tokens(MEDIUM_CPU) == {block: tokens[block] for block in there}
        side: Any = probe.scheduler_connector(engine).scheduler_side
        gone = pool_probe.follow(side).entries()[:2]
        # Blocks that the engine drops stay on the server; blocks that the server drops are told.
        engine.reset_local()
        assert engine.generate(prompt).num_cached_tokens == restorable(DENSE, TOKENS)
        for entry in gone:
            side.parts.cache.invalidate(entry.group, bytes.fromhex(entry.name))
        router.listen(engine, lambda: len(there.keys() - router.blocks(MEDIUM_CPU).keys()) == len(gone))
        # A router that comes later, or has missed something, asks again.
        told = router.ask_again(0)
        assert told.keys() >= router.batches.keys()
        assert all(told[number] == batch for number, batch in router.batches.items())
        last = max(router.batches)
        assert min(router.ask_again(last)) == last
        engine.drain()
        assert probe.faults(engine) == {}
