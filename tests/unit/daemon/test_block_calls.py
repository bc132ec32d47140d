"""Answers that are made in more than one look, or that are too large."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvoffload.cache import Acquired as CacheAcquired
from kvoffload.cache import AcquireOutcome, CommitOutcome, LeasedGroup, LeaseId
from kvoffload.protocol import Acquire, AcquireEntries, Error, ErrorCode, Outcome, Publish
from kvoffload.protocol.limits import FRAME_BYTES
from tests.unit.cache.cache_model import make_chain
from tests.unit.daemon.harness import Client, Server, numbers
from tests.unit.daemon.test_block_desk import save_chain


def hit_of(blocks: int) -> CacheAcquired:
    group = LeasedGroup(0, np.zeros(blocks, np.uint64), np.ones(blocks, np.uint64))
    return CacheAcquired(AcquireOutcome.HIT, 16, LeaseId(5), (group,))


def test_an_answer_beyond_a_frame_releases_its_lease(
    server: Server, engine: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    released: list[int] = []
    monkeypatch.setattr(server.cache, "acquire", lambda *_, **__: hit_of(FRAME_BYTES // 16))
    monkeypatch.setattr(server.cache, "release", lambda _session, lease: released.append(lease))
    answer = engine.ask(Acquire(name_space=engine.name_space, chain=bytes(32), shards=(0,)))
    assert isinstance(answer, Error)
    assert (answer.code, answer.retryable) == (ErrorCode.TOO_LARGE, False)
    assert released == [5]


def test_the_largest_answer_that_is_given_fits_a_frame(
    server: Server, engine: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The harness encodes it."""
    blocks = (FRAME_BYTES - 96) // 8 // 9
    monkeypatch.setattr(server.cache, "acquire", lambda *_, **__: hit_of(blocks))
    monkeypatch.setattr(server.cache, "release", lambda *_: True)
    sharded = Acquire(name_space=engine.name_space, chain=bytes(32), shards=(0, 1) * 4)
    assert engine.ask(sharded).outcome is Outcome.HIT


def test_digests_of_slots_that_changed_in_between_are_unknown(
    server: Server, engine: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain = make_chain(1, 4)
    save_chain(server.cache, engine, chain)
    real, looks = server.cache.acquire_entries, []

    def lose_the_second(*arguments: Any, **options: Any) -> CacheAcquired:
        looks.append(options["shard"])
        if len(looks) == 2:
            server.cache.invalidate(engine.name_space, 0, chain[:32])
        return real(*arguments, **options)

    monkeypatch.setattr(server.cache, "acquire_entries", lose_the_second)
    found = engine.ask(AcquireEntries(name_space=engine.name_space, group=0, hashes=chain, shards=(0, 1)))
    assert looks == [0, 1]
    digests = numbers(found.groups[0].digests)
    assert digests[:4].all()
    assert not digests[4:].any()
    assert server.cache.stats.leases == 1


@pytest.mark.parametrize(("parents", "digests"), [(b"", b""), (b"p" * 64, b"d" * 16)])
def test_a_publish_reaches_the_cache_as_it_was_sent(
    server: Server, engine: Client, monkeypatch: pytest.MonkeyPatch, parents: bytes, digests: bytes
) -> None:
    seen: dict[str, Any] = {}

    def commit(*_: Any, **options: Any) -> Any:
        seen.update(options)
        return np.full(2, CommitOutcome.STALE, np.uint8)

    monkeypatch.setattr(server.cache, "commit", commit)
    message = Publish(
        name_space=engine.name_space,
        group=0,
        shard=1,
        tickets=bytes(16),
        hashes=b"h" * 64,
        parents=parents,
        digests=digests,
    )
    assert engine.tell(message) is None
    assert (seen["hashes"], seen["parents"], seen["shard"]) == (b"h" * 64, parents or None, 1)
    assert (seen["digests"] is None) if not digests else (seen["digests"].tobytes() == digests)
