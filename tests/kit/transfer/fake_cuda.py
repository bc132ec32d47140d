"""The driver made for tests, opened from Python: device memory that the host cannot touch, and what it reports."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

LIBRARY = Path(__file__).parents[3] / "build" / "native" / "tests" / "libfake_cuda.so"

needs_fake_cuda = pytest.mark.skipif(
    not LIBRARY.exists(), reason="the driver made for tests is not built: make native-test"
)


class FakeCuda:
    """One life of the driver. Every engine on it is closed before the next life begins."""

    def __init__(self, seed: int = 1) -> None:
        self._door = ctypes.CDLL(str(LIBRARY))
        self._door.fake_cuda_alloc.restype = ctypes.c_uint64
        self._door.fake_cuda_open_stream.restype = ctypes.c_uint64
        self._door.fake_cuda_report_count.restype = ctypes.c_uint64
        self._door.fake_cuda_registrations.restype = ctypes.c_uint64
        self._door.fake_cuda_pattern_byte.restype = ctypes.c_uint8
        self._door.fake_cuda_reset(ctypes.c_uint64(seed))

    @property
    def library(self) -> str:
        return str(LIBRARY)

    @property
    def report_count(self) -> int:
        """Races and calls that no program may make."""
        return int(self._door.fake_cuda_report_count())

    @property
    def registrations(self) -> int:
        """Pieces of host memory that the driver knows."""
        return int(self._door.fake_cuda_registrations())

    def allocate(self, size_bytes: int) -> int:
        address = int(self._door.fake_cuda_alloc(ctypes.c_uint64(size_bytes)))
        assert address != 0
        return address

    def open_stream(self) -> int:
        return int(self._door.fake_cuda_open_stream())

    def read(self, address: int, size_bytes: int) -> bytes:
        seen = ctypes.create_string_buffer(size_bytes)
        self._door.fake_cuda_peek(ctypes.c_uint64(address), seen, ctypes.c_size_t(size_bytes))
        return seen.raw

    def write(self, address: int, data: bytes) -> None:
        self._door.fake_cuda_poke(ctypes.c_uint64(address), data, ctypes.c_size_t(len(data)))

    def compute(self, stream: int, address: int, size_bytes: int, pattern: int) -> None:
        """Starts a model's kernel in the stream, which writes at some later time."""
        self._door.fake_cuda_write_pages(
            ctypes.c_uint64(stream), ctypes.c_uint64(address), ctypes.c_uint64(size_bytes), ctypes.c_uint64(pattern)
        )

    def pattern(self, pattern: int, size_bytes: int) -> bytes:
        return bytes(
            self._door.fake_cuda_pattern_byte(ctypes.c_uint64(pattern), ctypes.c_uint64(at)) for at in range(size_bytes)
        )
