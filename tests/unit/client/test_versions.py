"""A client one protocol version newer, one older, and one that is too old, at a real server."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvoffload.client import Client, joining
from kvoffload.protocol import ErrorCode
from tests.children import child
from tests.unit.cache.offload_contract import CHAIN, TOKENS, AsAwaited, save
from tests.unit.client.conftest import SERVER, make_terms
from tests.unit.client.test_client import WAIT_S, wait_for

OTHER_SERVER = """
from functools import partial
from kvoffload.daemon import server
server.ServerTerms = partial(server.ServerTerms, protocol_min={0}, protocol_max={1})
"""


@pytest.mark.parametrize(("client_versions", "server_versions"), [((1, 2), (1, 1)), ((1, 1), (1, 2)), ((1, 2), (1, 2))])
async def test_the_highest_version_that_both_have_is_spoken(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    client_versions: tuple[int, int],
    server_versions: tuple[int, int],
) -> None:
    _speak(monkeypatch, *client_versions)
    script = OTHER_SERVER.format(*server_versions) + SERVER
    with child(["-c", script, str(tmp_path / "s"), "0"], says="serves"), Client(make_terms(tmp_path / "s")) as client:
        assert client.wait_until_served(WAIT_S), client.fault
        await save(AsAwaited(client))
        assert client.acquire(CHAIN).boundary == TOKENS


@pytest.mark.parametrize(("client_versions", "server_versions"), [((1, 1), (2, 3)), ((3, 4), (1, 2))])
def test_without_a_common_version_both_are_named(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    client_versions: tuple[int, int],
    server_versions: tuple[int, int],
) -> None:
    _speak(monkeypatch, *client_versions)
    script = OTHER_SERVER.format(*server_versions) + SERVER
    with child(["-c", script, str(tmp_path / "s"), "0"], says="serves"), Client(make_terms(tmp_path / "s")) as client:
        refusal = wait_for(lambda: client.refusal)
        assert (refusal.code, refusal.field) == (ErrorCode.VERSION, "protocol")
        assert all(str(number) in refusal.server_value for number in server_versions)
        assert all(str(number) in refusal.client_value for number in client_versions)
        assert not client.is_served


def _speak(monkeypatch: pytest.MonkeyPatch, first: int, last: int) -> None:
    """What a client of these versions says of itself."""
    monkeypatch.setattr(joining, "PROTOCOL_MIN", first)
    monkeypatch.setattr(joining, "PROTOCOL_MAX", last)
