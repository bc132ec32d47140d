"""Digests of models and adapters that lie in a folder and so have no revision.

A model is named by its configuration files and its own code in full and by a sample of its weight files: name, size,
head (where the index of tensors is), tail, and windows at places that depend on the size alone. A fine-tune changes
every window; a file that is half written changes its tail. Reading whole weights would take minutes per engine start.

An adapter is small and easily replaced under the same name, so all of its bytes count.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Iterator
from pathlib import Path

from kvoffload.errors import IdentityError
from kvoffload.keys.canonical import Plain, encode_canonical

WEIGHT_SUFFIXES = frozenset({".safetensors", ".bin", ".pt", ".pth", ".gguf"})
CONFIG_SUFFIXES = frozenset({".json", ".py"})
EDGE_BYTES = 1 << 20
WINDOW_BYTES = 64 << 10
WINDOWS = 16
MAX_FILES = 4096
MAX_CONFIG_BYTES = 16 << 20

_SNAPSHOT = re.compile(r"[0-9a-f]{40}")


def identify_revision(folder: Path) -> str:
    """The revision of a model in a local folder: a hub snapshot's commit, else a digest of configuration and weights.

    A hub snapshot is a folder `snapshots/<40 hex digits>`: its content is fixed by its name.
    """
    if folder.parent.name == "snapshots" and _SNAPSHOT.fullmatch(folder.name):
        return folder.name
    files = _list_files(folder, "a model folder")
    weights = [file for file in files if file.suffix in WEIGHT_SUFFIXES]
    configs = [file for file in files if file.suffix in CONFIG_SUFFIXES and not file.name.startswith("tokenizer")]
    if not any(file.name in ("config.json", "params.json") for file in configs):
        raise IdentityError(f"{folder} has no config.json", remedy="give the folder that the engine loads")
    if not weights:
        kinds = ", ".join(sorted(WEIGHT_SUFFIXES))
        raise IdentityError(f"{folder} has no weight file", remedy=f"expected one of {kinds}")
    parts: list[Plain] = [[file.name, _digest_whole(file, MAX_CONFIG_BYTES)] for file in configs]
    parts += [[file.name, _digest_sample(file)] for file in weights]
    return "sample:" + hashlib.sha256(b"kvoffload model 1\n" + encode_canonical(parts)).hexdigest()


def identify_adapter(folder: Path, *, names: Collection[str] = ()) -> bytes:
    """32 bytes that name a LoRA adapter by all of its content; two adapters of one name never meet.

    With `names`, only these files count: those that the engine reads, of a folder that also has others.
    """
    files = [file for file in _list_files(folder, "an adapter folder") if file.suffix in WEIGHT_SUFFIXES | {".json"}]
    if names:
        files = [file for file in files if file.name in names]
    if not any(file.suffix in WEIGHT_SUFFIXES for file in files):
        raise IdentityError(f"{folder} has no adapter weights", remedy="give the adapter's folder")
    parts: list[Plain] = [[file.name, _digest_whole(file)] for file in files]
    return hashlib.sha256(b"kvoffload adapter 1\n" + encode_canonical(parts)).digest()


def sample_offsets(size_bytes: int) -> Iterator[tuple[int, int]]:
    """(offset, length) of what is read of a weight file of this size; the whole of a small one."""
    if size_bytes <= 2 * EDGE_BYTES + WINDOWS * WINDOW_BYTES:
        yield 0, size_bytes
        return
    yield 0, EDGE_BYTES
    span = size_bytes - 2 * EDGE_BYTES - WINDOW_BYTES
    for window in range(WINDOWS):
        yield EDGE_BYTES + span * window // (WINDOWS - 1), WINDOW_BYTES
    yield size_bytes - EDGE_BYTES, EDGE_BYTES


def _list_files(folder: Path, what: str) -> list[Path]:
    try:
        files = sorted((entry for entry in folder.iterdir() if entry.is_file()), key=lambda file: file.name)
    except OSError as fault:
        raise IdentityError(f"cannot read {folder}: {fault.strerror}", remedy=f"give {what}") from fault
    if len(files) > MAX_FILES:
        raise IdentityError(f"{folder} holds {len(files)} files", remedy=f"{what} holds at most {MAX_FILES}")
    return files


def _digest_whole(file: Path, limit_bytes: int | None = None) -> bytes:
    try:
        size_bytes = file.stat().st_size
        if limit_bytes is not None and size_bytes > limit_bytes:
            raise IdentityError(
                f"{file} has {size_bytes} bytes", remedy=f"a configuration file has at most {limit_bytes}"
            )
        with file.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").digest()
    except OSError as fault:
        raise IdentityError(f"cannot read {file}: {fault.strerror}") from fault


def _digest_sample(file: Path) -> bytes:
    digest = hashlib.sha256()
    try:
        size_bytes = file.stat().st_size
        digest.update(size_bytes.to_bytes(8, "little"))
        with file.open("rb") as stream:
            for offset, length in sample_offsets(size_bytes):
                stream.seek(offset)
                digest.update(stream.read(length))
    except OSError as fault:
        raise IdentityError(f"cannot read {file}: {fault.strerror}") from fault
    return digest.digest()
