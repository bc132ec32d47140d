"""Files that somebody else may have made: traces, a model's config, a measurement that was kept, keys."""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from kvoffload.cache.trace import find_block_tokens, read_trace
from kvoffload.errors import ConfigError
from kvoffload.key_files import read_pair
from kvoffload.plan.model_shape import ShapeTerms, read_config, read_shape
from kvoffload.transfer.calibration import Calibration, CalibrationKey, read_calibration, write_calibration
from kvoffload.transfer.copy_engine import CopyDirection
from kvoffload.transfer.copy_ways import CopyWay, WayTiming
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
    yield b"\3" + f"# Made.\nsecret {'s' * 40}\npublic {'p' * 40}\n".encode()


def _read_changed(data: bytes) -> None:
    """A config that a model was published with, and what of it is different."""
    changes = json.loads(data[1:])
    if isinstance(changes, dict):
        read_shape(_CONFIGS[data[0] % len(_CONFIGS)] | changes, ShapeTerms())


def run(data: bytes) -> None:
    _FILE.write_bytes(data[1:])
    _FILE.chmod(0o600)
    readers: list[Callable[[], object]] = [
        lambda: (find_block_tokens(_FILE), list(read_trace(_FILE))),
        lambda: read_shape(read_config(_FILE), ShapeTerms()),
        lambda: read_calibration(_FILE, _KEY),
        lambda: read_pair(_FILE),
        lambda: _read_changed(data[1:] or b"\0"),
    ]
    try:
        with contextlib.suppress(json.JSONDecodeError, UnicodeDecodeError):
            readers[data[0] % len(readers) if data else 0]()
    except ConfigError as fault:
        check_line(fault)
