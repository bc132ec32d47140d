"""What LoRA adapters hold. The engine's block hashes have an adapter's name and path, never its bytes.

Which bytes count is decided when the engine loads an adapter, and it does not tell when that is: once for each
`lora_int_id`, again after that id was dropped for want of room, and at every use with `load_inplace`. So an id stands
for what its files held when it was first seen, for as long as nothing about them changes. When something does, nobody
can say which of the two the engine holds, and requests with that id are offloaded no more. A changed adapter wants an id
of its own (and, for vLLM's own prefix cache, a path of its own).

One thing is not seen: an adapter that was loaded ahead of its first request and rewritten in place before it came.
"""

from __future__ import annotations

import hashlib
import logging
import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from kvoffload.errors import IdentityError
from kvoffload.keys.model_files import identify_adapter

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest

logger = logging.getLogger(__name__)

MAX_ADAPTERS = 4096
"""Ids that are remembered, those that are refused among them. Later ones are not offloaded."""
TICK_S = 0.02
"""Two writes within one tick of a file system's clock have one time. So files are read when their last tick is over:
a later write shows."""
CLOSE_TIMEOUT_S = 5.0
"""How long a file that is being read may hold up the engine's end."""

_FILES = ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")
"""All that vLLM reads of an adapter."""
_GIVEN_OTHERWISE = ("lora_tensors", "tensorizer_config_dict")
"""Fields of requests whose weights do not come from their folder."""


class _FileStamp(NamedTuple):
    """What changes when a file is written or replaced."""

    name: str
    where: tuple[int, int]
    size_bytes: int
    mtime_ns: int
    ctime_ns: int


_Stamp: TypeAlias = tuple[_FileStamp, ...]


class _Source(NamedTuple):
    """Where the engine reads an adapter, and how it takes what it finds."""

    name: str
    path: str
    is_3d: bool


class _Files(NamedTuple):
    """A folder as it was."""

    folder: Path
    stamp: _Stamp


class _Read(NamedTuple):
    """What came of reading `files`: a digest, or why there is none."""

    files: _Files
    digest: bytes
    fault: str


@dataclass
class _Adapter:
    """One id. It has `files`, or it is refused."""

    source: _Source
    files: _Files | None


class AdapterContents:
    """Digests of adapters by id. `find` belongs to one thread, the scheduler's; another one reads files."""

    def __init__(self, *, limit: int = MAX_ADAPTERS) -> None:
        self._limit = limit
        self._adapters: dict[int, _Adapter] = {}
        self._reads: dict[_Files, _Read | None] = {}  # None: it is being read
        self._is_full = False
        self._wanted: SimpleQueue[_Files | None] = SimpleQueue()
        self._done: SimpleQueue[_Read] = SimpleQueue()
        self._reader: threading.Thread | None = None

    def start(self) -> None:
        assert self._reader is None
        self._reader = threading.Thread(target=self._read, name="kvoffload-adapters", daemon=True)
        self._reader.start()

    def close(self) -> None:
        """Ends the reader after what it was asked for, or leaves it behind if that takes too long."""
        reader, self._reader = self._reader, None
        if reader is not None:
            self._wanted.put(None)
            reader.join(CLOSE_TIMEOUT_S)

    def find(self, request: LoRARequest | None) -> bytes | None:
        """32 bytes for what the request's adapter holds, b"" for no adapter.

        None: not known, yet or at all. Blocks of such a request must neither be saved nor loaded. To be asked for every
        use of an answer: what was true at a request's start need not be when it ends. Blocks on `stat` only.
        """
        if request is None:
            return b""
        self._collect()
        adapter = self._adapters.get(request.lora_int_id)
        if adapter is None:
            adapter = self._admit(request)
        if adapter is not None:
            self._check(request, adapter)
        if adapter is None or adapter.files is None:
            return None
        if adapter.files not in self._reads:
            self._reads[adapter.files] = None
            self._wanted.put(adapter.files)
        read = self._reads[adapter.files]
        if read is None:
            return None
        # The same file means other weights where all experts are one tensor.
        return hashlib.sha256(b"kvoffload adapter 3d\n" + read.digest).digest() if adapter.source.is_3d else read.digest

    def _admit(self, request: LoRARequest) -> _Adapter | None:
        if len(self._adapters) >= self._limit:
            if not self._is_full:
                logger.warning("more than %d LoRA adapters: later ones are not offloaded", self._limit)
            self._is_full = True
            return None
        adapter = self._adapters[request.lora_int_id] = _Adapter(_source(request), None)
        folder = Path(os.path.expanduser(request.lora_path))
        stamp = _stamp(folder)
        if any(getattr(request, name, None) for name in _GIVEN_OTHERWISE):
            self._refuse(request, adapter, "its weights do not come from its folder")
        elif not stamp:
            self._refuse(request, adapter, f"{folder} is no folder with an adapter")
        else:
            adapter.files = _Files(folder, stamp)
        return adapter

    def _check(self, request: LoRARequest, adapter: _Adapter) -> None:
        """Refuses what may no longer be what the engine holds."""
        if adapter.files is None:
            return
        read = self._reads.get(adapter.files)
        if _is_reloaded(request):
            self._refuse(request, adapter, "it is loaded in place")
        elif adapter.source != _source(request):
            self._refuse(request, adapter, f"its id was that of {adapter.source.name} at {adapter.source.path}")
        elif _stamp(adapter.files.folder) != adapter.files.stamp:
            self._refuse(request, adapter, "its files have changed")
        elif read is not None and read.fault:
            self._refuse(request, adapter, read.fault)

    def _refuse(self, request: LoRARequest, adapter: _Adapter, why: str) -> None:
        """For good: an id whose content was in doubt once stays so."""
        adapter.files = None
        logger.warning(
            "requests with LoRA adapter %s (id %d) are not offloaded: %s", request.lora_name, request.lora_int_id, why
        )

    def _collect(self) -> None:
        while True:
            try:
                read = self._done.get_nowait()
            except Empty:
                return
            self._reads[read.files] = read

    def _read(self) -> None:
        while (files := self._wanted.get()) is not None:
            digest, fault = b"", ""
            time.sleep(_left_of_tick(files.stamp))
            try:
                digest = identify_adapter(files.folder, names=_FILES)
            except IdentityError as refusal:
                fault = str(refusal)
            if _stamp(files.folder) != files.stamp:
                fault = "its files changed while they were read"
            self._done.put(_Read(files, digest, fault))


def mask_of(digest: bytes) -> bytes:
    """32 bytes to combine with every block hash of a request by exclusive or; zeros for no adapter.

    The engine's hashes stay the engine's, and blocks of two contents under one name get names of their own.
    """
    return hashlib.sha256(b"kvoffload adapter mask 1\n" + digest).digest() if digest else bytes(32)


def _source(request: LoRARequest) -> _Source:
    return _Source(request.lora_name, request.lora_path, bool(getattr(request, "is_3d_lora_weight", False)))


def _is_reloaded(request: LoRARequest) -> bool:
    return bool(getattr(request, "load_inplace", False))


def _stamp(folder: Path) -> _Stamp:
    """Of the adapter's files; empty if there are none."""
    found: list[_FileStamp] = []
    for name in _FILES:
        try:
            status = (folder / name).stat()
        except OSError:
            continue
        where = (status.st_dev, status.st_ino)
        found.append(_FileStamp(name, where, status.st_size, status.st_mtime_ns, status.st_ctime_ns))
    return tuple(found)


def _left_of_tick(stamp: _Stamp) -> float:
    """Seconds until the tick of the last change is over; at most one tick, whatever another machine's clock says."""
    passed_s = (time.time_ns() - max(file.ctime_ns for file in stamp)) / 1e9
    return max(0.0, min(TICK_S, TICK_S - passed_s))
