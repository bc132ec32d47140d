"""A server's core on a small cache, and one engine that has joined it. Files that need more make their own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.kit.server.harness import Client, Server


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as made:
        yield made


@pytest.fixture
def engine(server: Server) -> Client:
    return server.process().join()
