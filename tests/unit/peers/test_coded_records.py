"""Records go over a link as they are, or coded where that was agreed on, and are the same bytes in either case."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from kvoffload import native
from kvoffload.peers import coded_records
from kvoffload.peers.coded_records import receive_records, send_records
from kvoffload.peers.requests import CODE, pack_code
from kvoffload.tiers.base import Digests
from kvoffload.tiers.record_coder import Coding, RecordCoder
from tests.kit.tiers.tier_contract import Records

RECORD_BYTES = 20_000
COUNT = 4
TIMEOUT_S = 30.0


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, native.RecordLink]]:
    """Yields a socket on which all can be seen that a link sends, and the link."""
    ours, theirs = socket.socketpair()
    with ours:
        yield ours, native.RecordLink(theirs.detach(), None)


def numbers(count: int = COUNT) -> Records:
    return Records(0, count, RECORD_BYTES, filled=True, has_numbers=True)


def send(link: native.RecordLink, records: Records, coder: RecordCoder, *, may_code: bool = True) -> None:
    send_records(
        link,
        records.slots,
        RECORD_BYTES,
        head=pack_code,
        coder=coder,
        group=0,
        may_code=may_code,
        timeout_s=TIMEOUT_S,
    )


def receive(said: bytes, *, code: int, coder: RecordCoder) -> tuple[Records, Digests]:
    """Receives records from a peer that says that."""
    ours, theirs = socket.socketpair()
    read = Records(0, COUNT, RECORD_BYTES, filled=False)
    writing = threading.Thread(target=theirs.sendall, args=(said,))
    writing.start()
    link = native.RecordLink(ours.detach(), None)
    try:
        digests = receive_records(
            link,
            read.names,
            read.slots,
            RECORD_BYTES,
            claimed=numbers().digests,
            code=code,
            coder=coder,
            timeout_s=TIMEOUT_S,
        )
    finally:
        writing.join()
        theirs.close()
    return read, digests


def read_all(
    end: socket.socket, link: native.RecordLink, records: Records, coder: RecordCoder, **settings: bool
) -> bytes:
    """Sends records, and returns what has gone over the wire."""
    said = bytearray()

    def read() -> None:
        while part := end.recv(1 << 16):
            said.extend(part)

    reading = threading.Thread(target=read)
    reading.start()
    send(link, records, coder, **settings)
    link.shut()
    reading.join()
    return bytes(said)


def cut(said: bytes) -> list[tuple[int, bytes]]:
    """Each record as it was sent: the length of its code or 0, and its bytes."""
    at, found = struct.calcsize("<I"), []
    while at < len(said):
        (length,) = struct.unpack_from("<I", said, at)
        size = length or RECORD_BYTES
        found.append((length, said[at + 4 : at + 4 + size]))
        at += 4 + size
    return found


def test_coded_records_are_fewer_bytes_on_the_wire_and_the_same_in_memory(
    ends: tuple[socket.socket, native.RecordLink],
) -> None:
    sender, receiver = RecordCoder(Coding.ON), RecordCoder(Coding.ON)
    said = read_all(*ends, numbers(), sender)
    assert said[:4] == pack_code(CODE)
    assert len(said) < 0.8 * COUNT * RECORD_BYTES
    read, digests = receive(said[4:], code=CODE, coder=receiver)
    assert np.array_equal(read.memory, numbers().memory)
    assert digests.tolist() == numbers().digests.tolist()
    assert sender.counts == receiver.counts
    assert sender.counts == {
        "coded_records": COUNT,
        "coded_bytes": COUNT * RECORD_BYTES,
        "coded_stored_bytes": len(said) - 4 - 4 * COUNT,
    }


@pytest.mark.parametrize(
    ("coding", "may_code", "has_numbers"),
    [
        (Coding.OFF, True, True),
        (Coding.ON, False, True),
        (Coding.ON, True, False),
    ],
    ids=["off", "not agreed on", "no shorter"],
)
def test_what_is_not_coded_goes_as_it_is_and_in_one_call(
    ends: tuple[socket.socket, native.RecordLink], coding: Coding, may_code: bool, has_numbers: bool
) -> None:
    records = Records(0, COUNT, RECORD_BYTES, filled=True, has_numbers=has_numbers)
    coder = RecordCoder(coding)
    said = read_all(*ends, records, coder, may_code=may_code)
    assert said == pack_code(0) + records.memory.tobytes()
    read, _ = receive(said[4:], code=0, coder=coder)
    assert np.array_equal(read.memory, records.memory)
    assert coder.counts == {}


def test_a_record_that_becomes_no_shorter_goes_as_it_is_among_others(
    ends: tuple[socket.socket, native.RecordLink],
) -> None:
    records = numbers()
    records.memory[2] = Records(9, 1, RECORD_BYTES, filled=True).memory[0]
    said = read_all(*ends, records, RecordCoder(Coding.ON))
    lengths = [length for length, _ in cut(said)]
    assert [length == 0 for length in lengths] == [False, False, True, False]
    read, _ = receive(said[4:], code=CODE, coder=RecordCoder(Coding.ON))
    assert np.array_equal(read.memory, records.memory)


def test_coding_that_takes_too_long_ends_and_the_rest_goes_as_it_is(
    ends: tuple[socket.socket, native.RecordLink], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coded_records, "CODING_S", 0.0)
    said = read_all(*ends, numbers(), RecordCoder(Coding.ON))
    assert [length == 0 for length, _ in cut(said)] == [False, True, True, True]
    read, _ = receive(said[4:], code=CODE, coder=RecordCoder(Coding.ON))
    assert np.array_equal(read.memory, numbers().memory)


def test_no_records_are_a_head_alone(ends: tuple[socket.socket, native.RecordLink]) -> None:
    assert read_all(*ends, numbers(0), RecordCoder(Coding.ON)) == pack_code(0)


def test_a_spoiled_code_has_another_digest_and_spoils_no_other(ends: tuple[socket.socket, native.RecordLink]) -> None:
    sent = cut(read_all(*ends, numbers(), RecordCoder(Coding.ON)))
    whole = b"".join(struct.pack("<I", length) + data for length, data in sent)
    second = 4 + sent[0][0] + 4
    for at in range(0, sent[1][0], 331):
        said = bytearray(whole)
        said[second + at] ^= 1 << at % 8
        read, digests = receive(bytes(said), code=CODE, coder=RecordCoder(Coding.ON))
        assert (digests == numbers().digests).tolist() == [True, False, True, True]
        assert np.array_equal(read.memory[[0, 2, 3]], numbers().memory[[0, 2, 3]])


def test_a_code_that_lacks_its_end_or_is_of_another_record_is_no_record(
    ends: tuple[socket.socket, native.RecordLink],
) -> None:
    sent = cut(read_all(*ends, numbers(), RecordCoder(Coding.ON)))
    longer = native.RecordEncoder().encode(numbers().memory[0].tobytes() + bytes(64))
    assert longer is not None
    of_another_version = bytes([sent[1][1][0] ^ 0xFF]) + sent[1][1][1:]
    for wrong in (sent[1][1][:-1], sent[1][1] + b"?", sent[2][1], longer, of_another_version, b"?"):
        records = [sent[0][1], wrong, sent[2][1], sent[3][1]]
        said = b"".join(struct.pack("<I", len(data)) + data for data in records)
        _, digests = receive(said, code=CODE, coder=RecordCoder(Coding.ON))
        assert (digests == numbers().digests).tolist() == [True, False, True, True]


@pytest.mark.parametrize("length", [RECORD_BYTES, RECORD_BYTES + 1, 2**32 - 1])
def test_a_code_that_is_longer_than_its_record_ends_the_link(length: int) -> None:
    with pytest.raises(ConnectionError, match=f"codes records of {RECORD_BYTES} bytes in {length}"):
        receive(struct.pack("<I", length), code=CODE, coder=RecordCoder(Coding.ON))


def test_what_is_asked_for_is_coded_though_nothing_is_known_of_the_link(
    ends: tuple[socket.socket, native.RecordLink],
) -> None:
    said = read_all(*ends, numbers(), RecordCoder(Coding.AUTO))
    assert all(length for length, _ in cut(said))


def test_what_was_sent_and_read_is_told(ends: tuple[socket.socket, native.RecordLink]) -> None:
    """Sent by bytes of the wire, so that a link is not taken for faster than it is because fewer bytes went over it;
    read by bytes of records, since it is them that are waited for."""
    told: dict[str, int] = dict.fromkeys(("sent", "plain", "coded"), 0)

    class Seeing(RecordCoder):
        def told_sent(self, size_bytes: int) -> None:
            told["sent"] += size_bytes

        def told_read(self, record_bytes: int, *, decoding_s: float | None = None) -> None:
            told["plain" if decoding_s is None else "coded"] += record_bytes

    said = read_all(*ends, numbers(), Seeing(Coding.ON))
    receive(said[4:], code=CODE, coder=Seeing(Coding.ON))
    assert told == {"sent": len(said) - 4 - 4 * COUNT, "plain": 0, "coded": COUNT * RECORD_BYTES}
    receive(numbers().memory.tobytes(), code=0, coder=Seeing(Coding.ON))
    assert told["plain"] == COUNT * RECORD_BYTES
