"""Traces of requests, read line by line: which blocks each asked for.

One JSON object a line, as the Mooncake paper published them: `timestamp` (ms), `input_length` and `output_length`
(tokens), `hash_ids` (one id per block of the prompt, the last one perhaps partly filled; equal ids behind equal ids are
the same block). `kvoffload serve --record` writes the same, and `block_tokens`: how many tokens an id stands for.
Fields of other names are ignored.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from kvoffload.errors import ConfigError

BLOCK_TOKENS = 512
"""Tokens that one id of the published traces stands for."""

LINE_BYTES = 64 << 20
_LARGEST_ID = 2**64 - 1
_LARGEST_LENGTH = 2**63 - 1


@dataclass(frozen=True, kw_only=True)
class TraceRequest:
    """One line of a trace, checked."""

    timestamp_ms: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]

    def full_blocks(self, block_tokens: int) -> tuple[int, ...]:
        """Returns the blocks without a partly filled one at the end: it has no key, so no cache ever holds it."""
        return self.hash_ids[: self.input_length // block_tokens]


def read_trace(path: Path, *, block_tokens: int = BLOCK_TOKENS) -> Iterator[TraceRequest]:
    """The requests in order, one line in memory at a time. ConfigError says file, line, and what is allowed."""
    latest_ms = 0.0
    try:
        with path.open("rb") as file:
            number = 0
            while line := file.readline(LINE_BYTES + 1):
                number += 1
                where = f"{path}, line {number}"
                if len(line) > LINE_BYTES:
                    _refuse(where, "it is too long", f"a line may have {LINE_BYTES >> 20} MiB")
                if not line.strip():
                    continue
                request = _parse_request(line, where)
                _check_blocks(request, block_tokens, where)
                if request.timestamp_ms < latest_ms:
                    _refuse(where, f"timestamp {request.timestamp_ms:g} follows {latest_ms:g}", "sort by timestamp")
                latest_ms = request.timestamp_ms
                yield request
    except OSError as fault:
        raise ConfigError(f"{path}: {fault.strerror or fault}", remedy="name a trace file that can be read") from fault


def find_block_tokens(path: Path) -> int:
    """Returns the tokens of an id: as `kvoffload serve --record` wrote it in the first line, or as in published
    traces."""
    try:
        with path.open("rb") as file:
            first = json.loads(file.readline(LINE_BYTES))
    except (OSError, ValueError, RecursionError):
        return BLOCK_TOKENS  # `read_trace` says what is wrong
    told = first.get("block_tokens") if isinstance(first, dict) else None
    return told if type(told) is int and told > 0 else BLOCK_TOKENS


def _parse_request(line: bytes, where: str) -> TraceRequest:
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as fault:
        raise ConfigError(
            f"{where}: not JSON ({' '.join(str(fault).split())})", remedy="allowed is one JSON object a line"
        ) from fault
    if not isinstance(fields, dict):
        _refuse(where, f"a {type(fields).__name__}", "allowed is one JSON object a line")
    return TraceRequest(
        timestamp_ms=_parse_timestamp(fields, where),
        input_length=_parse_length(fields, "input_length", where),
        output_length=_parse_length(fields, "output_length", where),
        hash_ids=_parse_ids(fields, where),
    )


def _parse_timestamp(fields: dict[str, object], where: str) -> float:
    value = _field(fields, "timestamp", where)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if is_number and 0 <= value <= _LARGEST_LENGTH and math.isfinite(value):  # type: ignore[operator,arg-type]
        return float(value)  # type: ignore[arg-type]
    return _refuse(where, f"timestamp is {_show(value)}", "allowed are milliseconds, 0 or more")


def _parse_length(fields: dict[str, object], name: str, where: str) -> int:
    value = _field(fields, name, where)
    if type(value) is int and 0 <= value <= _LARGEST_LENGTH:
        return value
    return _refuse(where, f"{name} is {_show(value)}", "allowed is a whole number of tokens, 0 or more")


def _parse_ids(fields: dict[str, object], where: str) -> tuple[int, ...]:
    value = _field(fields, "hash_ids", where)
    if not isinstance(value, list):
        _refuse(where, f"hash_ids is {_show(value)}", "allowed is a list of whole numbers")
    for item in value:
        if type(item) is not int or not 0 <= item <= _LARGEST_ID:
            _refuse(where, f"hash_ids has {_show(item)}", "allowed are whole numbers from 0 to 2**64 - 1")
    return tuple(value)


def _check_blocks(request: TraceRequest, block_tokens: int, where: str) -> None:
    most = -(-request.input_length // block_tokens)
    if len(request.hash_ids) > most:
        _refuse(
            where,
            f"{len(request.hash_ids)} hash_ids for an input_length of {request.input_length}",
            f"blocks of {block_tokens} tokens make {most} of them",
        )


def _field(fields: dict[str, object], name: str, where: str) -> object:
    if name not in fields:
        _refuse(where, f"{name} is missing", "needed are timestamp, input_length, output_length and hash_ids")
    return fields[name]


def _show(value: object) -> str:
    try:
        text = json.dumps(value)
    except RecursionError:
        return "nested too deep to be shown"
    return text if len(text) <= 40 else f"{text[:37]}..."


def _refuse(where: str, what: str, remedy: str) -> NoReturn:
    raise ConfigError(f"{where}: {what}", remedy=remedy)
