"""The messages that an engine's ranks exchange when they register. With them each rank can name all that they hold
together, and join the engine's session at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256

import msgpack

from kvoffload.cache import GroupRule
from kvoffload.connector.common.step_plan import GroupFacts
from kvoffload.connector.engine.geometry import group_name
from kvoffload.errors import IdentityError, RegistrationError, UnsupportedError
from kvoffload.protocol.limits import MAX_GROUPS, MAX_IDENTITY
from kvoffload.types import HASH_BYTES, Fingerprint, ReuseRule

FRAME_BYTES = 16_384
"""Length of each message, padded with zeros: all have the same length, so ranks need not exchange it first."""
MAX_FAULT_LETTERS = 512
_LENGTH_BYTES = 2

_TAG = b"kvoffload weights of ranks 1\n"
_STAGES_TAG = b"kvoffload groups per stage 1\n"
"""A tag that sets names apart from those of former versions, whose records of a pipeline have other groups."""

Exchange = Callable[[bytes], Sequence[bytes]]
"""Sends a frame to all ranks and returns the frames of all, stage by stage in their order, with this one's."""


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A rank's registration. `fault`: why it registered nothing; then the other fields are empty."""

    fingerprint: bytes = b""
    groups: tuple[GroupFacts, ...] = ()
    """Groups of its layers; their names and stage are not sent."""
    fault: str = ""
    weights: bytes = b""
    """`WeightDigests.name`."""
    described: Mapping[str, str] = field(default_factory=dict)
    """A readable description of its identity."""


class Pipeline:
    """Belongs to a worker's thread. Every rank calls `meet` or `withdraw` when it first registers, or the others wait
    for it as long as their process group lets them."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._has_met = False

    def meet(self, mine: Stage) -> list[Stage]:
        """Returns all ranks' registrations, in order. Waits for all ranks; raises if one of them could not register."""
        self._has_met = True
        stages = [decode_stage(frame) for frame in self._exchange(encode_stage(mine))]
        for number, stage in enumerate(stages):
            if stage.fault:
                raise RegistrationError(f"rank {number} of the engine did not register: {stage.fault}", remedy="")
        return stages

    def withdraw(self, fault: Exception) -> None:
        """Sends the other ranks a fault in place of this rank's registration, so that they do not wait for it."""
        if not self._has_met:
            self._has_met = True
            self._exchange(encode_stage(Stage(fault=(str(fault) or type(fault).__name__)[:MAX_FAULT_LETTERS])))


def name_pipeline(fingerprints: Sequence[bytes], weights: bytes = b"") -> Fingerprint:
    """Returns a name for the stages together, in their order, and for `weights`; a single stage keeps its own name."""
    name = fingerprints[0] if len(fingerprints) == 1 else sha256(_STAGES_TAG + b"".join(fingerprints)).digest()
    return Fingerprint(sha256(name + weights).digest() if weights else name)


def combine_weights(ranks: Sequence[bytes]) -> bytes:
    """Returns a digest of all ranks' weights, stage by stage in their order. Empty if a rank could not read its own."""
    return sha256(_TAG + b"".join(ranks)).digest() if all(ranks) else b""


def join_ranks(ranks: Sequence[Stage], *, stage_ranks: int, first: int = 0) -> tuple[GroupFacts, ...]:
    """Returns the session's groups, from the registrations of a machine's ranks, `stage_ranks` of each stage. `first`:
    the number of the first rank. IdentityError: ranks of one stage have different groups."""
    for at, rank in enumerate(ranks):
        of_stage = at // stage_ranks * stage_ranks
        if rank.groups != ranks[of_stage].groups:
            raise different_groups(first + of_stage, first + at)
    return join_stages([rank.groups for rank in ranks[::stage_ranks]])


def join_stages(stages: Sequence[Sequence[GroupFacts]]) -> tuple[GroupFacts, ...]:
    """Returns the session's groups: each stage's part of an engine's group is a group of its own, with records of its
    own size. They come in the order of the engine's block tables, and stage by stage."""
    joined = [replace(group, stage=number) for number, groups in enumerate(stages) for group in groups]
    firsts: dict[int, GroupFacts] = {}
    for group in joined:
        first = firsts.setdefault(group.index, group)
        if group.rule != first.rule:
            raise IdentityError(
                f"stages {first.stage} and {group.stage} keep blocks of {group.name} by different rules",
                remedy="start all ranks with the same model and settings",
            )
    if len(joined) > MAX_GROUPS:
        raise UnsupportedError(
            f"the stages of this engine have {len(joined)} KV cache groups in all, allowed are {MAX_GROUPS}",
            remedy="give the pipeline fewer stages",
        )
    return tuple(sorted(joined, key=lambda group: group.key))


def different_groups(one: object, other: object) -> IdentityError:
    """Returns the error to raise if these two ranks of a stage have different groups."""
    return IdentityError(
        f"ranks {one} and {other} have different KV cache groups",
        remedy="start all ranks with the same model and settings",
    )


def encode_stage(stage: Stage) -> bytes:
    groups = [
        (
            group.index,
            group.rule.block_size,
            group.rule.reuse,
            group.rule.window,
            group.record_bytes,
            group.replicas,
        )
        for group in stage.groups
    ]
    described = tuple(stage.described.items())
    packed: bytes = msgpack.packb((stage.fingerprint, groups, stage.fault, stage.weights, described))
    if len(groups) > MAX_GROUPS:
        raise RegistrationError(f"{len(groups)} KV cache groups are too many, allowed are {MAX_GROUPS}", remedy="")
    if _LENGTH_BYTES + len(packed) > FRAME_BYTES:
        raise RegistrationError(
            f"this rank's registration takes {len(packed)} bytes, allowed are {FRAME_BYTES - _LENGTH_BYTES}",
            remedy="",
        )
    return (len(packed).to_bytes(_LENGTH_BYTES, "little") + packed).ljust(FRAME_BYTES, b"\0")


def decode_stage(frame: bytes) -> Stage:
    """Reads a frame that a rank has sent. RegistrationError: it is malformed."""
    length = int.from_bytes(frame[:_LENGTH_BYTES], "little")
    try:
        fingerprint, groups, fault, weights, described = msgpack.unpackb(
            frame[_LENGTH_BYTES : _LENGTH_BYTES + length],
            use_list=False,
            max_bin_len=HASH_BYTES,
            max_array_len=max(MAX_GROUPS, MAX_IDENTITY),
            max_str_len=4 * MAX_FAULT_LETTERS,
            max_map_len=0,
            max_ext_len=0,
        )
        if not (isinstance(fingerprint, bytes) and isinstance(weights, bytes) and isinstance(fault, str)):
            raise TypeError("a name is no bytes, or a fault no text")
        return Stage(
            fingerprint=fingerprint,
            groups=tuple(_read_group(*group) for group in groups),
            fault=fault,
            weights=weights,
            described={_read_text(name): _read_text(value) for name, value in described},
        )
    except (ValueError, TypeError, KeyError) as broken:
        raise RegistrationError(f"a rank of the engine sent a malformed registration: {broken}", remedy="") from broken


def _read_group(*numbers: int) -> GroupFacts:
    for number in numbers:
        if type(number) is not int or number < 0:
            raise TypeError(f"{number!r} is no size")
    index, block_size, reuse, window, record_bytes, replicas = numbers
    if not replicas:
        raise ValueError("no rank holds a group")
    rule = GroupRule(block_size=block_size, reuse=ReuseRule(reuse), window=window)
    return GroupFacts(index=index, name=group_name(index), rule=rule, record_bytes=record_bytes, replicas=replicas)


def _read_text(text: object) -> str:
    if not isinstance(text, str):
        raise TypeError(f"{type(text).__name__} is no text")
    return text
