"""A server and a store that answer, and some that do not."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from kvoffload.cli.below import choose_tiers
from kvoffload.config.sources import load_settings
from kvoffload.doctor.findings import Finding, Verdict
from kvoffload.doctor.place_checks import check_server, check_shapes, check_stores, describe_shape
from kvoffload.server.config import ServerConfig
from kvoffload.server.tiering.settings import TierPlan
from kvoffload.tiers.base import TierState
from tests.kit.free_ports import free_port
from tests.kit.server.tiers import await_that, serving, traffic_of
from tests.kit.tiers.valkey_server import Server
from tests.kit.web import vllm_blocks

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


def test_a_server_whose_tier_is_absent_says_why(tmp_path: Path) -> None:
    path, port = tmp_path / "s", free_port()
    with serving(path, tiers={"": plan_valkey(port)}) as server:
        await_that(lambda: server.has_memory)
        await_that(lambda: traffic_of(server).health()[0].state is TierState.ABSENT)
        found = check_server(str(path))
    assert found.verdict is Verdict.WARN
    assert f"valkey tier valkey://127.0.0.1:{port}/0 is absent: " in found.text
    assert found.remedy


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


@pytest.mark.parametrize(
    ("ranks", "shards", "text"),
    [
        (1, [1], "1 rank, a block is kept in 1 part"),
        (8, [8, 8], "8 ranks, a block is kept in 8 parts"),
        (4, [4, 2, 4], "4 ranks, a block is kept in 4 parts (groups 0, 2); 2 parts (group 1)"),
    ],
)
def test_a_shape_says_in_how_many_parts_a_block_is_kept(ranks: int, shards: list[int], text: str) -> None:
    row = {"identity": "ab12", "ranks": ranks, "groups": [{"shards": count} for count in shards]}
    assert describe_shape({**row, "made_of": {"model": "m"}}) == f"m ab12: {text}"
    assert describe_shape({**row, "made_of": {}}) == f"ab12: {text}"


def test_shapes_of_engines_are_told_to_who_may_know(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with serving(path) as server:
        await_that(lambda: server.has_memory)
        assert list(check_shapes(str(path))) == []
        with vllm_blocks.engine(path):
            [found] = check_shapes(str(path))
    assert found.verdict is Verdict.OK
    assert "1 rank, a block is kept in 1 part" in found.text
    assert list(check_shapes("")) == list(check_shapes(str(tmp_path / "none"))) == []


def test_engines_that_share_no_blocks_are_a_warning_with_the_setting_that_differs(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with serving(path) as server:
        await_that(lambda: server.has_memory)
        with vllm_blocks.engines_that_differ(path):
            found = [one for one in check_shapes(str(path)) if one.verdict is Verdict.WARN]
    [(check, text)] = [(one.check, one.text) for one in found]
    assert (check, text) == ("engines", "share no blocks: made-up/model: hash_block_tokens 16 and 32")


def plan_valkey(port: int) -> Sequence[TierPlan]:
    settings = load_settings(flags={"valkey": f"valkey://127.0.0.1:{port}"}).settings
    [plans] = choose_tiers(settings, ServerConfig()).values()
    return plans


def check_valkey(port: int) -> Finding:
    [found] = check_stores(plan_valkey(port), TIMEOUT_S)
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
