"""The messages of a data link: requests about records of one identity, group and shard, and answers, with their bytes.

A get: request, answer, the records that were found. A put: request, answer with what is wanted, those records, answer
with what became of them. A look, or a removal: request, answer.

Records may be coded where the client says so in its request and the server in its answer: servers from before this send
zeros in both places. In a get the server says so if some of them are. In a put it says that it takes them coded, and
the client then says before the first record whether some are. Before each record come its length, if it is coded, or 0.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

import numpy as np
import numpy.typing as npt

from kvoffload.tiers.base import Digests, RecordNames, RecordOutcome
from kvoffload.types import HASH_BYTES
from kvoffload.units import GIB

MAGIC: Final = b"KVPR"
MAX_RECORDS: Final = 4096
MAX_RECORD_BYTES: Final = GIB
CODE: Final = 1
"""The version of coded records (docs/format.md)."""
_HEAD = struct.Struct("<4sHHIIIIQ32s")
_ANSWER = struct.Struct("<4sHHI")
_CODE = struct.Struct("<I")
HEAD_BYTES: Final = _HEAD.size
ANSWER_BYTES: Final = _ANSWER.size
CODE_BYTES: Final = _CODE.size
_DIGEST_BYTES: Final = 8
_IS_OUTCOME = np.zeros(256, np.bool_)
"""0: to be sent."""
_IS_OUTCOME[[0, *RecordOutcome]] = True


class LinkVerb(IntEnum):
    LOOK = 1
    GET = 2
    PUT = 3
    REMOVE = 4
    COUNT = 5
    """How much memory there is, and how much of it is used."""


class LinkStatus(IntEnum):
    OK = 0
    UNKNOWN_IDENTITY = 1
    """It has to be introduced first."""
    CLOSING = 2
    """The server ends, or has no memory yet."""


class BadRequestError(ValueError):
    """A message that is no request, or asks for too much. One line."""


@dataclass(frozen=True, kw_only=True)
class LinkRequest:
    """`digests` and `parents` are those of a put."""

    verb: LinkVerb
    names: RecordNames
    record_bytes: int = 0
    wait_ms: int = 0
    """How long the client waits for the answer."""
    code: int = 0
    """CODE: it takes records coded, or may code those that it puts."""
    digests: bytes = b""
    parents: bytes = b""

    def pack(self) -> bytes:
        names = self.names
        head = _HEAD.pack(
            MAGIC,
            self.verb,
            self.code,
            names.group,
            names.shard,
            len(names),
            self.wait_ms,
            self.record_bytes,
            names.fingerprint,
        )
        return b"".join((head, names.hashes, self.digests, self.parents))


@dataclass(frozen=True, kw_only=True)
class RequestHead:
    """The beginning of a request: its subject, and the length of the rest."""

    verb: LinkVerb
    fingerprint: bytes
    group: int
    shard: int
    count: int
    record_bytes: int
    wait_ms: int
    code: int

    @property
    def rest_bytes(self) -> int:
        each = HASH_BYTES + (_DIGEST_BYTES + HASH_BYTES if self.verb is LinkVerb.PUT else 0)
        return self.count * each

    def read_rest(self, rest: bytes) -> LinkRequest:
        """Reads what follows the head; `rest` has `rest_bytes`."""
        hashes = self.count * HASH_BYTES
        digests = hashes + self.count * _DIGEST_BYTES
        return LinkRequest(
            verb=self.verb,
            names=RecordNames(fingerprint=self.fingerprint, hashes=rest[:hashes], group=self.group, shard=self.shard),
            record_bytes=self.record_bytes,
            wait_ms=self.wait_ms,
            code=self.code,
            digests=rest[hashes:digests],
            parents=rest[digests:],
        )


def read_head(frame: bytes) -> RequestHead:
    """Reads the head of a request. BadRequestError: it is none."""
    magic, verb, code, group, shard, count, wait_ms, record_bytes, fingerprint = _HEAD.unpack(frame)
    if magic != MAGIC or verb not in LinkVerb.__members__.values():
        raise BadRequestError("the frame that came on a link is no request")
    if count > MAX_RECORDS or record_bytes > MAX_RECORD_BYTES:
        raise BadRequestError(
            f"a request about {count} records of {record_bytes} bytes; allowed are {MAX_RECORDS} of {MAX_RECORD_BYTES}"
        )
    return RequestHead(
        verb=LinkVerb(verb),
        fingerprint=fingerprint,
        group=group,
        shard=shard,
        count=count,
        record_bytes=record_bytes,
        wait_ms=wait_ms,
        code=code,
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class LinkAnswer:
    """One outcome a record, a number of `RecordOutcome`; `digests` of what a get found, else zeros or none. `code`:
    CODE if some of the records that follow are coded, or those of a put may be."""

    status: LinkStatus = LinkStatus.OK
    code: int = 0
    outcomes: npt.NDArray[np.uint8]
    digests: Digests

    def pack(self) -> bytes:
        head = _ANSWER.pack(MAGIC, self.status, self.code, len(self.outcomes))
        return b"".join((head, self.outcomes.tobytes(), self.digests.tobytes()))


def answer_only(status: LinkStatus) -> LinkAnswer:
    """Makes an answer without records."""
    return LinkAnswer(status=status, outcomes=np.empty(0, np.uint8), digests=np.empty(0, np.uint64))


@dataclass(frozen=True, kw_only=True)
class AnswerHead:
    """The beginning of an answer. `rest_bytes` bytes follow it, and then records, coded or not."""

    status: LinkStatus
    code: int
    rest_bytes: int


def read_answer_head(frame: bytes, wanted: int, *, code: int = 0) -> AnswerHead:
    """Reads the head of an answer. BadRequestError: it is none, or not about so many records, or in another code than
    the request said."""
    magic, status, answered, count = _ANSWER.unpack(frame)
    if magic != MAGIC or status not in LinkStatus.__members__.values():
        raise BadRequestError("the frame that came on a link is no answer")
    if answered not in (0, code):
        raise BadRequestError(f"an answer in code {answered}, where {code} was asked for")
    if count != (wanted if status == LinkStatus.OK else 0):
        raise BadRequestError(f"an answer about {count} records, not {wanted}")
    return AnswerHead(status=LinkStatus(status), code=answered, rest_bytes=count * (1 + _DIGEST_BYTES))


def read_answer(head: AnswerHead, rest: bytes) -> LinkAnswer:
    """Reads what follows an answer's head. BadRequestError: it has an outcome that this version does not know."""
    count = len(rest) // (1 + _DIGEST_BYTES)
    outcomes = np.frombuffer(rest, np.uint8, count)
    if not _IS_OUTCOME[outcomes].all():
        raise BadRequestError("an answer with outcomes that are none")
    return LinkAnswer(
        status=head.status,
        code=head.code,
        outcomes=outcomes,
        digests=np.frombuffer(rest, np.uint64, count, offset=count),
    )


def pack_code(code: int) -> bytes:
    """Packs what goes before the records of a put that may be coded: whether some are."""
    return _CODE.pack(code)


def read_code(frame: bytes) -> int:
    """Reads whether the records of a put are coded. BadRequestError: in a code that the server did not say it takes."""
    (code,) = _CODE.unpack(frame)
    if code not in (0, CODE):
        raise BadRequestError(f"records in code {code}, where {CODE} was allowed")
    return int(code)
