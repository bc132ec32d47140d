"""Block hashes of a prompt as an engine would make them, for those who have a prompt and no engine.

vLLM hashes the tuple of a block's parent, its tokens and its extra keys, as Python's pickle or CBOR writes it. Both
forms are written here for these few values, many tokens at once; pickle itself is not used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvoffload.hash_rows import as_rows
from kvoffload.keys.block_hash import BlockHasher

Tokens = npt.NDArray[np.int64]
MAX_TOKEN = 2**31 - 1
MAX_BLOCK_TOKENS = 8192
"""Tokens of one of vLLM's blocks at most: pickle cuts longer ones into several frames."""
MAX_LETTERS = 512
"""Of a seed and of a salt, for the same reason."""
VLLM_SEED = "vllm-none-hash"
"""vLLM's own, where PYTHONHASHSEED is not set."""
_OWN_ALGORITHM = BlockHasher(1).algorithm


@dataclass(frozen=True, kw_only=True)
class HashSettings:
    """The settings that decide a block's name, together with its tokens."""

    algorithm: str
    block_size: int
    seed: str | None = None
    """The engine's seed; None: the one that the algorithm's engines use if none is set."""
    salt: str = ""
    """vLLM's `cache_salt`."""
    tenant: str = ""
    """A tenant whose blocks have names of their own; empty: none."""


def hash_prompt(tokens: Tokens, settings: HashSettings) -> bytes:
    """A hash for each full block. ValueError: only the engine can make them, and why, in one line."""
    if settings.algorithm == _OWN_ALGORITHM:
        hasher = BlockHasher(settings.block_size, seed=choose_seed(settings.algorithm, settings.seed))
        hashes = b"".join(hasher.hash_blocks(tokens, parent=hasher.root(salt=settings.salt)))
    else:
        hashes = _hash_as_vllm(tokens, settings)
    if not settings.tenant:
        return hashes
    return (as_rows(hashes) ^ np.frombuffer(mask_of_tenant(settings.tenant), np.uint8)).tobytes()


def choose_seed(algorithm: str, seed: str | None) -> str:
    """The one that is meant, if none is said."""
    if seed is not None:
        return seed
    return "" if algorithm == _OWN_ALGORITHM else VLLM_SEED


def digest_seed(seed: str) -> bytes:
    """Returns what an engine tells of its seed."""
    return sha256(seed.encode()).digest()


def mask_of_tenant(tenant: str) -> bytes:
    """Returns the mask that is applied to every block name of a tenant whose blocks are kept apart."""
    return sha256(b"tenant " + tenant.encode()).digest()


class _Form(Protocol):
    """How one of vLLM's algorithms writes what it hashes."""

    parent: bytes
    """The bytes before the 32 bytes of a parent."""
    nothing: bytes
    """No extra keys."""

    def text(self, text: str) -> bytes: ...

    def salt(self, salt: str) -> bytes:
        """The extra keys of a first block that has no others."""
        ...

    def numbers(self, tokens: Tokens) -> tuple[bytes, npt.NDArray[np.int64]]:
        """All of them, and how many bytes each takes."""
        ...

    def around(self, count: int, extra: bytes) -> tuple[bytes, bytes]:
        """The bytes between a parent and its block's tokens, and the bytes after the tokens."""
        ...

    def close(self, content: bytes) -> bytes:
        """Returns the whole message around its content."""
        ...


class _Pickled:
    """Protocol 5, in one frame."""

    parent = b"C\x20"
    nothing = b"N"
    _AGAIN = b"\x94"
    """Behind what could be referred to later."""

    def text(self, text: str) -> bytes:
        data = text.encode()
        head = b"\x8c" + bytes([len(data)]) if len(data) < 256 else b"X" + len(data).to_bytes(4, "little")
        return head + data + self._AGAIN

    def salt(self, salt: str) -> bytes:
        return self.text("cache_salt") + self.text(salt) + b"\x86" + self._AGAIN + b"\x85" + self._AGAIN

    def numbers(self, tokens: Tokens) -> tuple[bytes, npt.NDArray[np.int64]]:
        return _write_numbers(tokens, "<", [(1 << 8, b"K", 1), (1 << 16, b"M", 2), (1 << 31, b"J", 4)])

    def around(self, count: int, extra: bytes) -> tuple[bytes, bytes]:
        # Tuples of one to three items have no mark at their beginning.
        is_short = count <= 3
        end = (b"\x85", b"\x86", b"\x87")[count - 1] if is_short else b"t"
        return self._AGAIN + (b"" if is_short else b"("), end + self._AGAIN + extra + b"\x87" + self._AGAIN

    def close(self, content: bytes) -> bytes:
        return b"\x80\x05\x95" + (len(content) + 1).to_bytes(8, "little") + content + b"."


class _Cbor:
    """RFC 8949, with heads as short as they may be."""

    parent = b"\x83\x58\x20"
    nothing = b"\xf6"

    def text(self, text: str) -> bytes:
        data = text.encode()
        return self._head(3, len(data)) + data

    def salt(self, salt: str) -> bytes:
        return b"\x81\x82" + self.text("cache_salt") + self.text(salt)

    def numbers(self, tokens: Tokens) -> tuple[bytes, npt.NDArray[np.int64]]:
        kinds = [(24, b"", 1), (1 << 8, b"\x18", 1), (1 << 16, b"\x19", 2), (1 << 31, b"\x1a", 4)]
        return _write_numbers(tokens, ">", kinds)

    def around(self, count: int, extra: bytes) -> tuple[bytes, bytes]:
        return self._head(4, count), extra

    def close(self, content: bytes) -> bytes:
        return content

    @staticmethod
    def _head(kind: int, number: int) -> bytes:
        if number < 24:
            return bytes([kind << 5 | number])
        size = next(size for size in (1, 2, 4) if number < 1 << 8 * size)
        return bytes([kind << 5 | 23 + size.bit_length()]) + number.to_bytes(size, "big")


_FORMS: Mapping[str, _Form] = {"sha256": _Pickled(), "sha256_cbor": _Cbor()}


def _hash_as_vllm(tokens: Tokens, settings: HashSettings) -> bytes:
    form = _FORMS.get(settings.algorithm)
    if form is None:
        raise ValueError(f"hashes by {settings.algorithm} can only be made by their engine: ask with hashes")
    size = settings.block_size
    if not 1 <= size <= MAX_BLOCK_TOKENS:
        raise ValueError(f"a hash covers {size} tokens, allowed are 1 to {MAX_BLOCK_TOKENS}: ask with hashes")
    seed = choose_seed(settings.algorithm, settings.seed)
    if max(len(seed), len(settings.salt)) > MAX_LETTERS:
        raise ValueError(f"a seed and a salt have at most {MAX_LETTERS} letters")
    written, lengths = form.numbers(tokens[: len(tokens) // size * size])
    parent = sha256(form.close(form.text(seed))).digest()
    # A salt is in the first block alone, and in all others through their parents.
    first = form.around(size, form.salt(settings.salt) if settings.salt else form.nothing)
    later = form.around(size, form.nothing)
    hashes: list[bytes] = []
    begin = 0
    for end in np.cumsum(lengths)[size - 1 :: size].tolist():
        before, behind = later if hashes else first
        parent = sha256(form.close(b"".join((form.parent, parent, before, written[begin:end], behind)))).digest()
        hashes.append(parent)
        begin = end
    return b"".join(hashes)


def _write_numbers(
    tokens: Tokens, order: str, kinds: Sequence[tuple[int, bytes, int]]
) -> tuple[bytes, npt.NDArray[np.int64]]:
    """`kinds`, the smallest first: numbers below what, their head, and how many bytes follow it."""
    cells = np.zeros((len(tokens), 5), np.uint8)
    lengths = np.zeros(len(tokens), np.int64)
    low = 0
    for limit, head, size in kinds:
        chosen = (low <= tokens) & (tokens < limit)
        numbers = tokens[chosen].astype(f"{order}u{size}")
        cells[chosen, : len(head)] = np.frombuffer(head, np.uint8)
        cells[chosen, len(head) : len(head) + size] = numbers.view(np.uint8).reshape(-1, size)
        lengths[chosen] = len(head) + size
        low = limit
    return cells[np.arange(5) < lengths[:, None]].tobytes(), lengths
