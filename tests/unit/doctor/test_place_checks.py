"""A server and a store that answer, and some that do not."""

from __future__ import annotations

from pathlib import Path

from kvoffload.cli.below import choose_tiers
from kvoffload.config.sources import load_settings
from kvoffload.doctor.findings import Finding, Verdict
from kvoffload.doctor.place_checks import check_server, check_stores
from kvoffload.server.config import ServerConfig
from tests.kit.free_ports import free_port
from tests.kit.server.tiers import await_that, serving
from tests.kit.tiers.valkey_server import Server

TIMEOUT_S = 5.0


def test_no_server_is_no_fault() -> None:
    assert check_server("").verdict is Verdict.OK


def test_a_server_that_answers_tells_what_it_has(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with serving(path) as server:
        await_that(lambda: server.has_memory)
        found = check_server(str(path))
    assert found.verdict is Verdict.OK
    assert found.text.startswith(f"{path}: ")
    assert "used" in found.text


def test_a_server_whose_memory_is_still_to_come_is_told(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with serving(path, adopt_wait_s=60):
        found = check_server(str(path))
    assert found.verdict is Verdict.WARN
    assert "the memory is not there yet" in found.text


def test_a_server_that_is_not_there_is_told_how_to_start(tmp_path: Path) -> None:
    path = tmp_path / "s"
    found = check_server(str(path))
    assert found.verdict is Verdict.FAIL
    assert found.text == f"{path} is not there"
    assert found.remedy == f"kvoffload serve --set server={path}"


def test_a_server_that_cannot_be_reached_is_not_to_be_started_again(tmp_path: Path) -> None:
    path = tmp_path / "s"
    path.write_text("")
    found = check_server(str(path))
    assert (found.text, found.remedy) == (f"{path} is no socket", "name another path in `server`")


def check_valkey(port: int) -> Finding:
    settings = load_settings(flags={"valkey": f"valkey://127.0.0.1:{port}"}).settings
    [plans] = choose_tiers(settings, ServerConfig()).values()
    [found] = check_stores(plans, TIMEOUT_S)
    return found


def test_a_store_that_answers_and_one_that_does_not(tmp_path: Path) -> None:
    server = Server(tmp_path)
    server.start()
    try:
        found = check_valkey(server.port)
        assert (found.check, found.verdict) == ("valkey", Verdict.OK)
    finally:
        server.kill()
    port = free_port()
    found = check_valkey(port)
    assert found.verdict is Verdict.FAIL
    assert "refused" in found.text
    assert found.remedy == f"on 127.0.0.1: valkey-server --port {port}"
