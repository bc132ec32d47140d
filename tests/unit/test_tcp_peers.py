"""The name of the user or address at the other end of a TCP connection."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from kvoffload.tcp_peers import name_peer
from tests.kit.children import child

OTHER_USER = 64_004
CLIENT = """
import os, socket, sys
os.setuid(int(sys.argv[1]))
made = socket.socket()
made.bind((sys.argv[2], 0))
made.connect(("127.0.0.1", int(sys.argv[3])))
print("connected", flush=True)
sys.stdin.read()
"""


def far(host: str) -> SimpleNamespace:
    """A connection from elsewhere."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    own = "2001:db8::1" if ":" in host else "192.0.2.1"
    return SimpleNamespace(family=family, getpeername=lambda: (host, 999), getsockname=lambda: (own, 5555))


@contextmanager
def listening() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as made:
        yield made


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start processes of other users")
@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9"])
def test_on_this_machine_it_is_a_user(host: str) -> None:
    with listening() as listener:
        port = str(listener.getsockname()[1])
        with child(["-c", CLIENT, str(OTHER_USER), host, port], says="connected"), listener.accept()[0] as accepted:
            assert name_peer(accepted) in (f"user {OTHER_USER}", "loopback")


def test_one_that_has_gone_is_no_user() -> None:
    with listening() as listener:
        socket.create_connection(listener.getsockname()).close()
        with listener.accept()[0] as accepted:
            assert name_peer(accepted) == "loopback"


def test_where_the_kernel_does_not_tell_all_of_loopback_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "AF_NETLINK", 9999)
    with listening() as listener, socket.create_connection(listener.getsockname(), source_address=("127.1.2.3", 0)):
        assert name_peer(listener.accept()[0]) == "loopback"


def test_elsewhere_it_is_an_address_or_a_network() -> None:
    assert name_peer(far("198.51.100.7")) == "198.51.100.7"
    assert name_peer(far("2001:db8:1:2::3")) == name_peer(far("2001:db8:1:2:ffff::4")) == "2001:db8:1:2::/64"
    assert name_peer(far("2001:db8:1:3::3")) != name_peer(far("2001:db8:1:2::3"))
