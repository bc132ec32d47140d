"""Lifelines: processes greet, get memory, are told, and end; none of them holds up or uses up the server."""

from __future__ import annotations

import gc
import os
import resource
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvoffload.errors import PacketError
from kvoffload.packets import Credentials, PacketSocket, close_all
from kvoffload.protocol import (
    Closing,
    ClosingReason,
    Error,
    ErrorCode,
    Express,
    Farewell,
    Holding,
    Memory,
    Offer,
)
from kvoffload.server.channels import lifelines, unread_descriptors
from kvoffload.server.channels import lifelines as lifelines_module
from kvoffload.server.channels.foreign_files import REFUSED
from tests.kit.crowded_kernel import Kernel
from tests.kit.lingering import lingering
from tests.kit.server.lifeline_loop import GREETING, TIMEOUT_S, WELCOME, Loop, Process


@pytest.fixture
def loop(tmp_path: Path) -> Iterator[Loop]:
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    loop = Loop(tmp_path / "s")
    yield loop
    loop.lines.close()
    loop.listener.close()
    loop.end_files()
    assert len(loop.lines) == 0
    assert list(tmp_path.iterdir()) == []
    # The clients' ends went with the test.
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_process_greets_is_served_and_ends(loop: Loop) -> None:
    process = Process(loop)
    process.greet()
    process.send(Farewell())
    loop.turn_until(2)
    process.end.close()
    loop.turn_until(3)
    (_, line, greeting), farewell, end = loop.told
    assert greeting == GREETING
    assert farewell == ("farewell", line, Farewell())
    assert end == ("end", line)
    assert len(loop.lines) == 0


def test_a_pidfd_that_was_not_sent_is_opened_for_it(loop: Loop) -> None:
    process = Process(loop)
    process.send(GREETING)
    assert process.receive()[0].message == WELCOME


def test_events_are_counted_from_each_greeting_on_and_bring_descriptors(loop: Loop) -> None:
    process = Process(loop)
    null = os.open(os.devnull, os.O_RDONLY)
    for _ in range(2):
        process.greet()
        line = loop.told[-1][1]
        for first in (0, 250):
            memory = Memory(index_bytes=4096, segments=500, first=first, segment_sizes=bytes(8 * 250))
            loop.lines.send_event(line, memory, [null] * 250)  # type: ignore[arg-type]
        for number in (1, 2):
            answer, descriptors = process.receive()
            assert (answer.number, len(descriptors)) == (number, 250)
            close_all(descriptors)
    os.close(null)


def test_an_offer_brings_its_descriptors(loop: Loop) -> None:
    process = Process(loop)
    process.greet()
    offer = Offer(former_boot_id=1, first=0, segment_sizes=bytes(8), is_last=True)
    process.send(offer, (0, 0, 0))
    loop.turn_until(2)
    assert loop.told[1] == ("offer", loop.told[0][1], offer, 3)


@pytest.mark.parametrize("beside", [0, 252])
@pytest.mark.parametrize("sent", ["greeting", "holding", "offer", "empty", "unread"])
def test_a_descriptor_that_cannot_be_closed_holds_up_no_other_user(
    loop: Loop, monkeypatch: pytest.MonkeyPatch, sent: str, beside: int
) -> None:
    """A greeting may bring as many descriptors as any packet, and each may be a socket that lingers."""
    monkeypatch.setattr(PacketSocket, "credentials", lambda _: Credentials(os.getpid(), loop.uid, os.getgid()))
    hostile, loop.wants = Process(loop), False
    with lingering() as held:
        files = (*[0] * beside, held.fileno())
        offer = Offer(former_boot_id=1, first=0, segment_sizes=bytes(8), is_last=True)
        message = {"greeting": GREETING, "holding": Holding(memories=()), "offer": offer}.get(sent)
        if sent != "greeting":
            hostile.greet()
        if message is not None:
            hostile.send(message, files)
        elif sent == "empty":
            # The packet behind one without bytes is never received.
            with socket.socket(fileno=os.dup(hostile.end.fileno())) as raw:
                raw.send(b"")
            hostile.send(GREETING, files)
        else:
            hostile.send(Farewell(), files)
        held.part()
        if sent == "unread":
            loop.lines.end(loop.told[0][1])  # type: ignore[arg-type]
        hostile.end.close()
        loop.turn()
        told, hostile_uid, loop.uid, is_ended = len(loop.told), loop.uid, loop.uid + 1, sent in ("empty", "unread")
        other = Process(loop)
        for _ in range(3):
            other.greet()
        assert [what for what, *_ in loop.told[told:]] == ["greeting"] * 3
        assert ("end" in [what for what, *_ in loop.told]) == is_ended
        assert loop.files.count(hostile_uid, "lifeline") == is_ended


def test_who_waits_to_be_let_in_holds_up_no_end(loop: Loop) -> None:
    with lingering() as held:
        waiting = Process(loop)
        waiting.send(GREETING, (held.fileno(),))
        held.part()
        waiting.end.close()
        loop.lines.close()
        assert loop.files.total("lifeline") == 1


def test_who_does_not_greet_first_is_let_go(loop: Loop) -> None:
    process = Process(loop)
    process.send(Farewell())
    answer, _ = process.receive()
    assert isinstance(answer.message, Error)
    assert answer.message.code is ErrorCode.NOT_GREETED
    assert process.is_ended()
    assert loop.told == []


def test_a_wrong_packet_is_answered_and_ends_a_stranger_alone(loop: Loop) -> None:
    stranger, known = Process(loop), Process(loop)
    known.greet()
    for process in (stranger, known):
        assert process.end.send(b"\xff\x00nonsense")
        answer, _ = process.receive()
        assert isinstance(answer.message, Error)
        assert answer.message.code is ErrorCode.MALFORMED
    assert stranger.is_ended()
    known.greet()
    assert known.end.send(b"x" * 65536)
    assert isinstance(known.receive()[0].message, Error)


def test_who_does_not_greet_makes_room_for_others(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifelines_module, "MAX_UNGREETED", 3)
    known = Process(loop)
    known.greet()
    silent = [Process(loop) for _ in range(5)]
    for _ in range(10):
        loop.turn()
    assert len(loop.lines) == 4
    assert silent[0].is_ended()
    assert silent[1].is_ended()
    silent[4].greet()
    known.greet()


def test_newcomers_have_a_part_of_a_turn(loop: Loop) -> None:
    """A user who opens lifelines as fast as he can takes no time from processes that have joined."""
    loop.takes_s = lifelines_module.ACCEPT_S / 2
    newcomers = [Process(loop) for _ in range(5)]
    loop.turn()
    assert len(loop.lines) == 2
    for _ in range(2):
        loop.turn()
    assert len(loop.lines) == len(newcomers)


def is_let_go(process: Process) -> bool:
    """Whether the server has closed the connection of a process that was sent nothing."""
    try:
        return process.end.receive() is not None
    except PacketError:
        return True


def test_a_user_replaces_a_few_of_many_newcomers_and_the_others_are_refused(
    loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To refuse takes a part of the time, so that others do not wait for all that such a user opens."""
    monkeypatch.setattr(lifelines_module, "UNGREETED_OF_USER", 3)
    monkeypatch.setattr(lifelines_module, "REPLACED_AT_ONCE", 2)
    of_user(monkeypatch, 8)
    many = [Process(loop) for _ in range(8)]
    loop.turn()
    assert [is_let_go(one) for one in many] == [True, True, False, False, False, True, True, True]
    of_user(monkeypatch, os.getuid())
    (other,) = connect_some(loop, 1)
    other.greet()
    assert not is_let_go(many[2])
    of_user(monkeypatch, 8)
    (late,) = connect_some(loop, 1)
    assert (is_let_go(many[2]), is_let_go(late)) == (True, False)


def test_a_full_server_says_so(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifelines_module, "MAX_LIFELINES", 1)
    known = Process(loop)
    known.greet()
    answer, _ = (late := Process(loop)).receive()
    assert isinstance(answer.message, Error)
    assert answer.message.code is ErrorCode.BUSY
    assert late.is_ended()


def of_user(monkeypatch: pytest.MonkeyPatch, uid: int) -> None:
    """Makes all that are let in from here on this user's."""
    monkeypatch.setattr(PacketSocket, "credentials", lambda _: Credentials(os.getpid(), uid, os.getgid()))


def connect_some(loop: Loop, count: int) -> list[Process]:
    made = [Process(loop) for _ in range(count)]
    for _ in range(count):
        loop.turn()
    return made


def test_no_user_gets_all_lifelines(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifelines_module, "MAX_LIFELINES", 8)
    of_user(monkeypatch, 8)
    many = connect_some(loop, 9)
    assert len(loop.lines) == 6
    of_user(monkeypatch, os.getuid())
    (other,) = connect_some(loop, 1)
    other.greet()
    for one in many:
        one.end.close()
    while len(loop.lines) > 1:
        loop.turn()
    of_user(monkeypatch, 8)
    again = connect_some(loop, 2)
    assert len(loop.lines) == 3
    other.greet()
    del again


def test_connections_that_are_not_closed_yet_count_as_the_users(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifelines_module, "MAX_LIFELINES", 8)
    of_user(monkeypatch, 8)
    is_closed = threading.Event()
    loop.files.do(8, lambda: is_closed.wait(TIMEOUT_S), count=4)
    many = connect_some(loop, 9)
    assert len(loop.lines) == 2
    of_user(monkeypatch, os.getuid())
    (other,) = connect_some(loop, 1)
    other.greet()
    is_closed.set()
    del many


def test_refused_connections_that_are_not_closed_yet_leave_others_their_places(
    loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lifelines_module, "MAX_LIFELINES", 8)
    of_user(monkeypatch, 8)
    is_closed = threading.Event()
    loop.files.do(8, lambda: is_closed.wait(TIMEOUT_S))
    many = connect_some(loop, 6)
    for _ in range(8):
        refused = Process(loop)
        refused.send(GREETING, (0,))
        many.append(refused)
        loop.turn()
    assert loop.files.count(8, REFUSED) == 8
    of_user(monkeypatch, os.getuid())
    (other,) = connect_some(loop, 1)
    other.greet()
    is_closed.set()
    del many


def test_few_lifelines_are_served_in_a_turn_and_users_take_turns(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifelines, "LINES_AT_ONCE", 2)
    of_user(monkeypatch, 1)
    many = connect_some(loop, 5)
    of_user(monkeypatch, 2)
    many += connect_some(loop, 1)
    listener, _, *files = loop.waits
    turns = [loop.lines.choose([*files, listener]) for _ in range(5)]
    assert [turn[0] for turn in turns] == [listener] * 5
    assert all(len(turn) == 3 and files[-1] in turn for turn in turns)
    assert {file for turn in turns for file in turn[1:]} == set(files)
    del many


def test_of_those_who_do_not_greet_one_of_whoever_has_most_goes(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifelines_module, "MAX_UNGREETED", 3)
    (slow,) = connect_some(loop, 1)
    of_user(monkeypatch, 8)
    many = connect_some(loop, 9)
    assert len(loop.lines) == 3
    slow.greet()
    del many


def test_the_last_descriptors_are_for_nobody_new(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    known = Process(loop)
    known.greet()
    monkeypatch.setattr(lifelines_module, "is_of_reserve", lambda _: True)
    answer, _ = (late := Process(loop)).receive()
    assert isinstance(answer.message, Error)
    assert answer.message.code is ErrorCode.BUSY
    assert late.is_ended()
    known.greet()


def test_without_descriptors_nobody_new_is_let_in_until_somebody_leaves(loop: Loop) -> None:
    known = Process(loop)
    known.greet()
    late = Process(loop)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest_free = os.dup(0)
    os.close(lowest_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, limits[1]))
    try:
        for _ in range(5):
            loop.turn()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    # It is not asked again and again: the loop does not wait for it meanwhile.
    assert len(loop.waits.keys() - {loop.files.fileno()}) == len(loop.lines) == 1
    known.end.close()
    late.greet()


def test_who_does_not_read_is_waited_for_by_nobody_and_then_let_go(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    slow, other = Process(loop), Process(loop)
    slow.greet()
    other.greet()
    line = loop.told[0][1]
    closing = Closing(reason=ClosingReason.ENDED)
    for _ in range(20_000):
        loop.lines.send_event(line, closing)  # type: ignore[arg-type]
        if len(loop.lines) == 1:
            break
    assert len(loop.lines) == 1
    assert ("end", line) in loop.told
    other.greet()


def test_what_processes_do_not_read_is_bounded_in_bytes(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one, and of all of a user: who would have more is let go, and costs nothing from then on."""
    monkeypatch.setattr(lifelines, "QUEUED_BYTES", 1000)
    monkeypatch.setattr(lifelines, "ALL_QUEUED_BYTES", 1600)
    for process in (Process(loop), Process(loop)):
        process.greet()
    monkeypatch.setattr(PacketSocket, "send", lambda *_: False)
    lines, seen = [told[1] for told in loop.told], set[int]()
    while len(loop.lines):
        for line in lines:
            loop.lines.send_event(line, Closing(reason=ClosingReason.ENDED))  # type: ignore[arg-type]
            assert loop.lines.queued_bytes <= (1600 if len(loop.lines) == 2 else 1000)
            seen.add(len(loop.lines))
    assert seen == {2, 1, 0}
    assert loop.lines.queued_bytes == 0


def test_a_slow_reader_gets_everything_in_order(loop: Loop) -> None:
    process = Process(loop)
    process.greet()
    line = loop.told[0][1]
    for _ in range(600):
        loop.lines.send_event(line, Closing(reason=ClosingReason.ENDED))  # type: ignore[arg-type]
    numbers = [process.receive()[0].number for _ in range(600)]
    assert numbers == list(range(1, 601))


def is_open(file: int) -> bool:
    try:
        os.fstat(file)
    except OSError:
        return False
    return True


def test_a_descriptor_that_it_takes_is_closed_once_it_is_sent(loop: Loop) -> None:
    process = Process(loop)
    process.greet()
    line = loop.told[0][1]
    null = os.open(os.devnull, os.O_RDONLY)
    loop.lines.send_event(line, Express(), [null], taken=[null])  # type: ignore[arg-type]
    assert not is_open(null)
    answer, descriptors = process.receive()
    assert (answer.message, answer.number, len(descriptors)) == (Express(), 1, 1)
    close_all(descriptors)


def test_until_it_is_sent_it_is_open_and_the_others_are_nobodys(loop: Loop) -> None:
    process = Process(loop)
    process.greet()
    line = loop.told[0][1]
    events = 0
    while not any(loop.waits.values()):
        loop.lines.send_event(line, Closing(reason=ClosingReason.ENDED))  # type: ignore[arg-type]
        events += 1
    kept, own = (os.open(os.devnull, os.O_RDONLY) for _ in range(2))
    memory = Memory(index_bytes=1, segments=1, first=1, segment_sizes=bytes(8))
    loop.lines.send_event(line, memory, [kept])  # type: ignore[arg-type]
    loop.lines.send_event(line, Express(), [own], taken=[own])  # type: ignore[arg-type]
    assert is_open(own)
    for _ in range(events):
        assert process.receive()[0].message == Closing(reason=ClosingReason.ENDED)
    for message in (memory, Express()):
        answer, descriptors = process.receive()
        assert (answer.message, len(descriptors)) == (message, 1)
        close_all(descriptors)
    assert (is_open(kept), is_open(own)) == (True, False)
    os.close(kept)


@pytest.mark.parametrize("how", ["let go", "too slow", "gone"])
def test_the_end_of_a_line_closes_what_it_has_taken(loop: Loop, how: str) -> None:
    process = Process(loop)
    process.greet()
    line = loop.told[0][1]
    while not any(loop.waits.values()):
        loop.lines.send_event(line, Closing(reason=ClosingReason.ENDED))  # type: ignore[arg-type]
    own = [os.open(os.devnull, os.O_RDONLY) for _ in range(3)]
    for file in own:
        loop.lines.send_event(line, Express(), [file], taken=[file])  # type: ignore[arg-type]
    assert all(map(is_open, own))
    match how:
        case "let go":
            loop.lines.end(line)  # type: ignore[arg-type]
        case "too slow":
            for _ in range(lifelines_module.MAX_QUEUED):
                loop.lines.send_event(line, Closing(reason=ClosingReason.ENDED))  # type: ignore[arg-type]
        case "gone":
            process.end.close()
            loop.turn_until(2)
    assert loop.told[1:] == [("end", line)]
    assert not any(map(is_open, own))


def test_what_is_too_much_for_a_line_is_closed(loop: Loop) -> None:
    process = Process(loop)
    process.greet()
    line = loop.told[0][1]
    while len(loop.lines):
        own = os.open(os.devnull, os.O_RDONLY)
        loop.lines.send_event(line, Express(), [own], taken=[own])  # type: ignore[arg-type]
    assert not is_open(own)
    del process


def test_without_a_line_a_descriptor_is_closed(loop: Loop) -> None:
    null = os.open(os.devnull, os.O_RDONLY)
    assert not loop.lines.send_event(99, Express(), [null], taken=[null])
    assert not is_open(null)


def test_after_the_end_nothing_is_sent(loop: Loop) -> None:
    process = Process(loop)
    process.greet()
    line = loop.told[0][1]
    loop.lines.end(line)  # type: ignore[arg-type]
    loop.lines.end(line)  # type: ignore[arg-type]
    loop.lines.send_event(line, Closing(reason=ClosingReason.ENDED))  # type: ignore[arg-type]
    assert process.is_ended()
    assert loop.told[1:] == [("end", line)]


def test_nobody_new_comes_once_it_has_stopped_listening(loop: Loop) -> None:
    process = Process(loop)
    process.greet()
    loop.lines.stop_listening()
    with pytest.raises(FileNotFoundError):
        Process(loop)
    process.greet()


def send_memory(loop: Loop, line: object, count: int = 2) -> None:
    memory = Memory(index_bytes=1, segments=count, first=1, segment_sizes=bytes(8 * count))
    loop.lines.send_event(line, memory, [loop.listener.fileno()] * count)  # type: ignore[arg-type]


def test_what_the_kernel_does_not_take_is_tried_again_by_a_timer(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its socket can be written to all the while, which would keep the loop busy."""
    process, kernel = Process(loop), Kernel()
    monkeypatch.setattr(lifelines, "PacketSocket", kernel.wrap)
    process.greet()
    send_memory(loop, loop.told[0][1])
    assert not any(loop.waits.values())
    loop.lines.tick(0.0)
    assert not any(loop.waits.values())
    kernel.is_crowded = False
    loop.lines.tick(0.25)
    answer, descriptors = process.receive()
    assert (isinstance(answer.message, Memory), len(descriptors)) == (True, 2)
    close_all(descriptors)


def test_a_user_who_reads_no_descriptors_keeps_nobody_from_theirs(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unread_descriptors, "count_allowed", lambda: 16)
    of_user(monkeypatch, 8)
    loop.uid = 8
    silent, other = Process(loop), Process(loop)
    silent.greet()
    other.greet()
    for _ in range(10):
        send_memory(loop, loop.told[0][1])
    assert not any(loop.waits.values())
    of_user(monkeypatch, 9)
    loop.uid = 9
    honest = Process(loop)
    honest.greet()
    send_memory(loop, loop.told[2][1])
    answer, descriptors = honest.receive()
    assert (isinstance(answer.message, Memory), len(descriptors)) == (True, 2)
    close_all(descriptors)
    # Another process of the user waits until the one that does not read is let go.
    send_memory(loop, loop.told[1][1])
    for now_s in (0.0, lifelines_module.READ_S - 1):
        loop.lines.tick(now_s)
        assert loop.told[3:] == []
        assert other.end.receive() is None
    loop.lines.tick(lifelines_module.READ_S)
    assert loop.told[3:] == [("end", loop.told[0][1])]
    loop.lines.tick(lifelines_module.READ_S + 1)
    answer, descriptors = other.receive()
    assert (isinstance(answer.message, Memory), len(descriptors)) == (True, 2)
    close_all(descriptors)
    del silent


def test_who_reads_slowly_gets_all(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unread_descriptors, "count_allowed", lambda: 16)
    process = Process(loop)
    process.greet()
    for _ in range(30):
        send_memory(loop, loop.told[0][1])
    for now_s in range(30):
        loop.lines.tick(now_s * (lifelines_module.READ_S - 1))
        answer, descriptors = process.receive()
        assert (isinstance(answer.message, Memory), len(descriptors)) == (True, 2)
        close_all(descriptors)
    assert len(loop.lines) == 1
