from __future__ import annotations

import select

from kvoffload.cache import CacheGeometry
from kvoffload.peers import PeerSpace
from kvoffload.peers.stored_mail import MAX_BLOCKS, StoredBlocks, StoredMail
from tests.unit.cache.cache_model import PLAIN

SPACE = PeerSpace(number=1, fingerprint=b"F" * 32, geometry=CacheGeometry(hash_block_size=16, groups=PLAIN.groups))


def blocks(count: int) -> StoredBlocks:
    return StoredBlocks("", SPACE, 0, bytes(32 * count), bytes(32 * count))


def is_ready(mail: StoredMail) -> bool:
    return bool(select.select([mail], [], [], 0)[0])


def test_what_is_sent_is_taken_once_in_its_order() -> None:
    mail = StoredMail()
    assert not is_ready(mail)
    first, second = blocks(1), blocks(2)
    mail.send(first)
    mail.send(second)
    assert is_ready(mail)
    assert mail.take() == ([first, second], 0)
    assert not is_ready(mail)
    assert mail.take() == ([], 0)
    mail.close()


def test_beyond_the_bound_blocks_are_counted() -> None:
    mail = StoredMail()
    kept = blocks(MAX_BLOCKS - 1)
    mail.send(kept)
    mail.send(blocks(2))
    last = blocks(1)
    mail.send(last)
    assert mail.take() == ([kept, last], 2)
    mail.send(last)
    assert mail.take() == ([last], 0)
    mail.close()
