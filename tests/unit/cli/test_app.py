"""The command line as a user meets it: a real process, its lines and its exit codes."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import typer

from kvoffload import __version__
from kvoffload.cli.app import make_app, make_list
from tests.kit.cli.commands import run


def test_version() -> None:
    assert run("--version").stdout.strip() == f"kvoffload {__version__}"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["config", "show", "--set", "memory=12parsecs"], "unit 'parsecs'"),
        (["config", "show", "--set", "memroy=1GiB"], "did you mean 'memory'?"),
        (["config", "show", "--set", "memory"], "allowed is NAME=VALUE"),
        (["config", "show", "--config", "/nonexistent.toml"], "No such file"),
        (["config", "show", "--engine-config", "[1]"], "allowed is a JSON object"),
        (["config", "show", "--engine-config", "{"], "allowed is a JSON object"),
        (["bench", "valky"], "did you mean 'valkey'?"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(arguments: list[str], said: str) -> None:
    done = run(*arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("kvoffload: ")
    assert said in done.stderr


@pytest.mark.parametrize("arguments", [["nonsense"], ["config", "show", "--nonsense"], ["config", "nonsense"]])
def test_an_unknown_command_or_option_has_no_traceback(arguments: list[str]) -> None:
    done = run(*arguments)
    assert done.returncode == 2
    assert "nonsense" in done.stderr
    assert "Traceback" not in done.stderr


def test_help_names_the_commands_and_fits_a_screen() -> None:
    done = run("--help")
    assert done.returncode == 0
    assert {"bench", "config"} <= {line.split()[0] for line in done.stdout.splitlines() if line.strip()}
    assert len(done.stdout.splitlines()) <= 24


COMMANDS = ("audit", "bench", "config", "doctor", "inspect", "keys", "plan", "replay", "serve", "top", "warm", "web")


def test_the_help_of_each_command_fits_and_is_not_cut() -> None:
    for words in ([], *([command] for command in COMMANDS)):
        lines = run(*words, "--help").stdout.splitlines()
        assert len(lines) <= 40, words
        assert max(map(len, lines)) <= 80, words
        assert not any(line.endswith("...") for line in lines if not line.startswith("Usage")), words


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_has_the_modules_of_no_other(command: str) -> None:
    others = set(COMMANDS) - {command, "config"}  # what `--config` and `--set` mean is the same for all
    script = """
import sys
from kvoffload.cli.app import main
sys.argv[1:] = [sys.argv[1], "--help"]
try:
    main()
except SystemExit:
    print(*sys.modules, sep="\\n", file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", script, command], capture_output=True, text=True, check=True)
    loaded = set(done.stderr.split())
    assert f"kvoffload.cli.{command}" in loaded
    assert not loaded & {f"kvoffload.cli.{other}" for other in others}
    if command == "serve":
        assert not loaded & {f"kvoffload.{room}" for room in ("bench", "connector", "doctor", "plan", "top", "web")}


@pytest.mark.parametrize("arguments", [["--help"], ["-h"], ["--version"]])
def test_the_list_of_commands_is_told_with_the_modules_of_none(arguments: list[str]) -> None:
    script = """
import sys
from kvoffload.cli.app import main
try:
    main()
except SystemExit:
    print(*sys.modules, sep="\\n", file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True, check=True)
    ours = {name for name in done.stderr.split() if name.startswith("kvoffload.")}
    assert ours == {"kvoffload.cli", "kvoffload.cli.app", "kvoffload.errors"}
    assert not {"pydantic", "numpy"} & set(done.stderr.split())


def test_the_list_says_what_the_commands_say() -> None:
    def listed(app: typer.Typer) -> dict[str, str]:
        commands: Any = typer.main.get_command(app)
        return {name: one.get_short_help_str(80) for name, one in commands.commands.items()}

    assert listed(make_list()) == listed(make_app())


def test_a_shell_may_complete_commands() -> None:
    asked = {"_KVOFFLOAD_COMPLETE": "complete_bash", "COMP_WORDS": "kvoffload ", "COMP_CWORD": "1"}
    script = "import sys; from kvoffload.cli.app import main; sys.argv[0] = 'kvoffload'; main()"
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **asked})
    assert set(done.stdout.split()) == set(COMMANDS)
    asked |= {"COMP_WORDS": "kvoffload serve --adopt", "COMP_CWORD": "2"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **asked})
    assert done.stdout.split() == ["--adopt-wait"]
