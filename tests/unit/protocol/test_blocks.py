"""Messages about blocks have the same fields and numbers as the cache."""

from __future__ import annotations

from dataclasses import fields

import pytest

from kvoffload.cache import Acquired as CacheAcquired
from kvoffload.cache import AcquireOutcome, Reservation
from kvoffload.cache import LeasedGroup as CacheLeasedGroup
from kvoffload.errors import ProtocolError
from kvoffload.protocol import CODEC, Acquired, Channel, CreditsGranted, LeasedSlots, Publish
from kvoffload.protocol.fields import U64_MAX
from kvoffload.protocol.limits import FRAME_BYTES, MAX_BATCH
from kvoffload.types import HASH_BYTES

HASHES = bytes(2 * HASH_BYTES)


@pytest.mark.parametrize(
    ("ours", "theirs"), [(Acquired, CacheAcquired), (LeasedSlots, CacheLeasedGroup), (CreditsGranted, Reservation)]
)
def test_an_answer_has_the_fields_of_the_cache(ours: type, theirs: type) -> None:
    names = [field.name for field in fields(theirs)]
    assert [field.name for field in fields(ours)][: len(names)] == names


@pytest.mark.parametrize(("parents", "digests"), [(b"", b""), (HASHES, b""), (b"", bytes(16)), (HASHES, bytes(16))])
def test_parents_and_digests_of_published_blocks_may_be_left_out(parents: bytes, digests: bytes) -> None:
    message = Publish(
        name_space=1, group=0, shard=0, tickets=bytes(16), hashes=HASHES, parents=parents, digests=digests
    )
    assert (
        CODEC.decode_call(
            CODEC.encode_call(message, number=1, channel=Channel.EXPRESS), channel=Channel.EXPRESS
        ).message
        == message
    )  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("field", "value"), [("hashes", b""), ("parents", bytes(HASH_BYTES)), ("digests", bytes(8)), ("digests", bytes(24))]
)
def test_parents_and_digests_of_some_of_the_blocks_are_refused(field: str, value: bytes) -> None:
    values = {"tickets": bytes(16), "hashes": HASHES, field: value}
    with pytest.raises(ProtocolError, match=rf"^publish.{field}: \d values beside 2 of tickets"):
        CODEC.encode_call(Publish(name_space=1, group=0, shard=0, **values), number=1, channel=Channel.EXPRESS)  # type: ignore[arg-type]


@pytest.mark.parametrize(("shards", "is_right"), [(0, True), (1, True), (3, True), (1.5, False), (0.5, False)])
def test_digests_come_for_whole_shards(shards: float, is_right: bool) -> None:
    row = LeasedSlots(first=0, addresses=bytes(16), digests=bytes(int(16 * shards)))
    message = Acquired(outcome=AcquireOutcome.HIT, groups=(row,))
    if is_right:
        assert CODEC.encode_answer(message, number=1, boot_id=1, channel=Channel.EXPRESS)
        return
    with pytest.raises(ProtocolError, match=r"^acquired.groups\[0\].digests: \d values beside 2 of addresses"):
        CODEC.encode_answer(message, number=1, boot_id=1, channel=Channel.EXPRESS)


def test_the_largest_publish_fits_a_frame() -> None:
    numbers, hashes = b"\xff" * 8 * MAX_BATCH, b"\xff" * HASH_BYTES * MAX_BATCH
    message = Publish(
        name_space=2**32 - 1, group=9, shard=9, tickets=numbers, hashes=hashes, parents=hashes, digests=numbers
    )
    frame = CODEC.encode_call(message, number=U64_MAX, session=U64_MAX, expires_ns=U64_MAX, channel=Channel.EXPRESS)
    assert len(frame) <= FRAME_BYTES
