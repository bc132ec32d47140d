"""Our events through vLLM's own publisher, as a subscriber of vLLM's decodes them: nothing is lost or changed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

import msgspec
import zmq
from vllm.distributed.kv_events import MEDIUM_CPU, BlockRemoved, BlockStored, KVEventBatch

from tests.kit.routers.dynamo_indexer import SALT_PREFIX
from tests.kit.routers.event_traffic import SMALL, EventTraffic, tell
from tests.kit.routers.publisher import TOPIC, Publisher, publishing
from tests.kit.server.tiers import await_that, serving
from tests.kit.web.vllm_blocks import BLOCK

WAIT_MS = 30_000


class Subscriber:
    """Hears batches in their order, and asks again for what it has missed."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], publisher: Publisher) -> None:
        self._decode: Any = msgspec.msgpack.Decoder(KVEventBatch).decode
        self._heard, self._asking = context.socket(zmq.SUB), context.socket(zmq.DEALER)
        self._heard.setsockopt(zmq.SUBSCRIBE, TOPIC.encode())
        self._heard.connect(publisher.lossy_endpoint)
        self._asking.connect(publisher.replay_endpoint)
        self.batches: list[KVEventBatch] = []
        self.missed = 0

    def hear(self) -> None:
        while self._heard.poll(20):
            topic, number, payload = self._heard.recv_multipart()
            assert topic == TOPIC.encode()
            found = int.from_bytes(number, "big")
            if found > len(self.batches):
                self.missed += found - len(self.batches)
                told = self.ask_again(len(self.batches))
                self.batches += [told[at] for at in range(len(self.batches), found)]
            if found == len(self.batches):
                self.batches.append(self._decode(payload))

    def ask_again(self, first: int) -> dict[int, KVEventBatch]:
        """Asks for the batches that are still kept, from that number on."""
        told: dict[int, KVEventBatch] = {}
        self._asking.send_multipart([b"", first.to_bytes(8, "big")])
        while self._asking.poll(WAIT_MS):
            empty, topic, number, payload = self._asking.recv_multipart()
            if not payload:
                return told
            assert (empty, topic) == (b"", TOPIC.encode())
            told[int.from_bytes(number, "big")] = self._decode(payload)
        raise AssertionError(f"the end does not come after {sorted(told)}")


@contextmanager
def subscribing(publisher: Publisher) -> Iterator[Subscriber]:
    with zmq.Context() as context:
        try:
            yield Subscriber(context, publisher)
        finally:
            context.destroy(linger=0)


def test_a_subscriber_that_loses_messages_has_all_fields_of_all_events(tmp_path: Path) -> None:
    chance, traffic = Random(5), EventTraffic(tmp_path / "s", 5)
    with (
        serving(tmp_path / "s", SMALL) as server,
        publishing(tmp_path, is_lost=lambda: chance.random() < 0.3) as publisher,
        subscribing(publisher) as subscriber,
    ):
        await_that(lambda: server.has_memory)
        with traffic.joined():
            for _ in range(200):
                traffic.turn()
                tell(traffic, publisher)
                subscriber.hear()

            def has_all() -> bool:
                count = len(publisher.told)
                tell(traffic, publisher)
                subscriber.hear()
                return len(subscriber.batches) >= count

            await_that(has_all)
    assert subscriber.missed > 0
    assert subscriber.batches == publisher.told[: len(subscriber.batches)]
    assert {batch.data_parallel_rank for batch in subscriber.batches} == {0}
    events = [event for batch in subscriber.batches for event in batch.events]
    stored = [event for event in events if isinstance(event, BlockStored)]
    removed = [event for event in events if isinstance(event, BlockRemoved)]
    assert {event.medium for event in events} == {MEDIUM_CPU}
    assert {event.group_idx for event in events} == {0}
    assert {event.locality for event in events} == {"LOCAL"}
    assert {event.kv_cache_spec_kind for event in stored} == {"full_attention"}
    assert {event.lora_name for event in stored} == {None, "poet"}
    assert {event.lora_id for event in stored} == {None, 3}
    assert all(
        len(event.token_ids) == len(event.block_hashes) * BLOCK == len(event.block_hashes) * event.block_size
        for event in stored
    )
    keys = {key for event in stored for one in event.extra_keys or [] for key in one or ()}
    assert keys == {"poet", SALT_PREFIX + "own"}
    # A block is told after its parent, and every removed block was told before.
    known: set[Any] = set()
    for event in stored:
        assert event.parent_block_hash is None or event.parent_block_hash in known
        known |= set(event.block_hashes)
    assert known & {block for event in removed for block in event.block_hashes}


def test_what_is_asked_for_too_late_is_known_by_its_number(tmp_path: Path) -> None:
    """vLLM keeps so many messages, and has no way to say what was there before: the first number says that there was
    something. What tells it is an inventory, or `/v1/prefix`."""
    with publishing(tmp_path, kept=4) as publisher, subscribing(publisher) as subscriber:
        for at in range(10):
            publisher.publish([BlockRemoved(block_hashes=[at], medium=MEDIUM_CPU, group_idx=0)])
        await_that(lambda: max(subscriber.ask_again(0), default=0) == 9)
        told = subscriber.ask_again(0)
        assert sorted(told) == [6, 7, 8, 9]
        assert [told[at].events for at in sorted(told)] == [batch.events for batch in publisher.told[6:]]
        assert sorted(subscriber.ask_again(8)) == [8, 9]
        assert subscriber.ask_again(10) == {}
