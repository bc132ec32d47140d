"""The machine's libcrypto, which seals the links between servers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from kvoffload import native

FAST = 0x30100000
"""The first version of libcrypto that seals with AVX-512 and VAES."""
_TIMED_BYTES = 32 << 20


@dataclass(frozen=True, kw_only=True)
class SealLibrary:
    """The library that seals in this process."""

    name: str
    version: int
    file: str

    @property
    def is_fast(self) -> bool:
        return self.version >= FAST

    def describe(self) -> str:
        return f"{self.name} ({self.file})"


@cache
def find_seal_library() -> SealLibrary:
    """Returns the same library at each call, from any thread. RuntimeError: the machine has none."""
    name, version, file = native.seal_library()
    return SealLibrary(name=name, version=version, file=file)


def time_seal_rate() -> float:
    """Returns how many bytes a second one core seals. Takes milliseconds."""
    return _TIMED_BYTES / min(native.time_sealing(_TIMED_BYTES) for _ in range(3))
