"""Dynamo's own indexer, fed by our events: what it believes to be there is what the server would hit."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from random import Random

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from kvoffload.connector.engine import events as cache_events
from tests.kit.routers.dynamo_indexer import IS_THERE, MISSING, DynamoIndexer, dynamo_indexer
from tests.kit.routers.event_traffic import SMALL, EventTraffic, tell
from tests.kit.routers.publisher import Publisher, publishing
from tests.kit.server.tiers import await_that, serving
from tests.kit.web.vllm_blocks import BLOCK

pytestmark = pytest.mark.skipif(not IS_THERE, reason=MISSING)


def await_agreement(traffic: EventTraffic, publisher: Publisher, indexer: DynamoIndexer) -> list[int]:
    """The server tells of what is gone a little later. Returns what the server says of each prompt."""
    said: list[tuple[int, int]] = []

    def agree() -> bool:
        tell(traffic, publisher)
        said[:] = [
            (indexer.count_tokens(one.tokens, salt=one.salt, adapter=one.adapter), traffic.count_hits(one))
            for one in traffic.prompts
        ]
        return all(believed == there for believed, there in said)

    await_that(agree)
    return [there for _, there in said]


@pytest.mark.parametrize("seed", range(2))
def test_its_overlap_is_what_the_server_hits(tmp_path: Path, seed: int) -> None:
    """Blocks are saved, used, evicted and saved again; messages are lost on the way, and the indexer is restarted."""
    chance = Random(seed)
    traffic = EventTraffic(tmp_path / "s", seed)
    with (
        serving(tmp_path / "s", SMALL) as server,
        publishing(tmp_path, is_lost=lambda: chance.random() < 0.2) as publisher,
        ExitStack() as indexers,
    ):
        await_that(lambda: server.has_memory)
        with traffic.joined():
            for part in range(3):
                if part != 1:
                    # Another one knows nothing, and asks for what was told before.
                    indexers.close()
                    indexer = indexers.enter_context(dynamo_indexer())
                    indexer.register(publisher.lossy_endpoint, publisher.replay_endpoint, block_size=BLOCK)
                for _ in range(150):
                    traffic.turn()
                    tell(traffic, publisher)
                hits = await_agreement(traffic, publisher, indexer)
            assert traffic.client.stats().evicted > 0
    whole = [len(prompt) * BLOCK for prompt in traffic.prompts]
    assert any(hit == 0 for hit in hits)
    assert any(0 < hit < length for hit, length in zip(hits, whole, strict=True))
    assert any(hit == length for hit, length in zip(hits, whole, strict=True))


def test_a_server_that_comes_later_is_believed_to_have_what_it_has(tmp_path: Path) -> None:
    """It may have adopted what the one before had, or have nothing."""
    traffic = EventTraffic(tmp_path / "s", 3)
    with publishing(tmp_path) as publisher, dynamo_indexer() as indexer, ExitStack() as servers:
        server = servers.enter_context(serving(tmp_path / "s", SMALL))
        await_that(lambda: server.has_memory)
        with traffic.joined():
            indexer.register(publisher.endpoint, publisher.replay_endpoint, block_size=BLOCK)
            for _ in range(2):
                for _ in range(60):
                    traffic.turn()
                    tell(traffic, publisher)
                assert any(await_agreement(traffic, publisher, indexer))
                servers.close()
                later = servers.enter_context(serving(tmp_path / "s", SMALL))
                await_that(lambda later=later: later.has_memory and traffic.client.wait_until_served(0))
                await_agreement(traffic, publisher, indexer)


def test_what_is_lost_before_it_is_told_is_told_after_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More happens than the engine has room for."""
    monkeypatch.setattr(cache_events, "MAX_EVENTS", 8)
    traffic = EventTraffic(tmp_path / "s", 4)
    with (
        serving(tmp_path / "s", SMALL) as server,
        publishing(tmp_path) as publisher,
        dynamo_indexer() as indexer,
    ):
        await_that(lambda: server.has_memory)
        with traffic.joined():
            indexer.register(publisher.endpoint, publisher.replay_endpoint, block_size=BLOCK)
            for _ in range(3):
                for _ in range(60):
                    # Events made meanwhile are not taken.
                    traffic.turn()
                assert any(await_agreement(traffic, publisher, indexer))
