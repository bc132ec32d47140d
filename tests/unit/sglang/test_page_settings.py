"""The stand-in for a client has the calls of a client, and the settings say which digests are wanted."""

from __future__ import annotations

import pytest

from kvoffload.client import Client
from kvoffload.sglang.held_pages import PoolSettings
from kvoffload.sglang.page_settings import PageSettings
from tests.kit.sglang.linked import SessionCache

OF_TESTS = ("record",)
"""Calls of the stand-in for tests alone."""


def test_a_client_has_all_that_a_linker_asks_for() -> None:
    asked = [name for name in vars(SessionCache) if not name.startswith("_") and name not in OF_TESTS]
    assert len(asked) > 10
    assert [name for name in asked if not hasattr(Client, name)] == []


@pytest.mark.parametrize("verify_always", [False, True])
def test_digests_are_wanted_where_loads_are_verified(verify_always: bool) -> None:
    settings = PageSettings(
        page_size=4,
        groups=(PoolSettings(record_bytes=8, page_rows=4),),
        fingerprint=b"f" * 32,
        verify_always=verify_always,
    )
    assert settings.shards == ((0,) if verify_always else ())
