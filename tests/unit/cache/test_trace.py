"""Traces: what a line may be, and what is said about one that may not."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from kvoffload.cache import trace as trace_module
from kvoffload.cache.trace import TraceRequest, read_trace
from kvoffload.errors import ConfigError

GOOD = {"timestamp": 5, "input_length": 1100, "output_length": 3, "hash_ids": [7, 8, 9]}


def write(path: Path, *lines: object) -> Path:
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("".join(f"{text}\n" for text in texts))
    return path


def test_requests_in_order(tmp_path: Path) -> None:
    later = {**GOOD, "timestamp": 5.5, "hash_ids": [], "input_length": 0, "type": "text"}
    first, second = read_trace(write(tmp_path / "t.jsonl", GOOD, "", later))
    assert first == TraceRequest(timestamp_ms=5.0, input_length=1100, output_length=3, hash_ids=(7, 8, 9))
    assert (second.timestamp_ms, second.hash_ids) == (5.5, ())


@pytest.mark.parametrize(
    ("input_length", "hash_ids", "full"),
    [
        (1024, [1, 2], (1, 2)),
        (1025, [1, 2, 3], (1, 2)),
        (1535, [1, 2, 3], (1, 2)),
        (1536, [1, 2, 3], (1, 2, 3)),
        (511, [1], ()),
        (4096, [1, 2], (1, 2)),  # ids of the first blocks alone
    ],
)
def test_a_partly_filled_block_is_dropped(input_length: int, hash_ids: list[int], full: tuple[int, ...]) -> None:
    request = TraceRequest(timestamp_ms=0, input_length=input_length, output_length=0, hash_ids=tuple(hash_ids))
    assert request.full_blocks(512) == full


def without(name: str) -> dict[str, object]:
    return {key: value for key, value in GOOD.items() if key != name}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "not JSON"),
        ("\xff", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[1]", "a list; allowed is one JSON object a line"),
        ("7", "a int"),
        *((without(name), f"{name} is missing") for name in GOOD),
        ({**GOOD, "timestamp": "5"}, 'timestamp is "5"; allowed are milliseconds'),
        ({**GOOD, "timestamp": -1}, "timestamp is -1"),
        ({**GOOD, "timestamp": True}, "timestamp is true"),
        ({**GOOD, "timestamp": float("nan")}, "timestamp is NaN"),
        ({**GOOD, "timestamp": float("inf")}, "timestamp is Infinity"),
        ({**GOOD, "timestamp": 4}, "timestamp 4 follows 5; sort by timestamp"),
        ({**GOOD, "input_length": 1.5}, "input_length is 1.5; allowed is a whole number"),
        ({**GOOD, "input_length": None}, "input_length is null"),
        ({**GOOD, "output_length": -3}, "output_length is -3"),
        ({**GOOD, "output_length": 2**70}, "output_length is 1180591620717411303424"),
        ({**GOOD, "hash_ids": "123"}, 'hash_ids is "123"; allowed is a list'),
        ({**GOOD, "hash_ids": {"a" * 99: 1}}, "..."),
        ({**GOOD, "hash_ids": [1, "2"]}, 'hash_ids has "2"'),
        ({**GOOD, "hash_ids": [1, False]}, "hash_ids has false"),
        ({**GOOD, "hash_ids": [-1]}, "hash_ids has -1; allowed are whole numbers from 0 to 2**64 - 1"),
        ({**GOOD, "hash_ids": [2**64]}, "hash_ids has 18446744073709551616"),
        ({**GOOD, "hash_ids": [1, 2, 3, 4]}, "4 hash_ids for an input_length of 1100; blocks of 512 tokens make 3"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: object, said: str) -> None:
    path = write(tmp_path / "bad.jsonl", GOOD, "", line)
    with pytest.raises(ConfigError) as caught:
        list(read_trace(path))
    text = str(caught.value)
    assert text.startswith(f"{path}, line 3: ")
    assert said in text
    assert "\n" not in text
    assert len(text) < 300


def test_a_value_nested_as_deep_as_can_be_read_is_refused_like_others(tmp_path: Path) -> None:
    """The refusal shows the value by a writer of JSON, which goes less deep than the reader."""
    for depth in itertools.count(800):
        path = write(tmp_path / "deep.jsonl", json.dumps(GOOD).replace(": 5", f": {'[' * depth}{']' * depth}"))
        with pytest.raises(ConfigError) as caught:
            list(read_trace(path))
        if "not JSON" in str(caught.value) or depth > 5000:
            break


def test_a_line_without_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_module, "LINE_BYTES", 1000)
    path = write(tmp_path / "long.jsonl", GOOD, " " * 1000)
    with pytest.raises(ConfigError, match="line 2: it is too long"):
        list(read_trace(path))


def test_lines_are_read_one_by_one(tmp_path: Path) -> None:
    requests = read_trace(write(tmp_path / "t.jsonl", GOOD, "nonsense"))
    assert next(requests).input_length == 1100
    with pytest.raises(ConfigError, match="line 2"):
        next(requests)


@pytest.mark.parametrize("name", ["absent.jsonl", "."])
def test_a_file_that_cannot_be_read(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="name a trace file that can be read"):
        list(read_trace(tmp_path / name))
