"""Our events in the form that llm-d's router decodes, and what it believes by them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgpack
import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

import zmq

from tests.kit.routers.dynamo_indexer import SALT_PREFIX
from tests.kit.routers.event_traffic import SMALL, EventTraffic, tell
from tests.kit.routers.llm_d import AllCleared, Index, Message, Refused, Removed, Stored, read_message
from tests.kit.routers.publisher import TOPIC, publishing
from tests.kit.server.tiers import await_that, serving
from tests.kit.web.vllm_blocks import BLOCK

STORED: dict[str, Any] = {
    "type": "BlockStored",
    "block_hashes": [2**63 + 5],
    "parent_block_hash": None,
    "token_ids": [1, 2],
    "block_size": 2,
}
REMOVED: dict[str, Any] = {"type": "BlockRemoved", "block_hashes": [b"\1" * 32], "medium": "CPU"}


def send(*events: object, rank: object = 0, topic: str = TOPIC) -> Message:
    return read_message([topic.encode(), bytes(8), msgpack.packb([1.5, list(events), rank])])


@pytest.mark.parametrize("seed", range(2))
def test_every_message_passes_and_its_index_has_what_the_server_hits(tmp_path: Path, seed: int) -> None:
    traffic, index, numbers = EventTraffic(tmp_path / "s", seed), Index(BLOCK), []
    with serving(tmp_path / "s", SMALL) as server, publishing(tmp_path) as publisher, zmq.Context() as context:
        await_that(lambda: server.has_memory)
        with traffic.joined(), context.socket(zmq.SUB) as heard:
            heard.linger = 0
            heard.setsockopt(zmq.SUBSCRIBE, b"kv@")
            heard.connect(publisher.endpoint)
            publisher.publish([])
            await_that(lambda: publisher.publish([]) or bool(heard.poll(10)))
            said: list[tuple[int, int]] = []

            def listen() -> None:
                while heard.poll(5):
                    message = read_message(heard.recv_multipart())
                    assert (message.pod, message.model) == tuple(TOPIC.split("@")[1:])
                    numbers.append(message.number)
                    index.take(message.events)

            def agree() -> bool:
                tell(traffic, publisher)
                listen()
                said[:] = [
                    (
                        index.count_tokens(one.tokens, extra=one.salt and SALT_PREFIX + one.salt, adapter=one.adapter),
                        traffic.count_hits(one),
                    )
                    for one in traffic.prompts
                ]
                return all(believed == there for believed, there in said)

            for _ in range(3):
                for _ in range(100):
                    traffic.turn()
                    tell(traffic, publisher)
                await_that(agree)
            assert traffic.client.stats().evicted > 0
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    assert {0} < {there for _, there in said}


def test_maps_and_arrays_are_read_and_what_is_not_known_is_passed_over() -> None:
    array = ["BlockStored", [7], 6, [1, 2], 2, None, "CPU", "poet", [["poet"]], 3, "sliding_window", 64, "LOCAL"]
    wanted = Stored([7], [1, 2], 2, 6, "CPU", "poet", [["poet"]], 3, "sliding_window", 64)
    names = "type block_hashes parent_block_hash token_ids block_size lora_id medium lora_name extra_keys group_idx"
    names += " kv_cache_spec_kind kv_cache_spec_sliding_window locality"
    assert send(array, dict(zip(names.split(), array, strict=True))).events == [wanted, wanted]
    assert send(STORED, REMOVED, {"type": "AllBlocksCleared"}, ["AllBlocksCleared"]).events == [
        Stored([2**63 + 5], [1, 2], 2),
        Removed([int.from_bytes(b"\1" * 8, "big")], "CPU"),
        AllCleared(),
        AllCleared(),
    ]
    assert send({"type": "BlockMoved", "block_hashes": 5}, ["BlockMoved"]).events == []
    assert send(STORED, topic="other").pod == "other"


@pytest.mark.parametrize(
    "event",
    [
        5,
        [],
        [5],
        {"block_hashes": []},
        {"type": 5},
        {**STORED, "block_hashes": None},
        {**STORED, "block_hashes": 5},
        {**STORED, "block_hashes": ["text"]},
        {**STORED, "block_hashes": [b""]},
        {**STORED, "block_hashes": [True]},
        {**STORED, "token_ids": [2**32]},
        {**STORED, "token_ids": [-1]},
        {**STORED, "token_ids": None},
        {**STORED, "block_size": "2"},
        {**STORED, "parent_block_hash": "text"},
        {**STORED, "medium": 5},
        {**STORED, "lora_id": "5"},
        {**STORED, "lora_name": 5},
        {**STORED, "extra_keys": ["text"]},
        {**STORED, "group_idx": -1},
        {**STORED, "kv_cache_spec_kind": 5},
        {**STORED, "kv_cache_spec_sliding_window": "5"},
        {name: value for name, value in STORED.items() if name != "token_ids"},
        {**REMOVED, "medium": 5},
        {**REMOVED, "group_idx": -1},
        {"type": "BlockRemoved"},
        ["BlockStored", [7], None, [1]],
        ["BlockRemoved"],
    ],
)
def test_what_is_refused_there_is_refused(event: object) -> None:
    with pytest.raises(Refused):
        send(STORED, event)


@pytest.mark.parametrize("frames", [[], [b"kv@one@m", bytes(7), b""], [b"kv@one@m", bytes(8), msgpack.packb([1.0])]])
def test_a_message_that_is_none_is_refused(frames: list[bytes]) -> None:
    with pytest.raises(Refused):
        read_message(frames)
    with pytest.raises(Refused):
        send(STORED, rank=-1)
