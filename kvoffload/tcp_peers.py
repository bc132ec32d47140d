"""Names who is at the other end of a TCP connection, so that places can be shared out."""

from __future__ import annotations

import ipaddress
import socket
import struct
from typing import Protocol

_SOCK_DIAG = 4
"""The kernel's netlink protocol that describes sockets."""
_DIAG_BY_FAMILY, _REQUEST = 20, 1
_ANY = 2**32 - 1
_ESTABLISHED = 1
_STATE_AT, _USER_AT = 17, 80
"""Where the kernel's answer has a socket's state and user, behind 16 bytes of head."""
_ANSWER_BYTES = 88


class Connected(Protocol):
    """The part of a socket that is needed here, which asyncio's sockets have too."""

    @property
    def family(self) -> int: ...
    def getpeername(self) -> tuple[str, int]: ...
    def getsockname(self) -> tuple[str, int]: ...


def name_peer(connected: Connected) -> str:
    """Returns the user at the other end if it is on this machine and the kernel tells, else the address. All addresses
    of one IPv6 network, and all of loopback, are one name: a machine can have as many of those as it likes.

    OSError: the connection is gone.
    """
    peer, own = connected.getpeername(), connected.getsockname()
    user = _find_user(connected.family, peer, own)
    if user is not None:
        return f"user {user}"
    address = ipaddress.ip_address(peer[0].partition("%")[0])
    if address.is_loopback:
        return "loopback"
    if address.version == 6:
        return str(ipaddress.ip_network((address, 64), strict=False))
    return str(address)


def _find_user(family: int, peer: tuple[str, int], own: tuple[str, int]) -> int | None:
    """Returns the user of the socket at the other end, or None if it is not on this machine or may not be asked for."""
    ends = (socket.inet_pton(family, one[0].partition("%")[0]).ljust(16, b"\0") for one in (peer, own))
    asked = struct.pack("=BBBxI", family, socket.IPPROTO_TCP, 0, _ANY)
    asked += struct.pack(">HH", peer[1], own[1]) + b"".join(ends) + struct.pack("=III", 0, _ANY, _ANY)
    head = struct.pack("=IHHII", 16 + len(asked), _DIAG_BY_FAMILY, _REQUEST, 1, 0)
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK, _SOCK_DIAG) as kernel:
            kernel.send(head + asked)
            answer = kernel.recv(4096)
    except OSError:
        return None
    # The kernel does not know the user of a socket that its process has closed.
    if len(answer) < _ANSWER_BYTES or answer[_STATE_AT] != _ESTABLISHED:
        return None
    (user,) = struct.unpack_from("=I", answer, _USER_AT)
    return int(user)
