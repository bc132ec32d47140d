"""`kvoffload web` as a user meets it: a process that answers, whatever becomes of the server."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from kvoffload.cli.web import MIN_TOKEN_LETTERS, NICENESS, read_token
from kvoffload.errors import ConfigError
from tests.kit.cli.commands import run
from tests.kit.cli.web_process import get, web
from tests.kit.server.tiers import await_that, serving


def test_it_answers_with_and_without_a_server(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with web(path) as address:
        assert get(f"{address}/healthz")[0] == 200
        assert get(f"{address}/readyz")[0] == 503
        with serving(path) as server:
            await_that(lambda: server.has_memory)
            await_that(lambda: get(f"{address}/readyz")[0] == 200)
            assert json.loads(get(f"{address}/stats")[1])["up"]
            assert b"kvoffload_server_up 1.0" in get(f"{address}/metrics")[1]
        await_that(lambda: get(f"{address}/readyz")[0] == 503)
        assert get(f"{address}/nothing")[0] == 404


def test_engines_go_first(tmp_path: Path) -> None:
    own = os.getpriority(os.PRIO_PROCESS, 0)
    with web(tmp_path / "s"):
        children = " ".join(task.read_text() for task in Path("/proc/self/task").glob("*/children")).split()
        commands = {int(pid): Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0") for pid in children}
        [process] = [pid for pid, words in commands.items() if b"web" in words]
        assert os.getpriority(os.PRIO_PROCESS, process) == min(own + NICENESS, 19)


def test_without_a_server_to_tell_of_it_ends() -> None:
    assert run("web", "--set", "server=").returncode == 2


@pytest.mark.parametrize("text", ["", "short", "x" * (MIN_TOKEN_LETTERS - 1), "with\x00nul" * 4])
def test_a_token_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "token"
    file.write_text(text)
    file.chmod(0o600)
    with pytest.raises(ConfigError, match="holds no token"):
        read_token(str(file))


def test_a_token_is_read_and_none_is_none(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("x" * MIN_TOKEN_LETTERS + "\n")
    file.chmod(0o600)
    assert read_token(str(file)) == "x" * MIN_TOKEN_LETTERS
    assert read_token("") == ""
