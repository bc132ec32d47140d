"""The wire between a process and a server: connections with everything that may happen to one.

A message takes its time and keeps its order. When one end hangs up, some of what is on its way still arrives, perhaps
much later. The other end of a lifeline or a stream sees that end; that of a control connection does not, until it
sends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from kvoffload.protocol import CODEC, Answer, Call, Channel
from tests.simulation.timeline import MILLISECOND_NS, Timeline

_NOTICED_NS = 5 * MILLISECOND_NS
"""How long an end may send before it notices that the other one is gone."""


class Hangup(NamedTuple):
    """The end of a lifeline or a stream, as the other side sees it."""


class Packet(NamedTuple):
    """A packet that travels on a lifeline."""

    content: Any
    descriptors: tuple[int, ...] = ()


class Pipe:
    """One direction of a connection. `receive` is called with each item."""

    def __init__(self, timeline: Timeline, receive: Callable[[Any], None]) -> None:
        self._timeline = timeline
        self._receive = receive
        self._on_way: deque[tuple[Any, int]] = deque()
        """Items on their way, with the position of each."""
        self._last_ns = 0
        self._sent = 0
        self._survives = -1
        """Number of the sent items that arrive; -1: all."""
        self._lags_until_ns = 0

    def send(self, item: Any) -> None:
        timeline = self._timeline
        wait_ns = timeline.between_ms(5, 80) if timeline.chance(0.02) else timeline.between_ms(0.02, 0.3)
        self._last_ns = max(self._last_ns + 1, timeline.now_ns + wait_ns, self._lags_until_ns)
        self._sent += 1
        self._add(item, self._sent, self._last_ns)

    def send_end(self, item: Any) -> None:
        """Behind whatever still arrives."""
        self._add(item, -1, max(self._last_ns + 1, self._timeline.now_ns))

    def lag(self, until_ns: int) -> None:
        """Lets nothing pass until then."""
        self._lags_until_ns = max(self._lags_until_ns, until_ns)

    def cut(self, arrived: int = -1) -> None:
        """Loses what is sent from here on; of what is on its way, so many items at most arrive (-1: any number)."""
        survives = self._timeline.random.randint(0, self._sent) if arrived < 0 else arrived
        self._survives = survives if self._survives < 0 else min(self._survives, survives)

    def _add(self, item: Any, position: int, at_ns: int) -> None:
        self._on_way.append((item, position))
        self._timeline.at(at_ns, self._arrive)

    def _arrive(self) -> None:
        """Once for each item; the oldest goes. Those that a lag has put off have their turns in any order."""
        if self._timeline.now_ns < self._lags_until_ns:
            self._timeline.at(self._lags_until_ns, self._arrive)
            return
        item, position = self._on_way.popleft()
        if not 0 <= self._survives < position:
            self._receive(item)


class Connection:
    """A connection of any channel. `to_client` and `to_server` are called with what arrives there."""

    def __init__(
        self,
        timeline: Timeline,
        number: int,
        channel: Channel,
        to_client: Callable[[Connection, Any], None],
        *,
        codes: bool,
        tells_end: bool,
    ) -> None:
        """`codes`: messages travel as bytes. `tells_end`: each end sees that of the other one."""
        self.number = number
        self.key = b"%d" % number
        self._timeline = timeline
        self._channel = channel
        self._codes = codes
        self._tells_end = tells_end
        self._up = Pipe(timeline, lambda item: self.to_server(self, item))
        self.to_server: Callable[[Connection, Any], None] = lambda _, __: None
        """Called with each item from the client. Before a server accepts the connection, items are lost."""
        self._down = Pipe(timeline, lambda item: to_client(self, item))
        self._closed_by_client_ns = self._closed_by_server_ns = -1
        self.truth: Any = None
        """The server's knowledge of the process that registered on the connection."""
        self.one_way = 0
        """Messages without an answer that the server has served."""

    @property
    def is_open(self) -> bool:
        return self._closed_by_client_ns < 0 and self._closed_by_server_ns < 0

    def lag(self, until_ns: int) -> None:
        self._up.lag(until_ns)
        self._down.lag(until_ns)

    def send_call(self, call: Call, descriptors: tuple[int, ...] = ()) -> bool:
        """Sends a call. False: the other end is known to be gone."""
        if self._is_known_closed(self._closed_by_server_ns):
            return False
        if self._codes:
            message, number, session, expires_ns = call
            frame = CODEC.encode_call(
                message, number=number, session=session, expires_ns=expires_ns, channel=self._channel
            )
            decoded = CODEC.decode_call(frame, channel=self._channel)
            assert decoded == call
        self._up.send(Packet(call, descriptors))
        return True

    def send_answer(self, answer: Answer, descriptors: tuple[int, ...] = ()) -> bool:
        if self._is_known_closed(self._closed_by_client_ns):
            return False
        if self._codes:
            frame = CODEC.encode_answer(
                answer.message, number=answer.number, boot_id=answer.boot_id, channel=self._channel
            )
            assert CODEC.decode_answer(frame, channel=self._channel) == answer
        self._down.send(Packet(answer, descriptors))
        return True

    def close_by_client(self) -> None:
        """Items from the server are not taken any more; some of those sent to it may arrive late."""
        if self._closed_by_client_ns >= 0:
            return
        self._closed_by_client_ns = self._timeline.now_ns
        self._down.cut(0)
        self._end(self._up)

    def close_by_server(self) -> None:
        if self._closed_by_server_ns >= 0:
            return
        self._closed_by_server_ns = self._timeline.now_ns
        self._up.cut(0)
        self._end(self._down)

    def break_off(self) -> None:
        """Neither end did it."""
        self.close_by_server()
        self._closed_by_client_ns = self._timeline.now_ns
        if self._tells_end:
            self._up.send_end(Hangup())

    def _end(self, pipe: Pipe) -> None:
        pipe.cut()
        if self._tells_end:
            pipe.send_end(Hangup())
        elif self._timeline.chance(0.05):
            pipe.lag(self._timeline.now_ns + self._timeline.between_ms(10, 3000))

    def _is_known_closed(self, closed_ns: int) -> bool:
        return 0 <= closed_ns <= self._timeline.now_ns - _NOTICED_NS
