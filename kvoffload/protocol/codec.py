"""Frames to messages and back. Whatever the bytes, what comes out is a message or a ProtocolFault."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Generic, NamedTuple, NoReturn, TypeAlias, TypeVar

import msgpack

from kvoffload.errors import ProtocolError
from kvoffload.protocol.catalog import MESSAGES
from kvoffload.protocol.faults import ErrorCode, FieldError, ProtocolFault
from kvoffload.protocol.fields import U64_MAX, Whole
from kvoffload.protocol.limits import ARRAY_ITEMS, FRAME_ARRAYS
from kvoffload.protocol.message import Channel, ClientMessage, Message, ServerMessage
from kvoffload.protocol.shape import Shape, name_of

Frame: TypeAlias = bytes | bytearray | memoryview
M = TypeVar("M", bound=Message)

_OP = Whole(2**16 - 1)
_COUNT = Whole(U64_MAX, minimum=1)
_ANY = Whole(U64_MAX)
# An error about a frame whose number could not be read is itself numbered 0.
_CALL_HEAD = {"op": _OP, "number": _COUNT, "session": _ANY, "expires_ns": _ANY}
_ANSWER_HEAD = {"op": _OP, "number": _ANY, "boot_id": _ANY}

# First size of the buffer that msgpack writes to. Its own default costs more than a small message.
_BUFFER_BYTES = 4096


class Call(NamedTuple):
    """What a client sent."""

    message: ClientMessage
    number: int
    session: int
    expires_ns: int

    def is_late(self, now_ns: int) -> bool:
        """Its answer is of no use any more: drop it. `now_ns` is the machine's CLOCK_MONOTONIC."""
        return 0 < self.expires_ns <= now_ns


class Answer(NamedTuple):
    """What a server sent: a reply or an event."""

    message: ServerMessage
    number: int
    boot_id: int


class Codec:
    """Both directions of one set of messages. Immutable; any thread may use it.

    Encoding raises ProtocolError if a field is beyond what a reader accepts. Decoding raises nothing.
    """

    def __init__(self, messages: Iterable[type[Message]]) -> None:
        known = tuple(messages)
        self._calls = _Direction([kind for kind in known if issubclass(kind, ClientMessage)], _CALL_HEAD)
        self._answers = _Direction([kind for kind in known if issubclass(kind, ServerMessage)], _ANSWER_HEAD)

    def encode_call(
        self,
        message: ClientMessage,
        *,
        number: int,
        session: int = 0,
        expires_ns: int = 0,
        channel: Channel = Channel.CONTROL,
    ) -> bytes:
        return self._calls.encode(message, (number, session, expires_ns), channel)

    def encode_answer(
        self, message: ServerMessage, *, number: int, boot_id: int, channel: Channel = Channel.CONTROL
    ) -> bytes:
        return self._answers.encode(message, (number, boot_id), channel)

    def decode_call(self, frame: Frame, *, channel: Channel = Channel.CONTROL) -> Call | ProtocolFault:
        found = self._calls.decode(frame, channel)
        if isinstance(found, ProtocolFault):
            return found
        message, (_, number, session, expires_ns) = found
        return Call(message=message, number=number, session=session, expires_ns=expires_ns)

    def decode_answer(self, frame: Frame, *, channel: Channel = Channel.CONTROL) -> Answer | ProtocolFault:
        found = self._answers.decode(frame, channel)
        if isinstance(found, ProtocolFault):
            return found
        message, (_, number, boot_id) = found
        return Answer(message=message, number=number, boot_id=boot_id)


class _Direction(Generic[M]):
    """Frames that one side sends."""

    def __init__(self, messages: list[type[M]], head: Mapping[str, Whole]) -> None:
        self._head = tuple((name, kind.read) for name, kind in head.items())
        self._by_op = {
            (channel, kind.op): (name_of(kind), Shape(kind)) for kind in messages for channel in kind.channels
        }
        assert len(self._by_op) == sum(len(kind.channels) for kind in messages), "an operation number is used twice"

    def encode(self, message: M, numbers: tuple[int, ...], channel: Channel) -> bytes:
        kind = type(message)
        name, shape = self._by_op[channel, kind.op]
        assert shape.record is kind, f"{name} is not a message of this codec"
        try:
            head = [read(value) for (_, read), value in zip(self._head, (kind.op, *numbers), strict=True)]
            frame = _pack((*head, *shape.lower(message)))
            _check_size(frame, channel)
        except FieldError as fault:
            raise ProtocolError(fault.describe(name), operation=name, fault=fault.code) from fault
        return frame

    def decode(self, frame: Frame, channel: Channel) -> tuple[M, list[int]] | ProtocolFault:
        place = "frame"
        head: dict[str, int] = {}
        try:
            _check_size(frame, channel)
            items = _unpack(frame)
            for (name, read), item in zip(self._head, items, strict=False):
                place = name
                head[name] = read(item)
            place = "frame"
            if len(head) < len(self._head):
                raise FieldError(f"{len(items)} items", f"at least {len(self._head)}")
            place = "op"
            known = self._by_op.get((channel, head["op"]))
            if known is None:
                raise FieldError(str(head["op"]), f"known {channel.value} operations", ErrorCode.UNKNOWN_OPERATION)
            place, shape = known
            return shape.read(items[len(head) :]), list(head.values())
        except FieldError as fault:
            return ProtocolFault(
                code=fault.code, message=fault.describe(place), op=head.get("op", 0), number=head.get("number", 0)
            )


def _pack(items: tuple[Any, ...]) -> bytes:
    frame: bytes = msgpack.Packer(buf_size=_BUFFER_BYTES).pack(items)
    return frame


def _unpack(frame: Frame) -> tuple[Any, ...]:
    """The whole frame as one tuple. Memory: the frame once more, and 16 MiB at worst.

    msgpack makes room for an array before it has seen its items, and the smallest objects take 64 times their bytes in
    a frame. So the length of arrays and their number are limited, and there are no maps.
    """
    arrays = 0

    def count_array(items: tuple[Any, ...]) -> tuple[Any, ...]:
        nonlocal arrays
        arrays += 1
        if arrays > FRAME_ARRAYS:
            raise FieldError(f"more than {FRAME_ARRAYS} arrays", f"at most {FRAME_ARRAYS}", ErrorCode.TOO_LARGE)
        return items

    try:
        items = msgpack.unpackb(
            frame,
            use_list=False,
            max_array_len=ARRAY_ITEMS,
            max_map_len=0,
            max_ext_len=0,
            list_hook=count_array,
            object_hook=_refuse_map,
            ext_hook=_refuse_extension,
        )
    except FieldError:
        raise
    except ValueError as fault:
        raise FieldError(str(fault)[:100] or "nested too deeply", "one msgpack array") from fault
    if type(items) is not tuple:
        raise FieldError(type(items).__name__, "one msgpack array")
    return items


def _refuse_map(_: object) -> NoReturn:
    raise FieldError("a map", "arrays only")


def _refuse_extension(_code: int, _data: bytes) -> NoReturn:
    raise FieldError("an extension", "arrays only")


def _check_size(frame: Frame, channel: Channel) -> None:
    if len(frame) > channel.limit_bytes:
        raise FieldError(f"{len(frame)} bytes", f"at most {channel.limit_bytes}", ErrorCode.TOO_LARGE)


CODEC = Codec(MESSAGES)
"""Of this version of kvoffload."""
