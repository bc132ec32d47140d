"""What the ranks of an engine tell each other when they register: each names what all of them hold together, so that
each can join the engine's session at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256

import msgpack

from kvoffload.errors import IdentityError, RegistrationError
from kvoffload.types import HASH_BYTES, Fingerprint

FRAME_BYTES = 4096
"""Of what a stage says, filled up with zeros: all say as much, so nobody has to say how much before."""
MAX_GROUPS = 256
MAX_FAULT_LETTERS = 512
_LENGTH_BYTES = 2

_TAG = b"kvoffload weights of ranks 1\n"

Exchange = Callable[[bytes], Sequence[bytes]]
"""Gives a frame to all ranks and returns those of all, stage by stage in their order, this one's among them."""


@dataclass(frozen=True, kw_only=True)
class Stage:
    """What a rank registered. `fault`: why it registered nothing, then the rest is empty."""

    fingerprint: bytes = b""
    record_bytes: tuple[int, ...] = ()
    """By group."""
    fault: str = ""
    weights: bytes = b""
    """`WeightDigests.name`."""
    replicas: tuple[int, ...] = ()
    """By group: tensor ranks in a row that hold the same bytes."""


class Pipeline:
    """Belongs to a worker's thread. Every rank calls `meet` or `withdraw` when it first registers, or the others wait
    for it as long as their process group lets them."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._has_met = False

    def meet(self, mine: Stage) -> list[Stage]:
        """Returns all ranks' words, in order. Raises where one of them could not register, or has other groups."""
        self._has_met = True
        stages = [decode_stage(frame) for frame in self._exchange(encode_stage(mine))]
        for number, stage in enumerate(stages):
            if stage.fault:
                raise RegistrationError(f"rank {number} of the engine did not register: {stage.fault}", remedy="")
            if len(stage.record_bytes) != len(mine.record_bytes):
                raise IdentityError(
                    f"rank {number} of the engine has {len(stage.record_bytes)} KV cache groups, this one "
                    f"{len(mine.record_bytes)}",
                    remedy="start all ranks with the same model and settings",
                )
        return stages

    def withdraw(self, fault: Exception) -> None:
        """This rank is not going to register: the others hear of it instead of waiting."""
        if not self._has_met:
            self._has_met = True
            self._exchange(encode_stage(Stage(fault=(str(fault) or type(fault).__name__)[:MAX_FAULT_LETTERS])))


def name_pipeline(fingerprints: Sequence[bytes], weights: bytes = b"") -> Fingerprint:
    """The name of what the stages hold together, in their order, and were computed with; one stage's is its own."""
    name = fingerprints[0] if len(fingerprints) == 1 else sha256(b"".join(fingerprints)).digest()
    return Fingerprint(sha256(name + weights).digest() if weights else name)


def combine_weights(ranks: Sequence[bytes]) -> bytes:
    """Of what all ranks compute with, stage by stage in their order. Empty if one of them could not look."""
    return sha256(_TAG + b"".join(ranks)).digest() if all(ranks) else b""


def encode_stage(stage: Stage) -> bytes:
    packed: bytes = msgpack.packb((stage.fingerprint, stage.record_bytes, stage.fault, stage.weights, stage.replicas))
    if _LENGTH_BYTES + len(packed) > FRAME_BYTES:
        raise RegistrationError(
            f"{len(stage.record_bytes)} KV cache groups are too many for an engine of several ranks", remedy=""
        )
    return (len(packed).to_bytes(_LENGTH_BYTES, "little") + packed).ljust(FRAME_BYTES, b"\0")


def decode_stage(frame: bytes) -> Stage:
    """Reads what a rank has sent. RegistrationError: it is no stage."""
    length = int.from_bytes(frame[:_LENGTH_BYTES], "little")
    try:
        fingerprint, record_bytes, fault, weights, replicas = msgpack.unpackb(
            frame[_LENGTH_BYTES : _LENGTH_BYTES + length],
            use_list=False,
            max_bin_len=HASH_BYTES,
            max_array_len=MAX_GROUPS,
            max_str_len=4 * MAX_FAULT_LETTERS,
            max_map_len=0,
            max_ext_len=0,
        )
    except (ValueError, TypeError) as broken:
        raise RegistrationError(f"a rank of the engine said what is none: {broken}", remedy="") from broken
    are_bytes = isinstance(fingerprint, bytes) and isinstance(weights, bytes)
    is_stage = are_bytes and isinstance(fault, str) and isinstance(record_bytes, tuple) and isinstance(replicas, tuple)
    if not is_stage or len(record_bytes) != len(replicas):
        raise RegistrationError("a rank of the engine said what is none", remedy="")
    are_sizes = all(isinstance(size, int) and size >= 0 for size in record_bytes)
    if not are_sizes or not all(isinstance(one, int) and one > 0 for one in replicas):
        raise RegistrationError("a rank of the engine said what is none", remedy="")
    return Stage(fingerprint=fingerprint, record_bytes=record_bytes, replicas=replicas, fault=fault, weights=weights)
