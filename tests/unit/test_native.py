"""The native core through its Python door: hashes against hashlib, errors, and what the machine is said to be."""

from __future__ import annotations

import hashlib
import re
import struct
import subprocess
import sys
import threading
from dataclasses import FrozenInstanceError, replace

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvoffload import native

ROOT = bytes(32)


def reference_hashes(
    tokens: npt.NDArray[np.uint32], block_size: int, parent: bytes, extras: list[bytes] | None = None
) -> bytes:
    """The definition in native/src/hash/block_hash.hpp, by hashlib."""
    digests = []
    for block in range(len(tokens) // block_size):
        extra = extras[block] if extras else b""
        message = parent + struct.pack("<II", block_size, len(extra))
        message += tokens[block * block_size : (block + 1) * block_size].astype("<u4").tobytes() + extra
        parent = hashlib.sha256(message).digest()
        digests.append(parent)
    return b"".join(digests)


def make_tokens(count: int) -> npt.NDArray[np.uint32]:
    return np.arange(count, dtype=np.uint32) * np.uint32(2654435761)


class TestHashBlocks:
    @given(
        tokens=st.lists(st.integers(0, 2**32 - 1), max_size=200),
        block_size=st.integers(1, 70),
        parent=st.binary(min_size=32, max_size=32),
    )
    def test_equals_the_definition(self, tokens: list[int], block_size: int, parent: bytes) -> None:
        array = np.array(tokens, dtype=np.uint32)
        assert native.hash_blocks(array, block_size, parent) == reference_hashes(array, block_size, parent)

    @given(
        extras=st.lists(st.binary(max_size=150), max_size=12), block_size=st.integers(1, 40), tail=st.integers(0, 39)
    )
    def test_equals_the_definition_with_extras(self, extras: list[bytes], block_size: int, tail: int) -> None:
        tokens = make_tokens(len(extras) * block_size + tail % block_size)
        ends = np.cumsum([len(extra) for extra in extras], dtype=np.uint64)
        digests = native.hash_blocks(tokens, block_size, ROOT, b"".join(extras), ends)
        assert digests == reference_hashes(tokens, block_size, ROOT, extras)

    def test_a_partial_tail_has_no_digest(self) -> None:
        whole = native.hash_blocks(make_tokens(48), 16, ROOT)
        assert len(whole) == 3 * 32
        assert native.hash_blocks(make_tokens(63), 16, ROOT) == whole
        assert native.hash_blocks(make_tokens(15), 16, ROOT) == b""
        assert native.hash_blocks(make_tokens(0), 16, ROOT) == b""

    def test_a_digest_continues_the_chain(self) -> None:
        whole = native.hash_blocks(make_tokens(160), 16, ROOT)
        assert native.hash_blocks(make_tokens(160)[64:], 16, whole[96:128]) == whole[128:]

    def test_no_extras_and_empty_extras_are_the_same(self) -> None:
        tokens = make_tokens(32)
        assert native.hash_blocks(tokens, 16, ROOT, b"", np.zeros(2, np.uint64)) == native.hash_blocks(tokens, 16, ROOT)

    def test_a_read_only_array_is_accepted(self) -> None:
        tokens = make_tokens(32)
        tokens.flags.writeable = False
        assert native.hash_blocks(tokens, 16, ROOT) == reference_hashes(tokens, 16, ROOT)

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            ({"tokens": make_tokens(32).astype(np.int64)}, "tokens must have dtype uint32"),
            ({"tokens": make_tokens(32).reshape(2, 16)}, "tokens must have 1 dimension, not 2"),
            ({"tokens": make_tokens(64)[::2]}, "tokens must be contiguous"),
            ({"block_size": 0}, "block_size must be 1 to 2**32 - 1, not 0"),
            ({"block_size": -16}, "block_size must be 1 to 2**32 - 1, not -16"),
            ({"block_size": 2**32}, "block_size must be 1 to 2**32 - 1, not 4294967296"),
            ({"parent": b"short"}, "parent must have 32 bytes, not 5"),
            ({"extras": b"ab"}, "extra_ends has 0 entries, the tokens make 2 full blocks"),
            ({"extra_ends": np.zeros(3, np.uint64)}, "extra_ends has 3 entries, the tokens make 2 full blocks"),
            ({"extra_ends": np.zeros(2, np.int64)}, "extra_ends must have dtype uint64"),
            ({"extras": b"ab", "extra_ends": np.array([2, 1], np.uint64)}, "1 follows 2"),
            ({"extras": b"ab", "extra_ends": np.array([1, 3], np.uint64)}, "not pass the 2 bytes of extras"),
            ({"extras": b"ab", "extra_ends": np.array([0, 1], np.uint64)}, "end at 1, extras has 2 bytes"),
            ({"tokens": make_tokens(3), "extras": b"ab"}, "no full block"),
        ],
    )
    def test_a_bad_argument_is_a_value_error_that_says_so(self, change: dict[str, object], words: str) -> None:
        arguments: dict[str, object] = {"tokens": make_tokens(32), "block_size": 16, "parent": ROOT} | change
        with pytest.raises(ValueError, match=re.escape(words)):
            native.hash_blocks(**arguments)  # type: ignore[arg-type]

    @pytest.mark.parametrize("change", [{"tokens": [1, 2, 3]}, {"parent": "text"}, {"block_size": "16"}])
    def test_an_argument_of_another_kind_is_a_type_error(self, change: dict[str, object]) -> None:
        arguments: dict[str, object] = {"tokens": make_tokens(32), "block_size": 16, "parent": ROOT} | change
        with pytest.raises(TypeError):
            native.hash_blocks(**arguments)  # type: ignore[arg-type]

    def test_threads_hash_at_once(self) -> None:
        tokens = make_tokens(16 * 500)
        expected = reference_hashes(tokens, 16, ROOT)
        results: list[bytes] = []
        threads = [
            threading.Thread(target=lambda: results.append(native.hash_blocks(tokens, 16, ROOT))) for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert results == [expected] * 4


class TestSha256:
    @given(st.binary(max_size=400))
    def test_equals_hashlib(self, data: bytes) -> None:
        expected = hashlib.sha256(data).digest()
        assert native.sha256(data) == expected
        assert native.sha256(bytearray(data)) == expected
        assert native.sha256(memoryview(data)) == expected

    def test_a_length_of_more_than_32_bits_is_written_whole(self) -> None:
        data = np.zeros(2**29 + 1, np.uint8)  # one page of the kernel's, mapped many times
        assert native.sha256(data) == hashlib.sha256(data).digest()

    def test_the_algorithm_is_named(self) -> None:
        assert hashlib.new(native.HASH_ALGORITHM, b"x").digest() == native.sha256(b"x")

    def test_a_buffer_with_gaps_is_refused(self) -> None:
        with pytest.raises(BufferError):
            native.sha256(memoryview(b"abcdef")[::2])

    def test_what_is_no_buffer_is_a_type_error(self) -> None:
        with pytest.raises(TypeError):
            native.sha256("text")  # type: ignore[arg-type]


class TestCapabilities:
    def test_they_are_plausible_frozen_and_stable(self) -> None:
        found = native.capabilities()
        assert found.architecture in {"x86_64", "aarch64"}
        assert found.sha256_path in {"sha_ni", "armv8_sha2", "portable"}
        assert found.page_bytes >= 4096
        assert found.numa_nodes >= 1
        assert all(re.fullmatch(r"(sm|ptx)_\d+", arch) for arch in found.kernel_archs)
        assert replace(native.capabilities(), huge_pages=found.huge_pages) == found
        with pytest.raises(FrozenInstanceError):
            found.numa_nodes = 2  # type: ignore[misc]

    def test_the_fastest_instructions_that_the_processor_has_are_used(self) -> None:
        found = native.capabilities()
        has_instructions = bool({"sha_ni", "arm_sha2"} & set(found.cpu_features))
        assert has_instructions == (found.sha256_path != "portable")

    def test_devices_are_looked_for_only_when_asked(self) -> None:
        assert native.capabilities().cuda_devices is None
        found = native.capabilities(probe_devices=True)
        assert (found.cuda_devices is None) == bool(found.cuda_problem)

    def test_a_missing_driver_is_explained(self) -> None:
        found = native.capabilities()
        assert found.has_cuda_driver != bool(found.cuda_problem)

    def test_they_print_as_a_table(self) -> None:
        bare = replace(
            native.capabilities(),
            architecture="x86_64",
            cpu_features=("sse4_1", "sha_ni"),
            sha256_path="sha_ni",
            kernel_archs=(),
            cuda_version=None,
            cuda_problem="libcuda.so.1 is not here",
            cuda_devices=None,
            io_uring_problem="this kernel has none",
            page_bytes=4096,
            huge_pages=(),
            transparent_huge_pages="madvise",
            transparent_huge_pages_in_shmem="",
            numa_nodes=1,
        )
        assert str(bare).splitlines() == [
            "processor     x86_64: sse4_1, sha_ni",
            "hashing       sha256 by sha_ni instructions",
            "kernels       none, built without nvcc",
            "CUDA driver   none: libcuda.so.1 is not here",
            "CUDA devices  unknown: libcuda.so.1 is not here",
            "io_uring      no: this kernel has none",
            "pages         4KiB",
            "huge pages    none",
            "transparent   madvise, in shared memory unknown",
            "NUMA nodes    1",
        ]
        equipped = replace(
            bare,
            kernel_archs=("sm_90", "ptx_80"),
            cuda_version=(13, 0),
            cuda_problem="",
            cuda_devices=(native.CudaDevice(name="NVIDIA H200", compute_capability=(9, 0)),),
            io_uring_problem="",
            huge_pages=(native.HugePagePool(page_bytes=2 << 20, total=8, free=3),),
        )
        assert str(equipped).splitlines()[2:8] == [
            "kernels       sm_90, ptx_80",
            "CUDA driver   CUDA 13.0",
            "CUDA devices  NVIDIA H200 (sm_90)",
            "io_uring      yes",
            "pages         4KiB",
            "huge pages    2MiB (3 of 8 free)",
        ]


def test_a_missing_extension_says_how_to_build_it() -> None:
    script = """
import sys
sys.modules["kvoffload._native"] = None
from kvoffload.errors import NativeError
try:
    import kvoffload.native
except ImportError as fault:
    assert isinstance(fault, NativeError) and fault.code == "native"
    print(fault)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.count("\n") == 1
    assert "pip install -e ." in done.stdout
