"""A trace of what engines ask for, as `kvoffload replay` reads it: names of blocks, never what was said."""

from __future__ import annotations

import json
import logging
import os
import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from kvoffload.errors import ConfigError
from kvoffload.units import GIB, format_size

logger = logging.getLogger(__name__)

LIMIT_BYTES = 4 * GIB
QUEUED = 4096
"""Prompts that wait to be written; more are left out, and counted at the end."""


class PromptRecorder:
    """Writes a trace. `note` belongs to one thread and never waits; another thread writes."""

    def __init__(
        self, path: Path, *, limit_bytes: int = LIMIT_BYTES, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Makes the file. ConfigError: there is one already, or it cannot be made."""
        try:
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except OSError as fault:
            raise ConfigError(
                f"--record {path} cannot be made: {fault.strerror}", remedy="name a new file in a folder of yours"
            ) from None
        self._path = path
        self._file = os.fdopen(file, "wb")
        self._limit_bytes = limit_bytes
        self._clock = clock
        self._begun_s = clock()
        self._queue: queue.Queue[tuple[float, int, int, int, bytes] | None] = queue.Queue(QUEUED)
        self._left_out = 0
        self._thread = threading.Thread(target=self._write, name="kvoffload-record", daemon=True)
        self._thread.start()

    def note(self, name_space: int, block_tokens: int, tokens: int, tags: bytes) -> None:
        """Notes a prompt: so many tokens that the engine had not itself, in blocks of these names."""
        try:
            self._queue.put_nowait((self._clock() - self._begun_s, name_space, block_tokens, tokens, tags))
        except queue.Full:
            self._left_out += 1

    def close(self) -> None:
        """Writes what was noted."""
        self._queue.put(None)
        self._thread.join()
        if self._left_out:
            logger.warning("%d prompts are not in %s: they came too fast, or it is full", self._left_out, self._path)

    def _write(self) -> None:
        written = 0
        is_open = True
        with self._file as file:
            while (one := self._queue.get()) is not None:
                line = format_line(*one)
                if is_open and written + len(line) > self._limit_bytes:
                    logger.warning("%s is full at %s, no more is recorded", self._path, format_size(self._limit_bytes))
                    is_open = False
                if not is_open:
                    self._left_out += 1
                    continue
                try:
                    file.write(line)
                    if self._queue.empty():
                        file.flush()
                except OSError as fault:
                    logger.warning("%s cannot be written, no more is recorded: %s", self._path, fault.strerror)
                    is_open = False
                written += len(line)


def format_line(after_s: float, name_space: int, block_tokens: int, tokens: int, tags: bytes) -> bytes:
    # Of another identity the same name is another block.
    ids = np.frombuffer(tags, "<u8") ^ np.uint64(name_space * 0x9E3779B97F4A7C15 % 2**64)
    row = {
        "timestamp": int(after_s * 1000),
        "input_length": tokens,
        "output_length": 0,
        "block_tokens": block_tokens,
        "hash_ids": ids.tolist(),
    }
    return json.dumps(row, separators=(",", ":")).encode() + b"\n"
