"""Digests of LoRA adapters' contents. The engine's block hashes have an adapter's name and path, never its bytes.

The bytes that count are those at the time when the engine loads an adapter, and it does not tell when that is: once for
each `lora_int_id`, again after that id was dropped for lack of room, and at every use with `load_inplace`. Blocks that
it computed stay in its own prefix cache under name and path, and requests that find them there save them. So a name and
path stands for the files that lay there when it was first seen, as long as the engine lives. When these change, or an
id turns out to stand for two adapters, the content of a block is not certain, and the adapters are not offloaded any
more. A changed adapter needs a path of its own, as vLLM advises, too.

One case is not noticed: an adapter that was loaded ahead of its first request and rewritten in place before that.
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

MAX_ADAPTERS = 1 << 16
"""Maximum number of ids, and of places, remembered for the engine's life. With one more, no adapter is offloaded any
longer: forgetting one would forget that its content is in doubt."""
TICK_S = 0.02
"""Length of a file system's clock tick in seconds, at most. Two writes within a tick have the same time, so files are
read after the tick of their last change: a later write then shows."""
CLOSE_TIMEOUT_S = 5.0
"""How long a file that is being read may hold up the engine's end, in seconds."""

_FILES = ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")
"""All files of an adapter that vLLM reads."""
_GIVEN_OTHERWISE = ("lora_tensors", "tensorizer_config_dict")
"""Fields that are set in requests whose weights do not come from their folder."""


class _FileStamp(NamedTuple):
    """The properties of a file of which some change when it is written or replaced."""

    name: str
    where: tuple[int, int]
    size_bytes: int
    mtime_ns: int
    ctime_ns: int


_Stamp: TypeAlias = tuple[_FileStamp, ...]


class _Place(NamedTuple):
    """The name and path by which the engine's block hashes know an adapter."""

    name: str
    path: str


class _Read(NamedTuple):
    """The result of reading an adapter's files: a digest, or the reason why there is none."""

    place: _Place
    digest: bytes
    fault: str


@dataclass
class _Adapter:
    """The known facts of one adapter, which is a name and path."""

    folder: Path
    stamp: _Stamp
    is_3d: bool
    digest: bytes = b""
    """Digest of its content; empty while it is being read."""
    is_refused: bool = False


class AdapterContents:
    """Finds digests of adapters. `find` belongs to one thread, the scheduler's; another one reads files."""

    def __init__(self, *, limit: int = MAX_ADAPTERS) -> None:
        self._limit = limit
        self._adapters: dict[_Place, _Adapter] = {}
        self._places: dict[int, _Place] = {}  # of ids
        self._is_full = False
        self._wanted: SimpleQueue[tuple[_Place, _Adapter] | None] = SimpleQueue()
        self._done: SimpleQueue[_Read] = SimpleQueue()
        self._reader: threading.Thread | None = None

    def start(self) -> None:
        assert self._reader is None
        self._reader = threading.Thread(target=self._read, name="kvoffload-adapters", daemon=True)
        self._reader.start()

    def close(self) -> None:
        """Ends the reader once it has read all adapters asked for, or leaves it behind after `CLOSE_TIMEOUT_S`."""
        reader, self._reader = self._reader, None
        if reader is not None:
            self._wanted.put(None)
            reader.join(CLOSE_TIMEOUT_S)

    def find(self, request: LoRARequest | None) -> bytes | None:
        """Returns a digest of 32 bytes for the content of the request's adapter, b"" for no adapter.

        None: not known, yet or at all. Blocks of such a request must neither be saved nor loaded. Callers ask again at
        every use of an answer, since it may change between a request's start and end. Blocks only on `stat`.
        """
        if request is None:
            return b""
        self._collect()
        place = _Place(request.lora_name, request.lora_path)
        if not self._has_room(request.lora_int_id, place):
            return None
        self._note_id(request.lora_int_id, place)
        adapter = self._adapters.get(place)
        if adapter is None:
            adapter = self._admit(request, place)
        elif not adapter.is_refused:
            self._check(request, place)
        return None if adapter.is_refused or not adapter.digest else adapter.digest

    def _has_room(self, number: int, place: _Place) -> bool:
        has_room = (number in self._places or len(self._places) < self._limit) and (
            place in self._adapters or len(self._adapters) < self._limit
        )
        if not has_room and not self._is_full:
            logger.warning("more than %d LoRA adapters: none is offloaded any longer", self._limit)
        self._is_full = self._is_full or not has_room
        return not self._is_full

    def _note_id(self, number: int, place: _Place) -> None:
        known = self._places.setdefault(number, place)
        if known != place:
            # The engine may take the weights of one for the other's.
            for one in (known, place):
                self._refuse(one, f"id {number} is that of {known.name} ({known.path}) and {place.name} ({place.path})")

    def _admit(self, request: LoRARequest, place: _Place) -> _Adapter:
        folder = Path(os.path.expanduser(place.path))
        adapter = self._adapters[place] = _Adapter(folder, _stamp(folder), _is_3d(request))
        if any(getattr(request, name, None) for name in _GIVEN_OTHERWISE):
            self._refuse(place, "its weights do not come from its folder")
        elif not adapter.stamp:
            self._refuse(place, f"{folder} is no folder with an adapter")
        elif _is_reloaded(request):
            self._refuse(place, "it is loaded in place")
        else:
            self._wanted.put((place, adapter))
        return adapter

    def _check(self, request: LoRARequest, place: _Place) -> None:
        """Refuses an adapter if its files may no longer be those that the engine holds, or ever held under this
        name."""
        adapter = self._adapters[place]
        if _is_reloaded(request):
            self._refuse(place, "it is loaded in place")
        elif _is_3d(request) != adapter.is_3d:
            self._refuse(place, "its weights are taken in two ways")
        elif _stamp(adapter.folder) != adapter.stamp:
            self._refuse(place, "its files have changed")

    def _refuse(self, place: _Place, why: str) -> None:
        """Refuses an adapter for good: content that was in doubt once stays so."""
        adapter = self._adapters.setdefault(place, _Adapter(Path(place.path), (), is_3d=False))
        if not adapter.is_refused:
            logger.warning("requests with LoRA adapter %s (%s) are not offloaded: %s", place.name, place.path, why)
        adapter.is_refused = True

    def _collect(self) -> None:
        while True:
            try:
                read = self._done.get_nowait()
            except Empty:
                return
            if read.fault:
                self._refuse(read.place, read.fault)
            self._adapters[read.place].digest = read.digest

    def _read(self) -> None:
        while (wanted := self._wanted.get()) is not None:
            place, adapter = wanted
            time.sleep(_left_of_tick(adapter.stamp))
            digest, fault = b"", ""
            try:
                digest = identify_adapter(adapter.folder, names=_FILES)
            except IdentityError as refusal:
                fault = str(refusal)
            if _stamp(adapter.folder) != adapter.stamp:
                fault = "its files changed while they were read"
            if adapter.is_3d:
                # The same file means other weights where all experts are one tensor.
                digest = hashlib.sha256(b"kvoffload adapter 3d\n" + digest).digest()
            self._done.put(_Read(place, digest, fault))


def mask_of(digest: bytes) -> bytes:
    """Returns 32 bytes to combine with every block hash of a request by exclusive or; zeros for no adapter.

    The engine's hashes are unchanged, and blocks of two contents under one name get different names.
    """
    return hashlib.sha256(b"kvoffload adapter mask 1\n" + digest).digest() if digest else bytes(32)


def _is_3d(request: LoRARequest) -> bool:
    return bool(getattr(request, "is_3d_lora_weight", False))


def _is_reloaded(request: LoRARequest) -> bool:
    return bool(getattr(request, "load_inplace", False))


def _stamp(folder: Path) -> _Stamp:
    """Returns sizes and times of the adapter's files; empty if there are none."""
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
    """Returns the seconds until the tick of the last change is over; at most one tick, even if clocks differ."""
    passed_s = (time.time_ns() - max(file.ctime_ns for file in stamp)) / 1e9
    return max(0.0, min(TICK_S, TICK_S - passed_s))
