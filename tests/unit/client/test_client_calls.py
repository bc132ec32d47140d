"""The common part of both clients: their state and look-ups."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvoffload.cache import Ask
from kvoffload.client import AsyncClient, Client, LinkState
from tests.kit.cache.offload_contract import CHAIN
from tests.unit.client.conftest import make_settings


@pytest.mark.parametrize("kind", [Client, AsyncClient])
async def test_a_client_that_was_not_started_sends_nothing(
    kind: type[Client] | type[AsyncClient], tmp_path: Path
) -> None:
    client = kind(make_settings(tmp_path / "nobody"))
    assert (client.link.state, client.is_served, client.fault, client.link.refusal) == (LinkState.DOWN, False, "", None)
    assert (client.link.boot_id, client.memory_id) == (0, 0)
    assert not client.lookup(0, CHAIN).any()
    assert client.find_boundary(Ask(CHAIN, local=16)) == 16
    with pytest.raises(ValueError, match="not mapped here"):
        client.memory(7)
    closing = client.close()
    if closing is not None:
        await closing
