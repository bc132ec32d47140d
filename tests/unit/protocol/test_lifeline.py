"""Messages that descriptors go with."""

from __future__ import annotations

from kvoffload.cache import CacheFiles
from kvoffload.protocol import CODEC, MESSAGES, Answer, Channel, Greeting, Memory, Offer
from kvoffload.protocol.limits import MAX_PACKET_SEGMENTS

KERNEL_DESCRIPTORS = 253


def test_the_first_packet_of_a_memory_fits_what_the_kernel_passes_at_once() -> None:
    assert MAX_PACKET_SEGMENTS + len({"lock", "index"}) <= KERNEL_DESCRIPTORS
    message = Memory(
        index_bytes=2**40, segments=1000, first=0, segment_sizes=b"\xff" * 8 * MAX_PACKET_SEGMENTS, adopted_boot_id=1
    )
    frame = CODEC.encode_answer(message, number=1, boot_id=1, channel=Channel.LIFELINE)
    found = CODEC.decode_answer(frame, channel=Channel.LIFELINE)
    assert isinstance(found, Answer)
    assert found.message == message


def test_memory_goes_and_comes_back_in_the_same_order() -> None:
    assert Memory.descriptors == Offer.descriptors == "lock, index (both with `first` 0 only), segments"
    assert list(CacheFiles.__dataclass_fields__) == ["lock", "index", "segments"]


def test_descriptors_go_over_the_lifeline_only() -> None:
    with_descriptors = {message for message in MESSAGES if message.descriptors}
    assert all(message.channels == (Channel.LIFELINE,) for message in with_descriptors)
    assert Greeting in with_descriptors
