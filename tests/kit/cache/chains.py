"""Chains of blocks in a cache of this process."""

from __future__ import annotations

import random

from kvoffload.cache import (
    NO_ADDRESS,
    CommitOutcome,
    LocalCache,
    SessionId,
)
from tests.kit.cache.cache_model import (
    PLAIN,
    block_hashes,
    write_record,
)


def save_chain(cache: LocalCache, session: SessionId, name_space: int, chain: bytes) -> None:
    """All blocks of a plain request, written, committed and readable."""
    names = block_hashes(chain, PLAIN, 0)
    reservation = cache.reserve(session, name_space, 0, hashes=chain)
    assert len(reservation) == len(names)
    for name, address in zip(names, reservation.addresses, strict=True):
        if address != NO_ADDRESS:
            write_record(cache, PLAIN, (name_space, 0), name, int(address), 0)
    is_new = reservation.tickets != 0
    wanted = b"".join(name for name, new in zip(names, is_new, strict=True) if new)
    outcomes = cache.commit(session, name_space, 0, reservation.tickets[is_new], hashes=wanted)
    assert set(outcomes) <= {CommitOutcome.READABLE}


def make_requests(seed: int) -> list[list[int]]:
    """Conversations that grow turn by turn, some beginning alike, several at a time."""
    rng = random.Random(seed)
    ids = iter(range(1, 1 << 30))
    shared = [[next(ids) for _ in range(rng.randrange(1, 12))] for _ in range(6)]
    open_chats: list[list[int]] = []
    requests = []
    for _ in range(600):
        if not open_chats or rng.random() < 0.25:
            open_chats.append(list(rng.choice(shared)))
        chat = open_chats[min(int(rng.expovariate(0.15)), len(open_chats) - 1) * -1 - 1]
        chat += [next(ids) for _ in range(rng.randrange(1, 10))]
        requests.append(list(chat))
        if len(chat) > 80:
            open_chats.remove(chat)
    return requests
