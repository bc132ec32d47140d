"""`kvoffload warm`: prompts of a file are in a real server's pool afterwards, and what failed is said."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvoffload.cli.warm import MAX_SHOWN
from kvoffload.cli.web import MIN_TOKEN_LETTERS
from tests.kit.cli.commands import run
from tests.kit.cli.web_process import get, web
from tests.kit.free_ports import free_port
from tests.kit.server.tiers import await_that, serving
from tests.kit.warm.played_engine import MODEL, ROOT, PlayedEngine, make_tokens, played_engine
from tests.kit.web.vllm_blocks import BLOCK, SEED, engine, name_blocks, save


def write(file: Path, *lines: Any) -> str:
    file.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return str(file)


def test_prompts_are_in_the_pool_afterwards(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("x" * MIN_TOKEN_LETTERS)
    token.chmod(0o600)
    talk = [{"role": "user", "content": "def"}]
    file = write(tmp_path / "f", {"prompt": "abc"}, {"messages": talk}, {"prompt": make_tokens("gh")}, {"prompt": "a"})
    with (
        serving(tmp_path / "s") as server,
        web(tmp_path / "s", f"http_token_file={token}") as cache,
        played_engine(PlayedEngine()) as played,
    ):
        await_that(lambda: server.has_memory)
        await_that(lambda: get(f"{cache}/readyz")[0] == 200)
        with engine(tmp_path / "s", ROOT) as client, engine(tmp_path / "s", "another") as other:
            # Another model's blocks of the same tokens are no blocks of this one.
            save(other, name_blocks(make_tokens("abc")))
            save(client, name_blocks(make_tokens("d")))

            def compute(tokens: list[int]) -> None:
                names = name_blocks(tokens)
                lacking = [at for at, there in enumerate(client.lookup(0, names)) if not there]
                if lacking:
                    save(client, b"".join(names[32 * at : 32 * at + 32] for at in lacking))

            played.compute = compute
            options = ["--engine", played.address, "--cache", cache, "--token-file", str(token), "--seed", SEED]
            # One after the other: a played engine has no queue.
            done = run("warm", file, *options, "--at-once", "1", "--json")
            assert (done.returncode, done.stderr.strip()) == (0, "")
            tokens = [3 * 32, 3 * 32, 2 * 32, 32]
            there = [count - BLOCK for count in tokens]
            row = json.loads(done.stdout)
            # `a` may be asked about before or after `abc` was computed.
            before = row["there_before"]
            assert before in (32, 32 + BLOCK)
            assert row == {
                "prompts": 4,
                "failed": 0,
                "tokens": sum(tokens),
                "there_before": before,
                "warmed": sum(there) - before,
                "there": sum(there),
                "uncounted": 0,
            }
            again = run("warm", file, *options)
            assert again.stdout.splitlines() == [
                f"4 prompts, 0 failed; {sum(tokens)} tokens computed or loaded",
                f"{sum(there)} tokens are there: {sum(there)} were before, 0 are new",
            ]
            uncounted = run("warm", file, *options[:-1], "8")
            assert uncounted.returncode == 0
            assert [line.split(": ")[0] for line in sorted(uncounted.stderr.strip().splitlines())] == [
                f"line {at} computed, not counted" for at in (1, 2, 3, 4)
            ]
            assert uncounted.stdout.splitlines() == [
                f"4 prompts, 0 failed; {sum(tokens)} tokens computed or loaded",
                "0 tokens are there: 0 were before, 0 are new",
                "4 prompts were computed, and are not counted in this",
            ]
    assert {one["model"] for one in played.asked} == {MODEL}
    assert {one["max_tokens"] for one in played.asked} == {1}


def test_what_fails_is_said_and_makes_the_exit_code() -> None:
    lines = [*(f"line {at}" for at in range(2 * MAX_SHOWN)), json.dumps({"prompt": "ab"})]
    with played_engine(PlayedEngine(faults=[400])) as played:
        command = [sys.executable, "-m", "kvoffload", "warm", "-", "--engine", played.address]
        done = subprocess.run(command, input="\n".join(lines), capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.strip().splitlines() == [f"line {at + 1} is no JSON: Expecting value" for at in range(MAX_SHOWN)]
    assert done.stdout == f"{len(lines)} prompts, {len(lines)} failed; 0 tokens computed or loaded\n"


def test_the_address_that_other_clients_want_is_the_engines(tmp_path: Path) -> None:
    file = tmp_path / "prompts"
    file.write_text(json.dumps({"prompt": "ab"}))
    with played_engine(PlayedEngine()) as played:
        done = run("warm", str(file), "--engine", f"{played.address}/v1/")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["none", "--engine", "http://127.0.0.1:1"], "none cannot be read: No such file or directory"),
        (["-", "--engine", "here"], "'here' is no address"),
        (["-", "--engine", "http://127.0.0.1:1", "--seed", "7"], "give --cache"),
        (["-", "--engine", "http://127.0.0.1:1", "--key-file", "none"], "none"),
    ],
)
def test_what_is_asked_wrongly_is_one_line(arguments: list[str], said: str) -> None:
    done = run("warm", *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1
    assert said in done.stderr


def test_an_engine_that_is_not_there_is_one_line() -> None:
    done = run("warm", "-", "--engine", f"http://127.0.0.1:{free_port()}")
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
    assert "start it first" in done.stderr
