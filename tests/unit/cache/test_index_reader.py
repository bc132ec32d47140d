"""Looking up from another process, while the writer lives and after its death."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import numpy as np
import pytest

from kvoffload.cache import Ask, IndexReader, LocalCache
from tests.kit.cache.cache_model import HYBRID, PLAIN, SMALL, block_hashes, fingerprint, make_chain
from tests.kit.cache.chains import save_chain

READER = """
import socket, sys
from kvoffload.cache import Ask, IndexReader
from tests.kit.cache.cache_model import make_chain

channel = socket.socket(fileno=int(sys.argv[1]))
_, files, _, _ = socket.recv_fds(channel, 1, 1)
reader = IndexReader(files[0])
while channel.recv(1):
    found = reader.lookup(0, 0, make_chain(1, 10))
    boundary = reader.find_boundary(0, Ask(make_chain(1, 10)))
    channel.send(bytes([int(found.sum()), boundary // 16]))
"""


def test_another_process_sees_each_change_without_a_message_from_the_cache() -> None:
    ours, theirs = socket.socketpair()
    arguments = [sys.executable, "-c", READER, str(theirs.fileno())]
    with LocalCache.create(SMALL) as cache, ours, subprocess.Popen(arguments, pass_fds=[theirs.fileno()]) as reader:
        theirs.close()
        file = cache.open_index()
        socket.send_fds(ours, [b"x"], [file])
        os.close(file)

        def ask() -> tuple[int, int]:
            ours.send(b"?")
            return tuple(ours.recv(2))  # type: ignore[return-value]

        name_space = cache.open_namespace(fingerprint("a"), PLAIN)
        session = cache.open_session()
        assert ask() == (0, 0)
        save_chain(cache, session, name_space, make_chain(1, 8))
        assert ask() == (8, 8)
        names = block_hashes(make_chain(1, 8), PLAIN, 0)
        cache.invalidate(name_space, 0, names[5])
        assert ask() == (7, 5)
        cache.clear(name_space)
        assert ask() == (0, 0)
        ours.shutdown(socket.SHUT_WR)
        assert reader.wait() == 0


def test_a_reader_outlives_the_cache() -> None:
    cache = LocalCache.create(SMALL)
    name_space = cache.open_namespace(fingerprint("a"), PLAIN)
    save_chain(cache, cache.open_session(), name_space, make_chain(1, 8))
    reader = IndexReader(cache.open_index())
    version, boot_id = reader.version, reader.boot_id
    cache.close()
    assert reader.find_boundary(name_space, Ask(make_chain(1, 9))) == 8 * 16
    assert (reader.version, reader.boot_id) == (version, boot_id)


def test_an_identity_that_is_new_to_the_reader_is_known_when_it_is_asked_for() -> None:
    with LocalCache.create(SMALL) as cache:
        reader = IndexReader(cache.open_index())
        with pytest.raises(ValueError, match="no namespace has number 0"):
            reader.find_boundary(0, Ask(make_chain(1, 1)))
        first = cache.open_namespace(fingerprint("a"), PLAIN)
        second = cache.open_namespace(fingerprint("b"), HYBRID)
        assert [reader.find_boundary(number, Ask(make_chain(1, 4))) for number in (first, second)] == [0, 0]


def test_a_descriptor_of_something_else_is_refused() -> None:
    read_end, write_end = os.pipe()
    os.close(write_end)
    with pytest.raises(ValueError, match="index file"):
        IndexReader(read_end)
    memory = os.memfd_create("not-an-index", os.MFD_CLOEXEC)
    os.ftruncate(memory, 4096)
    with pytest.raises((ValueError, RuntimeError)):
        IndexReader(memory)


def test_a_forked_child_may_go_on_reading() -> None:
    with LocalCache.create(SMALL) as cache:
        name_space = cache.open_namespace(fingerprint("a"), PLAIN)
        save_chain(cache, cache.open_session(), name_space, make_chain(1, 8))
        reader = IndexReader(cache.open_index())
        child = os.fork()
        if child == 0:
            os._exit(0 if bool(np.all(reader.lookup(name_space, 0, make_chain(1, 8)))) else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
