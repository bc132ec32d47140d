"""`kvoffload inspect` at a server that works."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvoffload.cli.inspect import say_basis
from kvoffload.client import HintSettings
from kvoffload.protocol import HintAction
from tests.kit.cli.commands import run
from tests.kit.server.tiers import await_that, counts_of, disk_below, serving
from tests.kit.web import vllm_blocks
from tests.kit.web.prompt_load import BLOCK, PromptLoad

BLOCKS = 4


class Place:
    """A server with a disk, and one prompt of an engine in it."""

    def __init__(self, socket: Path, load: PromptLoad) -> None:
        self.flags = ("--set", f"server={socket}")
        self.load = load

    def ask(self, *words: str) -> list[dict[str, Any]]:
        done = run("inspect", *words, "--json", *self.flags)
        assert done.returncode == 0, done.stderr
        return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    path = tmp_path_factory.mktemp("inspect")
    (path / "disk").mkdir(mode=0o700)
    with serving(path / "s", tiers={"": [disk_below(path / "disk")]}) as server:
        await_that(lambda: server.has_memory)
        load = PromptLoad(path / "s")
        load.turn()
        stored = load.client.stats().readable
        await_that(lambda: counts_of(server)["written"] == stored)
        yield Place(path / "s", load)
        load.close()


def test_who_is_joined(place: Place) -> None:
    rows = {row["engine"]: row for row in place.ask("sessions")}
    engine = rows["made-up/model-8b 1"]
    assert (engine["role"], engine["state"], rows["inspect"]["role"]) == ("scheduler", "open", "observer")
    shown = run("inspect", "sessions", *place.flags)
    assert "made-up/model-8b 1" in shown.stdout
    assert "\x1b" not in shown.stdout


def test_agents_sessions(place: Place) -> None:
    assert place.ask("agents") == []
    assert "no request has named a session yet" in run("inspect", "agents", *place.flags).stdout


def test_identities(place: Place) -> None:
    [row] = place.ask("identities")
    assert row["made_of"] == {"model": "made-up/model-8b"}
    assert row["groups"][0]["record_bytes"] == 64 << 10
    shown = run("inspect", "identities", *place.flags).stdout
    assert "65,536 bytes a block of 16 tokens, reuse by prefix" in shown
    assert re.search(r"model +made-up/model-8b", shown)


def test_what_was_registered(place: Place) -> None:
    for words in ([], [place.load.engine]):
        assert run("inspect", "report", *words, *place.flags).stdout == "this engine is made up: it has no tensors\n"


def test_what_is_retained(place: Place) -> None:
    assert run("inspect", "retained", *place.flags).stdout == "nothing is retained\n"
    client = place.load.client
    chain = bytes.fromhex("".join(row["hash"] for row in place.ask("blocks")))[:32]
    pending = client.start_hint(HintSettings(action=HintAction.RETAIN, chain=chain, session="s", priority=4))
    await_that(lambda: pending.is_over)
    [row] = place.ask("retained")
    assert (row["session"], row["tokens"], row["priority"], row["loaded"]) == ("s", BLOCK, 4, False)
    shown = run("inspect", "retained", *place.flags).stdout
    assert "that may be retained" in shown
    pending = client.start_hint(HintSettings(action=HintAction.RELEASE, session="s"))
    await_that(lambda: pending.is_over)
    assert place.ask("retained") == []


def test_what_other_memories_would_hit(place: Place) -> None:
    place.load.turn()
    rows = place.ask("memory")
    assert [row["memory"] for row in rows] == [0.25, 0.5, 1.0, 2.0, 4.0]
    assert rows[3]["size_bytes"] == 2 * rows[2]["size_bytes"]
    assert all(0 <= row["blocks_hit"] <= 1 for row in rows)
    assert (
        "blocks that engines loaded, or computed and saved; each is followed"
        in run("inspect", "memory", *place.flags).stdout
    )


@pytest.mark.parametrize(
    ("asked", "one_in", "line"),
    [
        (0, 1, "nothing was asked for yet"),
        (
            0,
            16,
            "nothing was asked for yet, or a model has recurrent states and the pool is too large to follow each block",
        ),
        (1000, 1, "of 1,000 blocks that engines loaded, or computed and saved; each is followed"),
        (1000, 16, "of 1,000 blocks that engines loaded, or computed and saved; one of 16 is followed"),
    ],
)
def test_no_shares_have_a_reason(asked: int, one_in: int, line: str) -> None:
    assert say_basis(asked, one_in) == line


def test_blocks_and_the_life_of_one(place: Place) -> None:
    rows = place.ask("blocks")
    assert len(rows) == place.load.client.stats().readable
    name = rows[0]["hash"]
    assert rows[0]["identity"].startswith("made-up/model-8b ")
    assert [row["hash"] for row in place.ask("blocks", name[:10])] == [name]
    [life] = place.ask("block", name[:10])
    assert life["where"] == ["memory", "disk"]
    assert life == place.ask("block", name)[0] | {"stored_s": life["stored_s"]}
    assert "memory, disk" in run("inspect", "block", name, *place.flags).stdout
    few = run("inspect", "blocks", "--count", "1", *place.flags).stdout
    assert f"{len(rows) - 1} more: say more digits, or --count" in few


@pytest.mark.parametrize(
    ("words", "code", "line"),
    [
        (["block", "abc"], 2, "'abc' is no hash"),
        (["blocks", "zz"], 2, "'zz' is no hash"),
        (["blocks", "00" * 33], 2, "64 at most"),
        (["block", "00" * 32], 1, f"nothing is known of {'00' * 32}"),
        (["block", "00" * 20], 2, "say all 64 digits of one that has left"),
        (["blocks", "00" * 20], 1, "no block in memory has a hash that begins with 0000"),
        (["report", "nobody"], 1, "there is no report of rank 0 of engine 'nobody'"),
    ],
)
def test_what_is_not_there_is_said_in_a_line(place: Place, words: list[str], code: int, line: str) -> None:
    done = run("inspect", *words, *place.flags)
    assert (done.returncode, line in done.stdout + done.stderr) == (code, True), done
    assert len((done.stdout + done.stderr).splitlines()) == 1


def test_a_beginning_of_several_is_not_enough(place: Place) -> None:
    done = run("inspect", "block", "", *place.flags)
    assert (done.returncode, "say more digits" in done.stderr) == (2, True), done


def test_who_is_no_operator_needs_the_token(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("of-the-operator-and-long-enough\n")
    token.chmod(0o600)
    options = {"operator_uids": frozenset[int](), "operator_token": "of-the-operator-and-long-enough"}
    with serving(tmp_path / "s", **options) as server:
        await_that(lambda: server.has_memory)
        flags = ("--set", f"server={tmp_path / 's'}")
        refused = run("inspect", "sessions", *flags)
        assert "no operator here" in refused.stderr
        assert "list_joined" not in refused.stderr
        assert run("inspect", "sessions", "--token-file", str(token), *flags).returncode == 0


def test_without_a_server(tmp_path: Path) -> None:
    done = run("inspect", "sessions", "--set", "server=")
    assert (done.returncode, "'server' is empty" in done.stderr) == (2, True)
    done = run("inspect", "sessions", "--set", f"server={tmp_path / 'nobody'}")
    assert done.returncode == 1
    assert done.stderr.startswith(f"kvoffload: {tmp_path}/nobody is not there; ")
    assert len(done.stderr.splitlines()) == 1


def test_identities_that_differ_are_told_by_the_part_and_both_values(tmp_path: Path) -> None:
    path = tmp_path / "s"
    flags = ("--set", f"server={path}")
    with serving(path) as server:
        await_that(lambda: server.has_memory)
        nothing = run("inspect", "identities", "--diff", *flags).stdout
        with vllm_blocks.engines_that_differ(path):
            [row] = [
                json.loads(line)
                for line in run("inspect", "identities", "--diff", "--json", *flags).stdout.splitlines()
            ]
            shown = run("inspect", "identities", "--diff", *flags).stdout
            watched = json.loads(run("top", "--once", "--json", *flags).stdout)
    assert nothing == "no two engines that have registered differ\n"
    assert (row["part"], row["here"], row["there"]) == ("hash_block_tokens", "32", "16")
    assert re.search(r"hash_block_tokens +32 +16", shown)
    engines = {(one["model"], one["sessions"]) for one in watched["engines"]}
    assert engines == {("made-up/model", 2)}
    assert watched["differing"] == ["made-up/model: hash_block_tokens 16 and 32"]
