"""A client for tests: joins as any process does, speaks message by message, and maps what it is given."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable

import zmq

from kvoffload.cache import IndexReader, SegmentMap
from kvoffload.client.joining import HeldMemory, Joining, Member, OnControl, OnLifeline, Step, ToSend
from kvoffload.packets import PacketSocket, close_all
from kvoffload.protocol import CODEC, Answer, Channel, ClientMessage, Done, Express, Mark, Register, Role, ServerMessage
from kvoffload.protocol.message import OneWay
from tests.kit.server.express_peer import ExpressPeer

TIMEOUT_S = 30.0
LOOK_MS = 10
"""Between two looks at whether there is room to send, where nothing comes."""


class RawClient:
    """`turn` lets the server work, where that runs on the same thread; None: it does so elsewhere."""

    def __init__(
        self,
        path: os.PathLike[str],
        register: Register,
        *,
        engine: str = "engine",
        former: HeldMemory | None = None,
        turn: Callable[[], object] | None = None,
    ) -> None:
        self._turn = turn
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self.control: zmq.Socket[bytes] | None = None
        self._requests = self._one_way = 0
        self._express: ExpressPeer | None = None
        self.came: list[type[ServerMessage]] = []
        """Kinds of the messages that the server sent, in their order, without those about blocks."""
        connected = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connected.connect(str(path))
        self.lifeline = PacketSocket(connected)
        self.joining = Joining(Member(engine=engine, role=Role.WORKER, pid=os.getpid()), register, former=former)
        pidfd = os.pidfd_open(os.getpid())
        try:
            self._send_all(self.joining.start(pidfd))
            self._wait(self._step)
        finally:
            os.close(pidfd)
        assert self.joining.step is Step.JOINED, self.joining.fault
        assert self.joining.registered is not None
        assert self.joining.welcome is not None
        self.name_space = self.joining.registered.name_space
        self.session = self.joining.welcome.session
        self.held = self.joining.take_memory()
        assert self.held is not None
        self.index = IndexReader(os.dup(self.held.index))
        self.segments = SegmentMap([os.dup(file) for file in self.held.segments], self.held.segment_sizes[0])

    def ask(self, message: ClientMessage) -> ServerMessage:
        """A request, and its answer."""
        if Channel.CONTROL not in message.channels:
            return self.express.ask(message)
        self._requests += 1
        self.send(message, self._requests)
        return self.receive(self._requests)

    def tell(self, message: OneWay, number: int | None = None) -> None:
        """Sends a one-way message and returns when its effect can be seen on every channel."""
        if Channel.CONTROL not in message.channels:
            self.express.tell(message)
            assert self.express.ask(Mark()) == Done()
            return
        self._one_way += 1
        self.send(message, self._one_way if number is None else number)

    def receive(self, number: int) -> ServerMessage:
        found: list[Answer] = []

        def poll() -> bool:
            answer = self.receive_control()
            if answer is not None and answer.number == number:
                found.append(answer)
            return bool(found)

        self._wait(poll)
        return found[0].message

    def receive_event(self) -> ServerMessage:
        """Receives an event of the lifeline."""
        found: list[ServerMessage] = []

        def poll() -> bool:
            came = self.receive_lifeline()
            if came is not None:
                found.append(came[0].message)
                close_all(came[1])
            return bool(found)

        self._wait(poll)
        return found[0]

    @property
    def express(self) -> ExpressPeer:
        """The channel of blocks."""
        assert self._express is not None
        return self._express

    def close(self) -> None:
        """As if the process had ended, but for its memory, which goes with this object."""
        self.joining.close()
        self.lifeline.close()
        self._express = None
        if self.control is not None:
            self.control.close(0)
        self._context.term()
        if self.held is not None:
            for file in (self.held.lock, self.held.index, *self.held.segments):
                os.close(file)
            self.held = None

    def _step(self) -> bool:
        came = self.receive_lifeline()
        if came is not None:
            self._send_all(self.joining.on_lifeline(*came))
        answer = None if self.joining.step is Step.FAILED else self.receive_control()
        if answer is not None:
            self._send_all(self.joining.on_control(answer))
        return self.joining.step in (Step.JOINED, Step.FAILED)

    def receive_lifeline(self) -> tuple[Answer, list[int]] | None:
        """Receives what came on the lifeline. None: nothing, or the express channel."""
        packet = self.lifeline.receive()
        if packet is None:
            return None
        answer = CODEC.decode_answer(packet.data, channel=Channel.LIFELINE)
        assert isinstance(answer, Answer)
        self.came.append(type(answer.message))
        descriptors = packet.take()
        if not isinstance(answer.message, Express):
            return answer, descriptors
        assert self.joining.welcome is not None
        self.joining.on_express()
        (end,) = descriptors
        self._express = ExpressPeer(end, session=self.joining.welcome.session, turn=self._turn or (lambda: None))
        return None

    def _send_all(self, messages: list[ToSend]) -> None:
        for one in messages:
            if isinstance(one, OnLifeline):
                data = CODEC.encode_call(one.message, number=1, session=0, channel=Channel.LIFELINE)
                self._wait(lambda data=data, one=one: self.lifeline.send(data, one.descriptors))  # type: ignore[misc]
            elif isinstance(one, OnControl):
                self._requests += 1
                self.send(one.message, self._requests)

    def send(self, message: ClientMessage, number: int) -> None:
        assert self.joining.welcome is not None
        if self.control is None:
            self.control = self._context.socket(zmq.DEALER)
            # Else one that is not served waits for ever to send the rest.
            self.control.linger = 0
            self.control.connect(self.joining.welcome.control)
        frame = CODEC.encode_call(message, number=number, session=self.joining.welcome.session)
        self.control.send(frame)

    def receive_control(self) -> Answer | None:
        if self.control is None:
            return None
        try:
            frame = self.control.recv(zmq.NOBLOCK)
        except zmq.Again:
            return None
        answer = CODEC.decode_answer(frame)
        assert isinstance(answer, Answer)
        self.came.append(type(answer.message))
        return answer

    def _wait(self, poll: Callable[[], bool]) -> None:
        end = time.monotonic() + TIMEOUT_S
        while not poll():
            assert time.monotonic() < end, self.joining.fault
            if self._turn is None:
                self._rest()
            else:
                self._turn()

    def _rest(self) -> None:
        """Leaves the processor to the server until something comes."""
        poller = zmq.Poller()
        poller.register(self.lifeline.fileno(), zmq.POLLIN)
        if self.control is not None:
            poller.register(self.control, zmq.POLLIN)
        poller.poll(LOOK_MS)
