"""Commands in the documents are such as can be typed: known, with known options, and settings that are accepted."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest
import typer

from kvoffload.cli.app import make_app
from kvoffload.config.sources import load_settings
from tests.house.commands import COMMANDS, SPANS, WITHOUT_VALUE

IN_SENTENCES = [(file, span) for file, span in SPANS if span.startswith("kvoffload ")]
NO_COMMANDS = {
    "kvoffload disk 1": "the beginning of a file",
    "kvoffload find": "a span of a trace",
    "kvoffload load": "a span of a trace",
    "kvoffload keeps nothing of this engine's cache": "the beginning of a log line",
}
ROOT_COMMAND: Any = typer.main.get_command(make_app())


def find_command(words: list[str]) -> tuple[Any, list[str]]:
    """The command that is meant, and the words behind its name."""
    command = ROOT_COMMAND
    while hasattr(command, "commands") and words:
        found = command.commands.get(words[0])
        assert found is not None, f"there is no {words[0]!r}; there are {', '.join(command.commands)}"
        command, words = found, words[1:]
    return command, words


def test_there_are_some() -> None:
    assert len(COMMANDS) > 20


@pytest.mark.parametrize(("file", "line"), COMMANDS, ids=[f"{file.name}: {line[:50]}" for file, line in COMMANDS])
def test_it_can_be_typed(file: Path, line: str) -> None:
    words = [word for word in shlex.split(line, comments=True)[1:] if word != WITHOUT_VALUE]
    command, rest = find_command(words)
    assert not hasattr(command, "commands"), f"{file}: {line} names no command"
    check_options(command, rest, f"{file}: {line}")


def check_options(command: Any, rest: list[str], where: str) -> None:
    """The command has these options, and settings that they give are accepted."""
    context = command.make_context(command.name, list(rest), resilient_parsing=True)
    known = {name for option in command.params if option.param_type_name == "option" for name in option.opts}
    for word in rest:
        if word.startswith("--"):
            assert word.partition("=")[0] in known, f"{where}: there is no {word}"
    given = context.params.get("assignments") or []
    assert load_settings(flags=dict(one.split("=", 1) for one in given)) is not None


def test_commands_in_sentences_can_be_typed() -> None:
    """They may name a group of commands, and options without their values."""
    typed = [(file, span) for file, span in IN_SENTENCES if span not in NO_COMMANDS]
    assert len(typed) > 50
    assert {span for _, span in IN_SENTENCES} - {span for _, span in typed} == set(NO_COMMANDS)
    for file, span in typed:
        command, rest = find_command(shlex.split(span)[1:])
        if not hasattr(command, "commands"):
            check_options(command, rest, f"{file}: {span}")
