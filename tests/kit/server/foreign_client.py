"""A client made from docs/protocol.md alone, as one in another language would be: sockets, ZeroMQ, msgpack, mmap.

    python foreign_client.py SOCKET ENGINE save|load COUNT

`save` writes COUNT blocks, of which block i is full of byte i + 1; `load` finds, checks and releases them.
"""

from __future__ import annotations

import array
import hashlib
import mmap
import os
import socket
import sys

import msgpack
import zmq

RECORD_BYTES, BLOCK_TOKENS = 8192, 16
HELLO, REGISTER, BYE, ACQUIRE, CREDITS, MARK = 1, 2, 3, 4, 6, 11
PUBLISH, RELEASE, GREETING = 32, 34, 48
ERROR, WELCOME, MEMORY, EXPRESS = 64, 112, 113, 117
WORKER, PREFIX, HIT = 1, 0, 0


def numbers(data: bytes) -> list[int]:
    return [int.from_bytes(data[at : at + 8], "little") for at in range(0, len(data), 8)]


class Client:
    def __init__(self, path: str, engine: str) -> None:
        self.lifeline = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.lifeline.connect(path)
        pidfd = os.pidfd_open(os.getpid())
        greeting = msgpack.packb([GREETING, 1, 0, 0, 1, 1, engine, WORKER, 0, 0, 0, "", 0, 0, "", True])
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [pidfd]))]
        self.lifeline.sendmsg([greeting], rights)
        os.close(pidfd)
        answer, _ = self.receive_packet()
        if answer[0] != WELCOME:
            raise SystemExit(f"refused: {answer}")
        self.boot_id, self.session, endpoint = answer[2], answer[4], answer[6]
        self.segments = self.receive_memory()
        self.control = zmq.Context().socket(zmq.DEALER)
        self.control.connect(endpoint)
        self.requests = self.block_requests = self.one_way = 0

    def receive_packet(self) -> tuple[list, list[int]]:
        data, beside, _, _ = self.lifeline.recvmsg(65536, socket.CMSG_SPACE(253 * 4), socket.MSG_CMSG_CLOEXEC)
        files = array.array("i")
        for _, _, content in beside:
            files.frombytes(content)
        return msgpack.unpackb(data), list(files)

    def receive_memory(self) -> list[mmap.mmap]:
        segments: list[mmap.mmap] = []
        while True:
            answer, files = self.receive_packet()
            if answer[0] != MEMORY:
                raise SystemExit(f"no memory came: {answer}")
            _, _, _, _, total, first, sizes = answer[:7]
            if first == 0:
                files = files[2:]  # lock and index stay open, which keeps the memory for an adoption
            segments += [mmap.mmap(file, size) for file, size in zip(files, numbers(sizes), strict=True)]
            if len(segments) == total:
                return segments

    def ask(self, op: int, *fields: object) -> list:
        self.requests += 1
        self.control.send(msgpack.packb([op, self.requests, self.session, 0, *fields]))
        if not self.control.poll(30_000):
            raise SystemExit(f"no answer to operation {op}")
        return self.check(msgpack.unpackb(self.control.recv()), self.requests)

    def check(self, answer: list, number: int) -> list:
        if answer[2] != self.boot_id:
            raise SystemExit("the server has changed")
        if answer[0] == ERROR or answer[1] != number:
            raise SystemExit(f"error: {answer[4]}")
        return answer[3:]

    def ask_of_blocks(self, op: int, *fields: object) -> list:
        self.block_requests += 1
        self.send_of_blocks(op, self.block_requests, *fields)
        size = int.from_bytes(self.blocks.read(4), "little")
        return self.check(msgpack.unpackb(self.blocks.read(size)), self.block_requests)

    def tell_of_blocks(self, op: int, *fields: object) -> None:
        self.one_way += 1
        self.send_of_blocks(op, self.one_way, *fields)

    def send_of_blocks(self, op: int, number: int, *fields: object) -> None:
        frame = msgpack.packb([op, number, self.session, 0, *fields])
        self.blocks.write(len(frame).to_bytes(4, "little") + frame)
        self.blocks.flush()

    def register(self) -> None:
        self.ask(HELLO, 1, 1)
        groups = [[RECORD_BYTES, BLOCK_TOKENS, PREFIX]]
        fingerprint = hashlib.sha256(b"a model").digest()
        self.name_space = self.ask(REGISTER, fingerprint, "sha256", b"", BLOCK_TOKENS, groups)[0]
        answer, files = self.receive_packet()
        assert answer[0] == EXPRESS, answer
        self.blocks = socket.socket(fileno=files[0]).makefile("rwb")

    def view(self, address: int) -> memoryview:
        size = len(self.segments[0])
        return memoryview(self.segments[address // size])[address % size : address % size + RECORD_BYTES]


def chain(count: int) -> list[bytes]:
    hashes = [hashlib.sha256(b"the first block").digest()]
    while len(hashes) < count:
        hashes.append(hashlib.sha256(hashes[-1]).digest())
    return hashes


def save(client: Client, hashes: list[bytes]) -> None:
    tickets, addresses = client.ask_of_blocks(CREDITS, client.name_space, 0, len(hashes))[:2]
    for place, address in enumerate(numbers(addresses)):
        client.view(address)[:] = bytes([place + 1]) * RECORD_BYTES
    parents = b"".join([bytes(32), *hashes[:-1]])
    client.tell_of_blocks(PUBLISH, client.name_space, 0, 0, tickets, b"".join(hashes), parents)


def load(client: Client, hashes: list[bytes]) -> None:
    outcome, boundary, lease, groups = client.ask_of_blocks(ACQUIRE, client.name_space, b"".join(hashes))[:4]
    if outcome != HIT or boundary != len(hashes) * BLOCK_TOKENS:
        raise SystemExit(f"outcome {outcome}, boundary {boundary}")
    ((first, addresses, *_),) = groups
    for place, address in enumerate(numbers(addresses)):
        if bytes(client.view(address)) != bytes([first + place + 1]) * RECORD_BYTES:
            raise SystemExit(f"block {place} has other bytes")
    client.tell_of_blocks(RELEASE, lease.to_bytes(8, "little"))


def main() -> None:
    path, engine, what, count = sys.argv[1:]
    client = Client(path, engine)
    client.register()
    {"save": save, "load": load}[what](client, chain(int(count)))
    client.ask_of_blocks(MARK)
    client.ask(BYE, 0)
    assert not any(name.startswith("kvoffload") for name in sys.modules)
    print(f"{what} of {count} blocks is done")


if __name__ == "__main__":
    main()
