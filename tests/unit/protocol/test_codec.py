"""Messages survive the way there and back, in both directions and between versions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvoffload.errors import ProtocolError
from kvoffload.protocol import (
    CODEC,
    MESSAGES,
    Acquire,
    Acquired,
    Answer,
    Call,
    Channel,
    ClientMessage,
    ErrorCode,
    Greeting,
    Hello,
    LeasedSlots,
    ProtocolFault,
    Publish,
    Release,
    Role,
    Stats,
    answer_fault,
)
from kvoffload.protocol.limits import FRAME_BYTES, MAX_BLOCKS
from kvoffload.types import HASH_BYTES, AcquireOutcome
from tests.kit.protocol import version_two
from tests.kit.protocol.agreed import send
from tests.kit.protocol.examples import draw_message

U64S = st.integers(0, 2**64 - 1)
ACQUIRE = Acquire(name_space=1, chain=bytes(64), local=16)


def receive(frame: bytes, like: Any, codec: Any = CODEC) -> Any:
    decode = codec.decode_call if isinstance(like, ClientMessage) else codec.decode_answer
    return decode(frame, channel=like.channels[0])


@given(draw_message(MESSAGES), st.integers(1, 2**64 - 1), U64S, U64S)
def test_every_message_comes_back_as_it_was(message: Any, number: int, session: int, expires_ns: int) -> None:
    channel = message.channels[-1]
    if isinstance(message, ClientMessage):
        frame = CODEC.encode_call(message, number=number, session=session, expires_ns=expires_ns, channel=channel)
        expected: Any = Call(message, number, session, expires_ns)
        assert CODEC.decode_call(frame, channel=channel) == expected
    else:
        frame = CODEC.encode_answer(message, number=number, boot_id=session, channel=channel)
        assert CODEC.decode_answer(frame, channel=channel) == Answer(message, number, session)
    assert type(receive(send(message), message).message) is type(message)


@given(draw_message(MESSAGES))
def test_a_decoded_message_is_a_value_like_any_other(message: Any) -> None:
    decoded = receive(send(message), message).message
    assert hash(decoded) == hash(message)
    assert replace(decoded) == message
    assert repr(decoded) == repr(message)


@pytest.mark.parametrize("wrap", [bytes, bytearray, memoryview])
def test_any_kind_of_buffer_is_decoded(wrap: Any) -> None:
    assert CODEC.decode_call(wrap(send(ACQUIRE)), channel=Channel.EXPRESS).message == ACQUIRE  # type: ignore[union-attr]


def test_a_frame_is_one_array_in_the_documented_order() -> None:
    assert msgpack.unpackb(send(ACQUIRE)) == [4, 7, 8, 9, 1, bytes(64), 16, 2**64 - 1, 1, []]
    acquired = Acquired(
        outcome=AcquireOutcome.HIT, boundary=32, lease=3, groups=(LeasedSlots(first=1, addresses=bytes(8)),)
    )
    assert msgpack.unpackb(send(acquired)) == [68, 7, 8, 0, 32, 3, [[1, bytes(8), b""]], 0]


@pytest.mark.parametrize(("expires_ns", "now_ns", "late"), [(0, 10**18, False), (5, 4, False), (5, 5, True)])
def test_a_call_is_late_from_its_deadline_on(expires_ns: int, now_ns: int, late: bool) -> None:
    assert Call(Stats(), 1, 1, expires_ns).is_late(now_ns) is late


class TestVersions:
    """A peer that is one version older, or one newer, is understood."""

    def test_a_field_that_only_the_sender_knows_is_ignored(self) -> None:
        newer = version_two.Acquire(name_space=1, chain=bytes(64), local=16, priority=9)
        assert receive(send(newer, version_two.CODEC_TWO), ACQUIRE).message == ACQUIRE

    def test_a_field_that_only_the_reader_knows_has_its_default(self) -> None:
        found = receive(send(ACQUIRE), ACQUIRE, version_two.CODEC_TWO).message
        assert found == version_two.Acquire(name_space=1, chain=bytes(64), local=16, priority=5)

    def test_rows_grow_like_messages(self) -> None:
        row = version_two.LeasedSlots(first=1, addresses=bytes(8), age_s=77)
        newer = version_two.Acquired(outcome=AcquireOutcome.HIT, groups=(row,))
        older = Acquired(outcome=AcquireOutcome.HIT, groups=(LeasedSlots(first=1, addresses=bytes(8)),))
        assert receive(send(newer, version_two.CODEC_TWO), newer).message == older
        found = receive(send(older), older, version_two.CODEC_TWO).message
        assert found == replace(newer, groups=(replace(row, age_s=0),))

    def test_an_operation_that_only_the_sender_knows_is_answered(self) -> None:
        frame = send(version_two.Pin(lease=4), version_two.CODEC_TWO)
        fault = CODEC.decode_call(frame)
        assert isinstance(fault, ProtocolFault)
        assert (fault.code, fault.op, fault.number) == (ErrorCode.UNKNOWN_OPERATION, 31, 7)
        assert fault.message == "op: 31, allowed: known control operations"

    @given(st.integers(0, 100), st.lists(st.integers() | st.text() | st.binary(), max_size=5))
    def test_whatever_a_later_version_appends_is_ignored(self, op: int, more: list[Any]) -> None:
        frame = msgpack.packb([*msgpack.unpackb(send(ACQUIRE)), op, *[str(item) for item in more]])
        assert receive(frame, ACQUIRE).message == ACQUIRE


class TestFaults:
    """A wrong message is a value with one line that says which field, what it had, and what is allowed."""

    @pytest.mark.parametrize(
        ("items", "code", "line"),
        [
            ([], ErrorCode.MALFORMED, "frame: 0 items, allowed: at least 4"),
            ([4, 7, 8], ErrorCode.MALFORMED, "frame: 3 items, allowed: at least 4"),
            ([4, 7, 8, 9], ErrorCode.MALFORMED, "acquire: 0 fields, allowed: at least 2"),
            (["4", 7, 8, 9], ErrorCode.MALFORMED, "op: str, allowed: 0 to 2^16 - 1"),
            ([4, 0, 8, 9], ErrorCode.MALFORMED, "number: 0, allowed: 1 to 2^64 - 1"),
            ([4, 7, -1, 9], ErrorCode.MALFORMED, "session: -1, allowed: 0 to 2^64 - 1"),
            ([4, 7, 8, 1.0], ErrorCode.MALFORMED, "expires_ns: float, allowed: 0 to 2^64 - 1"),
            ([68, 7, 8, 9], ErrorCode.UNKNOWN_OPERATION, "op: 68, allowed: known express operations"),
            ([48, 7, 8, 9], ErrorCode.UNKNOWN_OPERATION, "op: 48, allowed: known express operations"),
            ([4, 7, 8, 9, True, b""], ErrorCode.MALFORMED, "acquire.name_space: bool, allowed: 0 to 2^32 - 1"),
            ([4, 7, 8, 9, None, b""], ErrorCode.MALFORMED, "acquire.name_space: nothing, allowed: 0 to 2^32 - 1"),
            (
                [4, 7, 8, 9, 1, bytes(33)],
                ErrorCode.MALFORMED,
                "acquire.chain: 33 bytes, allowed: hashes of 32 bytes each, 0 to 131072",
            ),
            ([4, 7, 8, 9, 1, b"", 0, 0, 0], ErrorCode.MALFORMED, "acquire.alignment: 0, allowed: 1 to 2^32 - 1"),
            (
                [4, 7, 8, 9, 1, b"", 0, 0, 1, [0, 1, 2**16]],
                ErrorCode.MALFORMED,
                "acquire.shards[2]: 65536, allowed: 0 to 2^16 - 1",
            ),
            (
                [32, 7, 8, 9, 1, 0, 0, bytes(16), bytes(32)],
                ErrorCode.MALFORMED,
                "publish.hashes: 1 values beside 2 of tickets, allowed: as many as `tickets`",
            ),
            ([4, 7, 8, 9, msgpack.ExtType(5, b"")], ErrorCode.MALFORMED, "frame: an extension, allowed: arrays only"),
            (
                [4, 7, 8, 9, msgpack.Timestamp(1, 2)],
                ErrorCode.MALFORMED,
                "frame: 9 exceeds max_ext_len(0), allowed: one msgpack array",
            ),
            ({"a": 1}, ErrorCode.MALFORMED, "frame: 1 exceeds max_map_len(0), allowed: one msgpack array"),
            ({}, ErrorCode.MALFORMED, "frame: a map, allowed: arrays only"),
            (7, ErrorCode.MALFORMED, "frame: int, allowed: one msgpack array"),
        ],
    )
    def test_the_line_names_the_field_and_what_is_allowed(self, items: Any, code: ErrorCode, line: str) -> None:
        fault = CODEC.decode_call(msgpack.packb(items), channel=Channel.EXPRESS)
        assert isinstance(fault, ProtocolFault)
        assert (fault.code, fault.message, fault.retryable) == (code, line, False)

    def test_the_number_of_a_wrong_message_is_told_so_that_it_can_be_answered(self) -> None:
        fault = CODEC.decode_call(msgpack.packb([4, 7, 8, 9, "x"]), channel=Channel.EXPRESS)
        assert isinstance(fault, ProtocolFault)
        assert (fault.op, fault.number) == (4, 7)
        frame = CODEC.encode_answer(answer_fault(fault), number=fault.number, boot_id=1)
        answer = CODEC.decode_answer(frame)
        assert isinstance(answer, Answer)
        assert (answer.number, answer.message) == (7, answer_fault(fault))

    def test_a_row_is_named_by_its_position(self) -> None:
        fault = CODEC.decode_answer(
            msgpack.packb([68, 7, 8, 0, 0, 0, [[0, b""], [0, bytes(9)]]]), channel=Channel.EXPRESS
        )
        assert isinstance(fault, ProtocolFault)
        assert fault.message.startswith("acquired.groups[1].addresses: 9 bytes, allowed: little-endian u64")

    def test_a_frame_beyond_the_limit_is_not_looked_into(self) -> None:
        fault = CODEC.decode_call(b"\xc1" * (FRAME_BYTES + 1))
        assert isinstance(fault, ProtocolFault)
        assert (fault.code, fault.message) == (ErrorCode.TOO_LARGE, "frame: 8388609 bytes, allowed: at most 8388608")

    def test_a_lifeline_has_a_smaller_limit(self) -> None:
        fault = CODEC.decode_call(bytes(65537), channel=Channel.LIFELINE)
        assert isinstance(fault, ProtocolFault)
        assert fault.code is ErrorCode.TOO_LARGE

    def test_a_chain_beyond_its_limit_is_refused(self) -> None:
        frame = msgpack.packb([4, 7, 8, 9, 1, bytes(HASH_BYTES * (MAX_BLOCKS + 1))])
        fault = CODEC.decode_call(frame, channel=Channel.EXPRESS)
        assert isinstance(fault, ProtocolFault)
        assert fault.code is ErrorCode.TOO_LARGE


class TestEncoding:
    """Nothing is sent that its reader would refuse."""

    @pytest.mark.parametrize(
        ("message", "line"),
        [
            (replace(ACQUIRE, chain=bytes(31)), "acquire.chain: 31 bytes"),
            (replace(ACQUIRE, chain=bytes(HASH_BYTES * (MAX_BLOCKS + 1))), "acquire.chain: 4194336 bytes"),
            (replace(ACQUIRE, local=-1), "acquire.local: -1, allowed: 0 to 2\\^64 - 1"),
            (replace(ACQUIRE, shards=[0]), "acquire.shards: list"),
            (replace(ACQUIRE, shards=(1,) * 65), "acquire.shards: 65 items"),
            (Release(leases=bytearray(8)), "release.leases: bytearray"),  # type: ignore[arg-type]
            (Hello(protocol_min=1, protocol_max=1, software="two\nlines"), "hello.software: text with control"),
            (Hello(protocol_min=1, protocol_max=1, software="\udc80"), "hello.software: text with lone surrogates"),
            (Publish(name_space=1, group=0, shard=0, tickets=bytes(8), hashes=b""), "publish.hashes: 0 values"),
        ],
    )
    def test_a_field_beyond_its_limit_is_an_error_that_names_it(self, message: Any, line: str) -> None:
        with pytest.raises(ProtocolError, match=f"^{line}"):
            CODEC.encode_call(message, number=1, channel=message.channels[0])

    @pytest.mark.parametrize(("number", "session"), [(0, 0), (2**64, 0), (1, -1), (1, 2**64)])
    def test_a_number_of_the_envelope_out_of_range_is_an_error(self, number: int, session: int) -> None:
        with pytest.raises(ProtocolError, match="allowed: "):
            CODEC.encode_call(Stats(), number=number, session=session)

    def test_a_message_whose_fields_are_too_much_together_is_an_error(self) -> None:
        row = LeasedSlots(first=0, addresses=bytes(8 * MAX_BLOCKS))
        with pytest.raises(ProtocolError, match=r"^acquired: 9437\d+ bytes, allowed: at most 8388608"):
            send(Acquired(outcome=AcquireOutcome.HIT, groups=(row,) * 9))

    def test_a_message_goes_over_its_own_channel(self) -> None:
        greeting = Greeting(protocol_min=1, protocol_max=1, engine="e", role=Role.WORKER)
        frame = CODEC.encode_call(greeting, number=1, channel=Channel.LIFELINE)
        assert isinstance(CODEC.decode_call(frame, channel=Channel.LIFELINE), Call)
        assert isinstance(CODEC.decode_call(frame), ProtocolFault)
        with pytest.raises(KeyError):
            CODEC.encode_call(greeting, number=1)
