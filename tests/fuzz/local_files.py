"""Files that another user may have made: traces, a model's config, a kept measurement, keys, prompts; and engines'
answers to the prompts."""

from __future__ import annotations

import contextlib
import io
import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from kvoffload.audit.audited_engine import AuditedEngine
from kvoffload.audit.auditor import Auditor, AuditPrompt
from kvoffload.cache.trace import find_block_tokens, read_trace
from kvoffload.cli.audit import make_lines
from kvoffload.errors import ConfigError
from kvoffload.key_files import read_pair
from kvoffload.plan.model_shape import ShapeSettings, read_config, read_shape
from kvoffload.transfer.calibration import Calibration, CalibrationKey, read_calibration, write_calibration
from kvoffload.transfer.copy_engine import CopyDirection
from kvoffload.transfer.copy_ways import CopyWay, WayTiming
from kvoffload.warm.json_client import JsonClient, read_answer
from kvoffload.warm.prompt_file import BadLine, read_prompts
from kvoffload.warm.warmer import Warmer
from tests.fuzz.parts import check_line
from tests.kit.plan.configs import DEEPSEEK_V3, GEMMA_3, GPT_OSS, LLAMA_8B

_KEY = CalibrationKey(gpu="a GPU", driver="1", kernels=("sm_90",), page_bytes=(4096,))
_CONFIGS = (LLAMA_8B, DEEPSEEK_V3, GPT_OSS, GEMMA_3)
_FOLDER = tempfile.TemporaryDirectory(prefix="kvoffload-fuzz-")
_FILE = Path(_FOLDER.name) / "file"


def make_seeds() -> Iterator[bytes]:
    line = {"timestamp": 5, "input_length": 1000, "output_length": 3, "hash_ids": [1, 2], "block_tokens": 512}
    yield b"\0" + b"\n".join(json.dumps(line | {"timestamp": at}).encode() for at in (0, 7.5))
    for at, config in enumerate(_CONFIGS):
        yield b"\1" + json.dumps(config).encode()
        yield b"\4" + bytes((at,)) + json.dumps({"head_dim": 64, "layer_types": ["full_attention"]}).encode()
    timing = WayTiming(direction=CopyDirection.LOAD, run_bytes=4096, runs=8, way=CopyWay.BATCH, seconds=0.5)
    write_calibration(_FILE, Calibration(key=_KEY, timings=(timing,)))
    yield b"\2" + _FILE.read_bytes()
    yield b"\5" + b'{"prompt": "a", "pin_s": 5}\n\n{"messages": [{"role": "user"}], "n": 2}\n{"prompt": [1, 2]}'
    yield b"\6" + b'{"tokens": [1, 2], "identities": [{"hit_tokens": 1, "why": ""}], "usage": {"prompt_tokens": 2}}'
    told = b'{"tokens": ["a", "b"], "token_logprobs": [-1.5, -2], "top_logprobs": [{"a": -1.5}, {"b": -2, "c": -3.25}]}'
    yield b"\7" + b'{"choices": [{"logprobs": %b}], "usage": {"prompt_tokens_details": {"cached_tokens": 1}}}' % told
    yield b"\7" + b'vllm:external_prefix_cache_hits_total{engine="0"} 5.0\n{"choices": [], "success": false}'
    yield b"\3" + f"# Made.\nsecret {'s' * 40}\npublic {'p' * 40}\n".encode()


def _read_changed(data: bytes) -> None:
    """A config that a model was published with, and what of it is different."""
    changes = json.loads(data[1:])
    if isinstance(changes, dict):
        read_shape(_CONFIGS[data[0] % len(_CONFIGS)] | changes, ShapeSettings())


class _Answers(JsonClient):
    """The same, whatever is asked."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def post(self, path: str, what: object) -> Any:
        return read_answer(path, 200, self._data)

    def exchange(self, method: str, path: str, body: bytes | None) -> tuple[int, bytes]:
        return 200, self._data


def _warm(data: bytes) -> None:
    client = _Answers(data)
    prompts = list(read_prompts(io.BytesIO(b'{"prompt": "a"}\n')))
    for outcome in Warmer(client, client, at_once=1, model="m", wait=lambda seconds: None).run(prompts):
        check_line(ConfigError(outcome.fault))


def _audit(data: bytes) -> None:
    engine = AuditedEngine(_Answers(data), model="m", answer_tokens=4, wait=lambda seconds: None)
    verdict = Auditor(engine, own_hits=2).run([AuditPrompt(1, [1, 2], seed=1), AuditPrompt(2, "a")])
    for line in (*make_lines(verdict, 1), verdict.fault):
        check_line(ConfigError(line))


def run(data: bytes) -> None:
    _FILE.write_bytes(data[1:])
    _FILE.chmod(0o600)
    readers: list[Callable[[], object]] = [
        lambda: (find_block_tokens(_FILE), list(read_trace(_FILE))),
        lambda: read_shape(read_config(_FILE), ShapeSettings()),
        lambda: read_calibration(_FILE, _KEY),
        lambda: read_pair(_FILE),
        lambda: _read_changed(data[1:] or b"\0"),
        lambda: [
            check_line(ConfigError(one.why)) for one in read_prompts(io.BytesIO(data[1:])) if isinstance(one, BadLine)
        ],
        lambda: _warm(data[1:]),
        lambda: _audit(data[1:]),
    ]
    try:
        with contextlib.suppress(json.JSONDecodeError, UnicodeDecodeError):
            readers[data[0] % len(readers) if data else 0]()
    except ConfigError as fault:
        check_line(fault)
