"""A process's end of an express channel, message by message."""

from __future__ import annotations

import time
from collections.abc import Callable

from kvoffload import native
from kvoffload.protocol import CODEC, Answer, ClientMessage, ServerMessage
from kvoffload.protocol.limits import FRAME_BYTES
from kvoffload.protocol.message import OneWay

TIMEOUT_S = 30.0


class ExpressPeer:
    """Takes the descriptor, and has it as long as it lives. `turn` lets the server work, where it must."""

    def __init__(self, end: int, *, session: int, turn: Callable[[], object] = lambda: None) -> None:
        self._end = native.open_express_end(end=end, frame_bytes=FRAME_BYTES)
        self._session = session
        self._turn = turn
        self._requests = self._one_way = 0
        self._came: list[Answer] = []
        self._goes_on = True

    def fileno(self) -> int:
        return self._end.file()

    def ask(self, message: ClientMessage) -> ServerMessage:
        """A request, and its answer."""
        self._requests += 1
        self._send(message, self._requests)
        self._wait(lambda: any(answer.number == self._requests for answer in self._came))
        (found,) = [answer.message for answer in self._came if answer.number == self._requests]
        self._came = [answer for answer in self._came if answer.number != self._requests]
        return found

    def tell(self, message: OneWay) -> None:
        self._one_way += 1
        self._send(message, self._one_way)

    def wait_for_end(self) -> None:
        self._wait(lambda: not self._goes_on)

    def _send(self, message: ClientMessage, number: int) -> None:
        assert self._end.send(CODEC.encode_call(message, number=number, session=self._session))

    def _wait(self, is_over: Callable[[], bool]) -> None:
        end = time.monotonic() + TIMEOUT_S
        while not is_over():
            assert time.monotonic() < end
            assert self._goes_on, "the channel has ended"
            self._end.wait(-1, 1_000_000)
            frames, self._goes_on = self._end.receive()
            for frame in frames:
                answer = CODEC.decode_answer(frame)
                assert isinstance(answer, Answer)
                self._came.append(answer)
            self._turn()
