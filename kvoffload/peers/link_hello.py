"""How a data link begins: both sides show that they have the session's secret, and make keys for this link alone.

The secret came over the control channel, which identifies both sides. It never travels on the link, and no two links
have the same keys: each side puts a number of its own into them that is used once.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Final

MAGIC: Final = b"KVPL"
VERSION: Final = 1
TOKEN_BYTES: Final = 16
NONCE_BYTES: Final = 16
PROOF_BYTES: Final = 32

_HELLO = struct.Struct("<4sHH16s16s")
_ANSWER = struct.Struct("<4sHH16s32s")
HELLO_BYTES: Final = _HELLO.size
HELLO_ANSWER_BYTES: Final = _ANSWER.size


class HelloVerdict(IntEnum):
    """A server's answer to a hello."""

    WELCOME = 0
    UNKNOWN = 1
    """There is no such session (any more)."""
    OTHER_MODE = 2
    """One side wants the link sealed, the other one does not."""
    BUSY = 3
    """There are as many links as there may be."""
    OTHER_VERSION = 4


@dataclass(frozen=True, kw_only=True)
class LinkHello:
    """The first bytes of the side that connects."""

    token: bytes
    nonce: bytes
    is_sealed: bool

    def pack(self) -> bytes:
        return _HELLO.pack(MAGIC, VERSION, int(self.is_sealed), self.token, self.nonce)


@dataclass(frozen=True, kw_only=True)
class HelloAnswer:
    """The first bytes of the side that accepts. `proof` shows that it has the secret; zeros where it refuses."""

    verdict: HelloVerdict
    nonce: bytes = bytes(NONCE_BYTES)
    proof: bytes = bytes(PROOF_BYTES)

    def pack(self) -> bytes:
        return _ANSWER.pack(MAGIC, VERSION, self.verdict, self.nonce, self.proof)


def read_hello(frame: bytes) -> LinkHello | HelloVerdict:
    """Reads a hello, or returns why the link is refused. ValueError: it is no hello of any version."""
    magic, version, mode, token, nonce = _HELLO.unpack(frame)
    if magic != MAGIC or mode > 1:
        raise ValueError("no hello of a link")
    if version != VERSION:
        return HelloVerdict.OTHER_VERSION
    return LinkHello(token=token, nonce=nonce, is_sealed=bool(mode))


def read_hello_answer(frame: bytes) -> HelloAnswer:
    """Reads the answer to a hello. ValueError: it is none, or has a verdict that this version does not know."""
    magic, _, verdict, nonce, proof = _ANSWER.unpack(frame)
    if magic != MAGIC:
        raise ValueError("no answer of a peer")
    return HelloAnswer(verdict=HelloVerdict(verdict), nonce=nonce, proof=proof)


@dataclass(frozen=True)
class LinkSecret:
    """The proofs and keys that both sides derive from the session's secret and both hellos."""

    secret: bytes = field(repr=False)
    hello: bytes
    nonce: bytes
    """The server's nonce."""

    @property
    def server_proof(self) -> bytes:
        return self._make(b"the server has it")

    @property
    def client_proof(self) -> bytes:
        return self._make(b"the client has it")

    @property
    def client_key(self) -> bytes:
        """The key that seals what the client sends."""
        return self._make(b"from client to server")

    @property
    def server_key(self) -> bytes:
        return self._make(b"from server to client")

    def _make(self, purpose: bytes) -> bytes:
        return hmac.new(
            self.secret, b"kvoffload link: " + purpose + b"\0" + self.hello + self.nonce, hashlib.sha256
        ).digest()


def is_proof(shown: bytes, wanted: bytes) -> bool:
    """Compares two proofs. It takes the same time for all of them."""
    return hmac.compare_digest(shown, wanted)
