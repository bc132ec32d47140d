"""Addresses to listen at: one spelling, and nothing that needs a look-up."""

from __future__ import annotations

import re

import pytest

from kvoffload.config.tcp_address import TcpAddress, parse_tcp_address


@pytest.mark.parametrize(
    ("text", "host", "is_loopback"),
    [
        ("tcp://127.0.0.1:5555", "127.0.0.1", True),
        ("tcp://127.255.0.9:0", "127.255.0.9", True),
        ("tcp://[::1]:65535", "::1", True),
        ("tcp://0.0.0.0:1", "0.0.0.0", False),
        ("tcp://[::]:1", "::", False),
        ("tcp://10.0.0.7:5555", "10.0.0.7", False),
        ("tcp://128.0.0.1:5555", "128.0.0.1", False),
        ("tcp://[fe80::1]:5555", "fe80::1", False),
        ("tcp://[::ffff:127.0.0.1]:5555", "::ffff:127.0.0.1", False),
        ("tcp://[::127.0.0.1]:5555", "::7f00:1", False),
    ],
)
def test_an_address_is_loopback_or_not(text: str, host: str, is_loopback: bool) -> None:
    address = parse_tcp_address(text)
    # Python versions spell a mapped address in two ways.
    assert address.host == host or address.host == "::ffff:7f00:1"
    assert address.is_loopback is is_loopback
    assert parse_tcp_address(str(address)) == address


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "not an address with its port"),
        ("127.0.0.1:5555", "not an address with its port"),
        ("tcp://localhost:5555", "not an address with its port"),
        ("tcp://*:5555", "not an address with its port"),
        ("tcp://127.0.0.1", "not an address with its port"),
        ("tcp://127.0.0.1:5555/x", "not an address with its port"),
        ("tcp://127.0.0.1:5555\n", "not an address with its port"),
        ("tcp://::1:5555", "not an address with its port"),
        ("ipc://127.0.0.1:5555", "not an address with its port"),
        ("tcp://127.1:5555", "127.1 is no address"),
        ("tcp://127.0.0.01:5555", "127.0.0.01 is no address"),
        ("tcp://[127.0.0.1]:5555", "127.0.0.1 is no address"),
        ("tcp://[1::2::3]:5555", "1::2::3 is no address"),
        ("tcp://127.0.0.1:65536", "there is no port 65536"),
    ],
)
def test_everything_else_is_refused(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=re.escape(reason)) as found:
        parse_tcp_address(text)
    assert str(found.value) == reason


def test_an_address_is_a_value() -> None:
    assert TcpAddress("::1", 5) == parse_tcp_address("tcp://[0:0:0:0:0:0:0:1]:5")
