"""Both sides make the same of the same secret and hellos, and nothing of others."""

from __future__ import annotations

import pytest

from kvoffload.peers.link_hello import (
    HELLO_ANSWER_BYTES,
    HELLO_BYTES,
    HelloAnswer,
    HelloVerdict,
    LinkHello,
    LinkSecret,
    is_proof,
    read_hello,
    read_hello_answer,
)

HELLO = LinkHello(token=b"t" * 16, nonce=b"n" * 16, is_sealed=True)


def test_hello_and_answer_are_read_as_they_were_written() -> None:
    assert len(HELLO.pack()) == HELLO_BYTES
    assert read_hello(HELLO.pack()) == HELLO
    answer = HelloAnswer(verdict=HelloVerdict.BUSY, nonce=b"m" * 16, proof=b"p" * 32)
    assert len(answer.pack()) == HELLO_ANSWER_BYTES
    assert read_hello_answer(answer.pack()) == answer


def test_another_version_is_told_apart_from_nonsense() -> None:
    other = bytearray(HELLO.pack())
    other[4] = 9
    assert read_hello(bytes(other)) is HelloVerdict.OTHER_VERSION
    for nonsense in (b"GET / HTTP/1.1\r\n".ljust(HELLO_BYTES, b" "), b"\0" * HELLO_BYTES):
        with pytest.raises(ValueError, match="no hello"):
            read_hello(nonsense)
    with pytest.raises(ValueError, match="no answer"):
        read_hello_answer(b"\0" * HELLO_ANSWER_BYTES)
    unknown = bytearray(HelloAnswer(verdict=HelloVerdict.BUSY).pack())
    unknown[6] = 200
    with pytest.raises(ValueError, match="200"):
        read_hello_answer(bytes(unknown))


def test_every_key_and_proof_is_another_one() -> None:
    secret = LinkSecret(b"s" * 32, HELLO.pack(), b"m" * 16)
    made = [secret.server_proof, secret.client_proof, secret.server_key, secret.client_key]
    for other in (
        LinkSecret(b"S" * 32, HELLO.pack(), b"m" * 16),
        LinkSecret(b"s" * 32, LinkHello(token=b"t" * 16, nonce=b"N" * 16, is_sealed=True).pack(), b"m" * 16),
        LinkSecret(b"s" * 32, LinkHello(token=b"t" * 16, nonce=b"n" * 16, is_sealed=False).pack(), b"m" * 16),
        LinkSecret(b"s" * 32, HELLO.pack(), b"M" * 16),
    ):
        made += [other.server_proof, other.client_proof, other.server_key, other.client_key]
    assert len(set(made)) == len(made)
    assert {len(one) for one in made} == {32}


def test_a_proof_is_compared_whole() -> None:
    assert is_proof(b"p" * 32, b"p" * 32)
    assert not is_proof(b"p" * 31 + b"q", b"p" * 32)
    assert not is_proof(b"", b"p" * 32)
