"""Chooses which libcrypto seals links: the machine's, or a newer one that a package has brought."""

from __future__ import annotations

import base64
import csv
import hashlib
import os
import re
import site
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path

from kvoffload import native

PACKAGE = "psycopg-binary"
"""`pip install kvoffload[seal]` installs it. Its wheels have a libcrypto of their own, as a file; nothing of its Python
is imported."""
FAST = 0x30100000
"""From this version on libcrypto seals with AVX-512 and VAES."""
_FOLDER = "psycopg_binary.libs"
_NAME = re.compile(r"libcrypto(-[0-9a-f]+)?\.so\.3")
_MAX_BYTES = 64 << 20
_TIMED_BYTES = 32 << 20


class UntrustedFileError(Exception):
    """A file that may not be what the package's owner has installed."""


@dataclass(frozen=True, kw_only=True)
class SealLibrary:
    """Tells what seals in this process, and why the package's does not if it is there."""

    name: str
    version: int
    file: str
    refusal: str = ""

    @property
    def is_fast(self) -> bool:
        return self.version >= FAST

    def describe(self) -> str:
        return f"{self.name} ({self.file})"


@cache
def find_seal_library() -> SealLibrary:
    """Chooses at the first call, and tells the same afterwards. From any thread. RuntimeError: there is none."""
    return choose_library([*site.getsitepackages(), *([site.getusersitepackages()] if site.ENABLE_USER_SITE else [])])


def choose_library(folders: Sequence[str]) -> SealLibrary:
    """Takes the package's if it is in one of these folders and newer than the machine's, and passes all checks."""
    refusal = ""
    try:
        file = find_packaged(folders)
        if file is not None:
            native.use_seal_library(str(file))
    except (UntrustedFileError, OSError, RuntimeError, ValueError, TypeError, csv.Error) as fault:
        refusal = str(fault) or type(fault).__name__
    name, version, where = native.seal_library()
    return SealLibrary(name=name, version=version, file=where, refusal=refusal)


def find_packaged(folders: Sequence[str]) -> Path | None:
    """Finds the package's libcrypto where interpreters install packages, not where PYTHONPATH or the current folder
    leads. None: it is not installed. UntrustedFileError: others could have written it, or it is not what was
    installed."""
    absolute = [folder for folder in folders if os.path.isabs(folder)]
    for found in metadata.distributions(name=PACKAGE, path=absolute):
        listed = [file for file in found.files or () if file.parent.name == _FOLDER and _NAME.fullmatch(file.name)]
        if len(listed) != 1:
            raise UntrustedFileError(f"{PACKAGE} lists {len(listed)} of them, and one is wanted")
        file = _check_owners(Path(os.fspath(listed[0].locate())))
        _check_digest(file, listed[0].hash)
        return file
    return None


def _check_owners(file: Path) -> Path:
    """Returns the file by a path without links. It and all folders above it may be written by nobody but root and this
    process's user."""
    resolved = file.resolve(strict=True)
    if resolved != file.parent.parent.resolve() / file.parent.name / file.name:
        raise UntrustedFileError(f"{file} is a link")
    for part in (resolved, *resolved.parents):
        found = part.stat()
        if found.st_uid not in (0, os.geteuid()):
            raise UntrustedFileError(f"{part} belongs to user {found.st_uid}")
        # In a folder like /tmp nobody can replace what belongs to others.
        is_shared = stat.S_ISDIR(found.st_mode) and found.st_mode & stat.S_ISVTX
        if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not is_shared:
            raise UntrustedFileError(f"others may write {part}: chmod go-w {part}")
    return resolved


def _check_digest(file: Path, listed: metadata.FileHash | None) -> None:
    if listed is None or listed.mode != "sha256":
        raise UntrustedFileError(f"{PACKAGE} lists no SHA-256 of {file}")
    if file.stat().st_size > _MAX_BYTES:
        raise UntrustedFileError(f"{file} is larger than {_MAX_BYTES >> 20} MiB")
    digest = base64.urlsafe_b64encode(hashlib.sha256(file.read_bytes()).digest()).rstrip(b"=").decode()
    if digest != listed.value:
        raise UntrustedFileError(f"{file} is not what was installed: pip install --force-reinstall {PACKAGE}")


def time_seal_rate() -> float:
    """Returns how many bytes a second one core seals. Takes milliseconds."""
    return _TIMED_BYTES / min(native.time_sealing(_TIMED_BYTES) for _ in range(3))
