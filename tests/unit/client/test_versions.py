"""A client one protocol version newer, one older, and one that is too old, at a real server."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvoffload.cache import Ask
from kvoffload.client import Client, joining
from kvoffload.protocol import Error, ErrorCode
from tests.kit.cache.offload_contract import CHAIN, TOKENS
from tests.kit.cache.offload_contract import save as save_blocks
from tests.kit.children import child
from tests.kit.client.served import WAIT_S, wait_for
from tests.kit.protocol import version_two
from tests.kit.protocol.version_two import CODEC_TWO
from tests.kit.server import express_peer, raw_client
from tests.kit.server.blocks import hashes_of, register_of, save
from tests.kit.server.raw_client import RawClient
from tests.unit.client.conftest import SERVER, make_settings

NEXT_SERVER = """
from kvoffload import wire_codec
from tests.kit.protocol.version_two import CODEC_TWO
wire_codec.CODEC = CODEC_TWO
"""
OTHER_SERVER = """
from functools import partial
from kvoffload.server import loop as server
server.HandshakeSettings = partial(server.HandshakeSettings, protocol_min={0}, protocol_max={1})
"""


@pytest.mark.parametrize(("client_versions", "server_versions"), [((1, 2), (1, 1)), ((1, 1), (1, 2)), ((1, 2), (1, 2))])
def test_the_highest_version_that_both_have_is_spoken(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    client_versions: tuple[int, int],
    server_versions: tuple[int, int],
) -> None:
    _speak(monkeypatch, *client_versions)
    script = OTHER_SERVER.format(*server_versions) + SERVER
    with (
        child(["-c", script, str(tmp_path / "s"), "0"], says="serves"),
        Client(make_settings(tmp_path / "s")) as client,
    ):
        assert client.wait_until_served(WAIT_S), client.fault
        save_blocks(client)
        assert client.acquire(Ask(CHAIN)).boundary == TOKENS


@pytest.mark.parametrize(("client_versions", "server_versions"), [((1, 1), (2, 3)), ((3, 4), (1, 2))])
def test_without_a_common_version_both_are_named(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    client_versions: tuple[int, int],
    server_versions: tuple[int, int],
) -> None:
    _speak(monkeypatch, *client_versions)
    script = OTHER_SERVER.format(*server_versions) + SERVER
    with (
        child(["-c", script, str(tmp_path / "s"), "0"], says="serves"),
        Client(make_settings(tmp_path / "s")) as client,
    ):
        refusal = wait_for(lambda: client.link.refusal)
        assert (refusal.code, refusal.field) == (ErrorCode.VERSION, "protocol")
        assert all(str(number) in refusal.server_value for number in server_versions)
        assert all(str(number) in refusal.client_value for number in client_versions)
        assert client.fault.startswith("the server has no version of the protocol that we have: ")
        assert not client.is_served


def _speak(monkeypatch: pytest.MonkeyPatch, first: int, last: int) -> None:
    """Makes clients say that they have these versions."""
    monkeypatch.setattr(joining, "PROTOCOL_MIN", first)
    monkeypatch.setattr(joining, "PROTOCOL_MAX", last)


def test_both_speak_what_they_agreed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _speak(monkeypatch, 1, 2)
    for newest in (1, 2):
        path = tmp_path / str(newest)
        with child(["-c", OTHER_SERVER.format(1, newest) + SERVER, str(path), "0"], says="serves"):
            client = RawClient(path, register_of())
            assert client.joining.accepted is not None
            assert client.joining.accepted.protocol == newest
            client.close()


def test_what_the_next_version_adds_does_no_harm_to_this_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (raw_client, express_peer):
        monkeypatch.setattr(module, "CODEC", CODEC_TWO)
    with child(["-c", SERVER, str(tmp_path / "s"), "0"], says="serves"):
        client = RawClient(tmp_path / "s", register_of())
        save(client, hashes_of(3), 5)
        found = client.ask(version_two.Acquire(name_space=client.name_space, chain=hashes_of(3), priority=9))
        assert isinstance(found, version_two.Acquired)
        assert [group.age_s for group in found.groups] == [0]
        refused = client.ask(version_two.Pin(lease=found.lease))
        assert isinstance(refused, Error)
        assert refused.code is ErrorCode.UNKNOWN_OPERATION
        client.close()


def test_a_client_of_today_is_served_by_the_next_version(tmp_path: Path) -> None:
    path, script = tmp_path / "s", NEXT_SERVER + OTHER_SERVER.format(1, 2) + SERVER
    with child(["-c", script, str(path), "0"], says="serves"), Client(make_settings(path)) as client:
        assert client.wait_until_served(WAIT_S), client.fault
        save_blocks(client)
        assert client.acquire(Ask(CHAIN)).boundary == TOKENS
