"""Prompts from a file: a JSON object a line, as OpenAI's API takes them."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, BinaryIO

from kvoffload.errors import ConfigError

MAX_LINE_BYTES = 16 << 20
PATHS: Mapping[str, str] = {"prompt": "/v1/completions", "messages": "/v1/chat/completions"}
_OURS = ("stream", "stream_options", "n", "best_of", "max_tokens", "max_completion_tokens", "min_tokens", "pin_s")
"""Fields of a line that say nothing of its prompt, or that are sent in another form."""


@dataclass(frozen=True, kw_only=True, eq=False)
class WarmPrompt:
    """One prompt, and the request that computes it and one token of an answer."""

    line: int
    kind: str
    """`prompt` or `messages`."""
    body: Mapping[str, Any]

    @property
    def path(self) -> str:
        return PATHS[self.kind]

    @property
    def tokens(self) -> list[int] | None:
        """The prompt's tokens; None: only the engine can tell them."""
        given = self.body[self.kind]
        return given if self.kind == "prompt" and isinstance(given, list) else None


@dataclass(frozen=True, kw_only=True)
class BadLine:
    """A line that is no prompt, and why."""

    line: int
    why: str


@contextmanager
def open_prompts(name: str) -> Iterator[BinaryIO]:
    """Opens a file of prompts; `-` is the standard input. ConfigError: it cannot be read."""
    if name == "-":
        yield sys.stdin.buffer
        return
    try:
        file = open(name, "rb")  # noqa: SIM115 (closed below)
    except OSError as fault:
        raise ConfigError(f"{name} cannot be read: {fault.strerror}", remedy="name a file of prompts") from None
    with file:
        yield file


def read_prompts(file: BinaryIO) -> Iterator[WarmPrompt | BadLine]:
    """Reads prompts one at a time. Empty lines are left out; after one that is too long nothing more is read."""
    number = 0
    while data := file.readline(MAX_LINE_BYTES + 1):
        number += 1
        if len(data) > MAX_LINE_BYTES:
            yield BadLine(
                line=number, why=f"has more than {MAX_LINE_BYTES >> 20} MiB; the lines after it were not read"
            )
            return
        if data.strip():
            yield _read_line(number, data)


def _read_line(number: int, data: bytes) -> WarmPrompt | BadLine:
    try:
        given = json.loads(data)
        return _make_prompt(number, given)
    except json.JSONDecodeError as fault:
        return BadLine(line=number, why=f"is no JSON: {fault.msg}")
    except (ValueError, RecursionError) as fault:
        return BadLine(line=number, why=str(fault) if isinstance(fault, ValueError) else "has too many levels")


def _make_prompt(number: int, given: object) -> WarmPrompt:
    """Checks what this module reads; the rest is the engine's to refuse. ValueError."""
    if not isinstance(given, dict) or ("prompt" in given) == ("messages" in given):
        raise ValueError("is no object with either `prompt` or `messages`")
    kind = "prompt" if "prompt" in given else "messages"
    value = given[kind]
    if kind == "messages" and not isinstance(value, list):
        raise ValueError("has `messages` that are no list")
    if kind == "prompt" and not isinstance(value, str) and not _is_tokens(value):
        raise ValueError("has a `prompt` that is neither text nor a list of tokens")
    body = {name: value for name, value in given.items() if name not in _OURS}
    if given.get("pin_s") is not None:
        params = given.get("kv_transfer_params")
        body["kv_transfer_params"] = (params if isinstance(params, dict) else {}) | {"pin_s": given["pin_s"]}
    return WarmPrompt(line=number, kind=kind, body=body | {"max_tokens": 1})


def _is_tokens(value: object) -> bool:
    return isinstance(value, list) and bool(value) and set(map(type, value)) == {int}
