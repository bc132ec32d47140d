"""Frames to messages and back. Whatever the bytes, what comes out is a message or a ProtocolFault."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Generic, NamedTuple, NoReturn, Protocol, TypeAlias, TypeVar

import msgpack

from kvoffload.errors import ProtocolError
from kvoffload.protocol.catalog import MESSAGES
from kvoffload.protocol.faults import ErrorCode, FieldError, ProtocolFault
from kvoffload.protocol.fields import U64_MAX, Plan, Whole
from kvoffload.protocol.limits import ARRAY_ITEMS, FRAME_ARRAYS
from kvoffload.protocol.message import Channel, ClientMessage, Message, ServerMessage
from kvoffload.protocol.shape import name_of, shape_of

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
    """A message that a client sent, with the numbers from the head of its frame."""

    message: ClientMessage
    number: int
    session: int
    expires_ns: int

    def is_late(self, now_ns: int) -> bool:
        """Whether the client does not wait for the answer any more, so that the message may be dropped. `now_ns` is the
        machine's CLOCK_MONOTONIC."""
        return 0 < self.expires_ns <= now_ns


class Answer(NamedTuple):
    """A reply or an event that a server sent, with the numbers from the head of its frame."""

    message: ServerMessage
    number: int
    boot_id: int


class PlainFrames(Protocol):
    """Codes frames with nothing unusual about them in fewer steps. For all others its methods return None."""

    def add(self, op: int, plan: Plan, /) -> None: ...

    def read(self, frame: Frame, /) -> tuple[Any, ...] | None:
        """Returns the message and the numbers behind its operation's."""
        ...

    def write(self, op: int, message: Message, numbers: tuple[int, ...], /) -> bytes | None: ...


class Codec:
    """Codes both directions of one set of messages. Immutable; any thread may use it.

    Encoding raises ProtocolError if a field is beyond what a reader accepts. Decoding raises nothing.
    """

    def __init__(
        self,
        messages: Iterable[type[Message]],
        *,
        make_plain: Callable[[tuple[int, ...], int], PlainFrames] | None = None,
    ) -> None:
        """`make_plain` takes the minima of the numbers behind the operation's, and the most bytes of a frame. None:
        this class codes all frames itself."""
        known = tuple(messages)
        calls = [kind for kind in known if issubclass(kind, ClientMessage)]
        answers = [kind for kind in known if issubclass(kind, ServerMessage)]
        self._calls = {channel: _Direction(calls, _CALL_HEAD, channel, make_plain) for channel in Channel}
        self._answers = {channel: _Direction(answers, _ANSWER_HEAD, channel, make_plain) for channel in Channel}

    def encode_call(
        self,
        message: ClientMessage,
        *,
        number: int,
        session: int = 0,
        expires_ns: int = 0,
        channel: Channel = Channel.CONTROL,
    ) -> bytes:
        return self._calls[channel].encode(message, (number, session, expires_ns))

    def encode_answer(
        self, message: ServerMessage, *, number: int, boot_id: int, channel: Channel = Channel.CONTROL
    ) -> bytes:
        return self._answers[channel].encode(message, (number, boot_id))

    def decode_call(self, frame: Frame, *, channel: Channel = Channel.CONTROL) -> Call | ProtocolFault:
        found = self._calls[channel].decode(frame)
        return found if isinstance(found, ProtocolFault) else Call._make(found)

    def decode_answer(self, frame: Frame, *, channel: Channel = Channel.CONTROL) -> Answer | ProtocolFault:
        found = self._answers[channel].decode(frame)
        return found if isinstance(found, ProtocolFault) else Answer._make(found)


class _Direction(Generic[M]):
    """Codes frames that one side sends on one channel."""

    def __init__(
        self,
        messages: list[type[M]],
        head: Mapping[str, Whole],
        channel: Channel,
        make_plain: Callable[[tuple[int, ...], int], PlainFrames] | None,
    ) -> None:
        here = [kind for kind in messages if channel in kind.channels]
        self._channel = channel
        self._limit_bytes = channel.limit_bytes
        self._head = tuple((name, kind.minimum, kind.maximum, kind.read) for name, kind in head.items())
        self._by_op = {kind.op: (name_of(kind), shape_of(kind)) for kind in here}
        assert len(self._by_op) == len(here), "an operation number is used twice"
        minima = tuple(kind.minimum for name, kind in head.items() if name != "op")
        self._plain = None if make_plain is None else make_plain(minima, self._limit_bytes)
        for op, (_, shape) in self._by_op.items():
            plan = shape.plan_record()
            if self._plain is not None and plan is not None:
                self._plain.add(op, plan)

    def encode(self, message: M, numbers: tuple[int, ...]) -> bytes:
        kind = type(message)
        plain = None if self._plain is None else self._plain.write(kind.op, message, numbers)
        if plain is not None:
            return plain
        name, shape = self._by_op[kind.op]
        assert shape.record is kind, f"{name} is not a message of this codec"
        try:
            for (_, low, high, read), number in zip(self._head, (kind.op, *numbers), strict=True):
                if type(number) is not int or not low <= number <= high:
                    read(number)
            frame = _pack((kind.op, *numbers, *shape.lower(message)))
            if len(frame) > self._limit_bytes:
                raise self._refuse_size(frame)
        except FieldError as fault:
            raise ProtocolError(fault.describe(name), operation=name, fault=fault.code) from fault
        return frame

    def decode(self, frame: Frame) -> tuple[Any, ...] | ProtocolFault:
        """Returns the message and the numbers behind its operation's."""
        plain = None if self._plain is None else self._plain.read(frame)
        if plain is not None:
            return plain
        place = "frame"
        head: list[int] = []
        try:
            if len(frame) > self._limit_bytes:
                raise self._refuse_size(frame)
            items = _unpack(frame)
            for (name, low, high, read), item in zip(self._head, items, strict=False):
                place = name
                head.append(item if type(item) is int and low <= item <= high else read(item))
            if len(head) < len(self._head):
                place = "frame"
                raise FieldError(f"{len(items)} items", f"at least {len(self._head)}")
            known = self._by_op.get(head[0])
            if known is None:
                place, allowed = "op", f"known {self._channel.value} operations"
                raise FieldError(str(head[0]), allowed, ErrorCode.UNKNOWN_OPERATION)
            place, shape = known
            return shape.read(items[len(head) :]), *head[1:]
        except FieldError as fault:
            op, number = (*head, 0, 0)[:2]
            return ProtocolFault(code=fault.code, message=fault.describe(place), op=op, number=number)

    def _refuse_size(self, frame: Frame) -> FieldError:
        return FieldError(f"{len(frame)} bytes", f"at most {self._limit_bytes}", ErrorCode.TOO_LARGE)


def _pack(items: tuple[Any, ...]) -> bytes:
    frame: bytes = msgpack.Packer(buf_size=_BUFFER_BYTES).pack(items)
    return frame


def _unpack(frame: Frame) -> tuple[Any, ...]:
    """Reads the whole frame as one tuple. Memory: the frame once more, and 16 MiB at worst.

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


CODEC = Codec(MESSAGES)
"""The codec for all messages of this version of kvoffload."""
