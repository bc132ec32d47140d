"""The bounds of a server."""

from __future__ import annotations

from dataclasses import astuple

from kvoffload.server import ServerLimits


def test_the_bounds_lie_within_those_of_the_native_core() -> None:
    limits = ServerLimits()
    assert limits.sessions <= 4096
    assert limits.session_processes <= 63
    assert limits.namespaces <= 4096


def test_everything_is_bounded() -> None:
    assert all(limit > 0 for limit in astuple(ServerLimits()))
