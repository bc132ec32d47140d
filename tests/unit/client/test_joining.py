"""Joining: the way to being served, and everything that ends it; no descriptor is lost on any of them."""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
import pytest

from kvoffload.client.joining import HeldMemory, Joining, Member, OnControl, OnLifeline, Step, ToSend
from kvoffload.protocol import (
    Adopt,
    AdoptAnswer,
    AdoptVerdict,
    Answer,
    Closing,
    ClosingReason,
    Error,
    ErrorCode,
    Greeting,
    GroupTerms,
    Hello,
    HelloAccepted,
    Memory,
    Offer,
    Register,
    Registered,
    Role,
    ServerMessage,
    Welcome,
)
from kvoffload.types import ReuseRule

BOOT_ID, FORMER_BOOT_ID = 11, 10
WORKER = Member(engine="engine", role=Role.WORKER, rank=1, pid=7, uid=8)
REGISTER = Register(
    fingerprint=bytes(32),
    hash_algorithm="sha256",
    hash_seed=b"",
    hash_block_size=16,
    groups=(GroupTerms(record_bytes=4096, block_size=16, reuse=ReuseRule.PREFIX),),
)
WELCOME = Welcome(protocol=1, session=5, domain="", control="ipc:///x")
ACCEPTED = HelloAccepted(protocol=1, capabilities=("adopt", "events"), domain="")
REGISTERED = Registered(name_space=3)


@pytest.fixture(autouse=True)
def _no_descriptor_is_lost() -> Iterator[None]:
    before = set(os.listdir("/proc/self/fd"))
    yield
    assert set(os.listdir("/proc/self/fd")) <= before


def new_files(count: int) -> list[int]:
    return [os.open(os.devnull, os.O_RDONLY) for _ in range(count)]


def memory(segments: int, first: int, count: int, *, adopted: int = 0) -> Memory:
    sizes = np.full(count, 1 << 20, "<u8").tobytes()
    return Memory(index_bytes=4096, segments=segments, first=first, segment_sizes=sizes, adopted_boot_id=adopted)


def on_lifeline(joining: Joining, message: ServerMessage, files: int = 0, number: int = 1) -> list[ToSend]:
    return joining.on_lifeline(Answer(message, number, BOOT_ID), new_files(files))


def on_control(joining: Joining, message: ServerMessage, boot_id: int = BOOT_ID) -> list[ToSend]:
    return joining.on_control(Answer(message, 1, boot_id))


def greeted(former: HeldMemory | None = None, member: Member = WORKER) -> Joining:
    joining = Joining(member, None if member.role is Role.OBSERVER else REGISTER, former=former)
    joining.start(0)
    (hello,) = on_lifeline(joining, WELCOME, files=1)
    assert isinstance(hello, OnControl)
    assert isinstance(hello.message, Hello)
    return joining


def held_memory(segments: int) -> HeldMemory:
    """Numbers of descriptors that are never used as such."""
    files = tuple(range(1000, 1000 + segments))
    return HeldMemory(
        boot_id=FORMER_BOOT_ID,
        session=99,
        lock=900,
        index=901,
        index_bytes=4096,
        segments=files,
        segment_sizes=(1 << 20,) * segments,
    )


def take_and_close(joining: Joining) -> HeldMemory:
    held = joining.take_memory()
    assert held is not None
    for file in (held.lock, held.index, *held.segments):
        os.close(file)
    return held


def test_a_worker_greets_says_hello_maps_and_registers() -> None:
    joining = Joining(WORKER, REGISTER)
    (greeting,) = joining.start(4)
    assert isinstance(greeting, OnLifeline)
    assert greeting.descriptors == (4,)
    assert isinstance(greeting.message, Greeting)
    assert (greeting.message.engine, greeting.message.rank, greeting.message.former_session) == ("engine", 1, 0)
    on_lifeline(joining, WELCOME)
    assert on_lifeline(joining, memory(3, 0, 2), files=4) == []
    assert on_control(joining, ACCEPTED) == []
    assert joining.step is Step.MEMORY
    assert on_lifeline(joining, memory(3, 2, 1), files=1, number=2) == [OnControl(REGISTER)]
    assert on_control(joining, REGISTERED) == []
    assert joining.step is Step.EXPRESS
    joining.on_express()
    assert joining.step is Step.JOINED
    held = take_and_close(joining)
    assert (held.boot_id, held.session, len(held.segments), held.segment_sizes) == (BOOT_ID, 5, 3, (1 << 20,) * 3)
    assert not joining.keeps_former


@pytest.mark.parametrize("comes_first", ["memory", "hello"])
def test_memory_and_hello_come_in_any_order(comes_first: str) -> None:
    joining = greeted()
    steps = [lambda: on_lifeline(joining, memory(1, 0, 1), files=3), lambda: on_control(joining, ACCEPTED)]
    for step in steps if comes_first == "memory" else reversed(steps):
        sent = step()
    assert sent == [OnControl(REGISTER)]
    joining.on_express()
    on_control(joining, REGISTERED)
    take_and_close(joining)


def test_an_observer_has_neither_memory_nor_a_register() -> None:
    joining = greeted(member=Member(engine="top", role=Role.OBSERVER))
    assert on_control(joining, ACCEPTED) == []
    assert joining.step is Step.JOINED
    assert joining.take_memory() is None


@pytest.mark.parametrize("segments", [0, 1, 250, 251, 600])
def test_a_new_server_is_offered_what_is_held_in_packets(segments: int) -> None:
    held = held_memory(segments)
    joining = greeted(held)
    (adopt,) = on_control(joining, ACCEPTED)
    assert isinstance(adopt, OnControl)
    sizes = np.full(segments, 1 << 20, "<u8").tobytes()
    assert adopt.message == Adopt(former_boot_id=FORMER_BOOT_ID, index_bytes=4096, segment_sizes=sizes)
    offers = on_control(joining, AdoptAnswer(verdict=AdoptVerdict.WANTED))
    sent: list[int] = []
    for offer in offers:
        assert isinstance(offer, OnLifeline)
        assert isinstance(offer.message, Offer)
        assert len(offer.descriptors) <= 253
        assert offer.message.first == max(len(sent) - 2, 0)
        assert offer.message.is_last == (offer is offers[-1])
        sent += offer.descriptors
    assert sent == [900, 901, *held.segments]
    assert on_lifeline(joining, memory(1, 0, 1, adopted=FORMER_BOOT_ID), files=3) == [OnControl(REGISTER)]
    joining.on_express()
    on_control(joining, REGISTERED)
    assert joining.keeps_former
    take_and_close(joining)
    assert joining.keeps_former


@pytest.mark.parametrize("verdict", [v for v in AdoptVerdict if v is not AdoptVerdict.WANTED])
def test_what_is_not_wanted_is_replaced(verdict: AdoptVerdict) -> None:
    joining = greeted(held_memory(2))
    on_control(joining, ACCEPTED)
    assert on_control(joining, AdoptAnswer(verdict=verdict)) == []
    assert on_lifeline(joining, memory(1, 0, 1), files=3) == [OnControl(REGISTER)]
    joining.on_express()
    on_control(joining, REGISTERED)
    assert not joining.keeps_former
    take_and_close(joining)


def test_memory_that_came_before_the_verdict_is_the_servers_own() -> None:
    joining = greeted(held_memory(2))
    on_control(joining, ACCEPTED)
    assert on_lifeline(joining, memory(1, 0, 1), files=3) == []
    assert on_control(joining, AdoptAnswer(verdict=AdoptVerdict.HAS_MEMORY)) == [OnControl(REGISTER)]
    joining.close()


def test_an_answer_that_comes_after_the_memory_asks_for_nothing() -> None:
    """The server wanted the old memory, and then its own was there first."""
    joining = greeted(held_memory(1))
    on_control(joining, ACCEPTED)
    assert on_lifeline(joining, memory(1, 0, 1), files=3) == []
    assert on_control(joining, AdoptAnswer(verdict=AdoptVerdict.WANTED)) == [OnControl(REGISTER)]
    joining.on_express()
    on_control(joining, REGISTERED)
    take_and_close(joining)


def test_nothing_is_offered_to_a_server_that_has_memory_or_cannot_adopt() -> None:
    has_memory = greeted(held_memory(2))
    on_lifeline(has_memory, memory(1, 0, 1), files=3)
    assert on_control(has_memory, ACCEPTED) == [OnControl(REGISTER)]
    has_memory.close()
    cannot = greeted(held_memory(2))
    assert on_control(cannot, HelloAccepted(protocol=1, capabilities=(), domain="")) == []
    assert cannot.step is Step.MEMORY


def test_the_same_server_keeps_what_is_mapped() -> None:
    held = HeldMemory(
        boot_id=BOOT_ID, session=5, lock=900, index=901, index_bytes=1, segments=(1000,), segment_sizes=(1,)
    )
    joining = greeted(held)
    assert on_control(joining, ACCEPTED) == []
    on_lifeline(joining, memory(1, 0, 1), files=3)
    joining.on_express()
    on_control(joining, REGISTERED)
    assert joining.keeps_former
    take_and_close(joining)


@pytest.mark.parametrize(
    ("message", "files"),
    [
        (memory(2, 1, 1), 1),  # not the first
        (memory(2, 0, 2), 3),  # a descriptor is missing
        (memory(2, 0, 2), 5),  # one too many
        (memory(1, 0, 2), 4),  # more than there are
        (Closing(reason=ClosingReason.ENDED), 0),
        (WELCOME, 1),
        (Error(code=ErrorCode.BUSY, message="no room"), 0),
    ],
)
def test_whatever_else_comes_on_the_lifeline_ends_it(message: ServerMessage, files: int) -> None:
    joining = greeted()
    assert on_lifeline(joining, message, files) == []
    assert joining.step is Step.FAILED
    assert joining.fault
    assert "\n" not in joining.fault
    assert on_lifeline(joining, memory(1, 0, 1), files=3) == []
    assert joining.step is Step.FAILED


def test_a_packet_of_other_memory_ends_it() -> None:
    joining = greeted()
    on_lifeline(joining, memory(3, 0, 1), files=3)
    on_lifeline(joining, memory(4, 1, 1), files=1)
    assert joining.fault == "memory: 1 descriptors for segments from 1 on do not fit"


def test_a_refusal_is_kept_with_what_differs() -> None:
    joining = greeted()
    refusal = Error(code=ErrorCode.MISMATCH, message="register: fingerprint is a here, b there", field="fingerprint")
    on_control(joining, ACCEPTED)
    on_control(joining, refusal)
    assert joining.refusal == refusal
    assert joining.fault == "refused: register: fingerprint is a here, b there"


def test_an_answer_of_another_server_ends_it() -> None:
    joining = greeted()
    on_control(joining, ACCEPTED, boot_id=12)
    assert joining.fault == "control: the server has changed, 0xc answers for 0xb"


def test_an_answer_that_nobody_asked_for_ends_it() -> None:
    joining = greeted()
    joining.on_express()
    on_control(joining, REGISTERED)
    assert joining.fault == "control: Registered came, awaited was hello_accepted"
