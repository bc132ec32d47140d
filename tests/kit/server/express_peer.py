"""A process's end of an express channel, message by message."""

from __future__ import annotations

import time
from collections.abc import Callable

from kvoffload import native
from kvoffload.protocol import CODEC, Answer, Channel, ClientMessage, Done, Error, Mark, ServerMessage
from kvoffload.protocol.limits import FRAME_BYTES
from kvoffload.protocol.message import OneWay

TIMEOUT_S = 30.0
ONE_WAY = range(32, 48)


class ExpressPeer:
    """Takes the descriptor, and has it as long as it lives. `turn` lets the server work, where it must."""

    def __init__(self, end: int, *, session: int, turn: Callable[[], object] = lambda: None) -> None:
        self._end = native.open_express_end(end=end, frame_bytes=FRAME_BYTES)
        self.session = session
        self.turn = turn
        self._requests = self._one_way = 0
        self._came: dict[int, ServerMessage] = {}
        """Answers to requests, by number."""
        self._refused: list[Error] = []
        """Errors that answered one-way messages."""
        self.goes_on = True

    def fileno(self) -> int:
        return self._end.file()

    def ask(self, message: ClientMessage, *, expires_ns: int = 0) -> ServerMessage | None:
        """A request, and its answer; None: it came late."""
        self._requests += 1
        self._send(message, self._requests, expires_ns)
        if expires_ns:
            self.confirm()
            return None
        self._wait(lambda: self._requests in self._came)
        return self._came.pop(self._requests)

    def tell(self, message: OneWay, *, number: int | None = None, expires_ns: int = 0) -> None:
        """Sends a one-way message with the next number, or with another."""
        drawn = self.draw_one_way()
        self._send(message, drawn if number is None else number, expires_ns)

    def draw_one_way(self) -> int:
        """Draws the number of the next one-way message, which the caller may send itself."""
        self._one_way += 1
        return self._one_way

    def confirm(self) -> Error | None:
        """Waits until all that was told is served, or nothing is any more; the error that answered some of it."""
        self._requests += 1
        mark = self._requests
        self._end.send(CODEC.encode_call(Mark(), number=mark, session=self.session, channel=Channel.EXPRESS))
        self._wait(lambda: mark in self._came or not self.goes_on)
        assert self._came.pop(mark, Done()) == Done()
        assert len(self._refused) <= 1
        return self._refused.pop() if self._refused else None

    def wait_for_end(self) -> None:
        self._wait(lambda: not self.goes_on)

    def _send(self, message: ClientMessage, number: int, expires_ns: int) -> None:
        frame = CODEC.encode_call(
            message, number=number, session=self.session, expires_ns=expires_ns, channel=Channel.EXPRESS
        )
        assert self._end.send(frame)

    def _wait(self, is_over: Callable[[], bool]) -> None:
        end = time.monotonic() + TIMEOUT_S
        while not is_over():
            assert time.monotonic() < end
            assert self.goes_on, "the channel has ended"
            self._end.wait(-1, 1_000_000)
            frames, self.goes_on = self._end.receive()
            for frame in frames:
                answer = CODEC.decode_answer(frame, channel=Channel.EXPRESS)
                assert isinstance(answer, Answer)
                if isinstance(answer.message, Error) and answer.message.about_op in ONE_WAY:
                    self._refused.append(answer.message)
                else:
                    self._came[answer.number] = answer.message
            self.turn()
