"""In what identities differ is told by names alone, and a look at other identities is bounded."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvoffload.protocol import IdentityField, Miss
from kvoffload.server.operators import prompt_ledger
from kvoffload.server.operators.prompt_ledger import find_differences
from tests.kit.cache.cache_model import HYBRID, PLAIN, make_chain
from tests.kit.server.explained import explain, store
from tests.kit.server.harness import Server, register_of


def parts(**values: str) -> tuple[IdentityField, ...]:
    return tuple(IdentityField(name=name, value=value) for name, value in values.items())


def test_differences_are_names() -> None:
    one = register_of(PLAIN, identity=parts(model="secret-a", revision="1", layers="x"))
    other = register_of(PLAIN, identity=parts(model="secret-b", revision="1", parallel="y"))
    assert find_differences(one, other) == ["model"]
    assert find_differences(one, replace(one, hash_algorithm="other", hash_seed=bytes(32))) == [
        "hash_algorithm",
        "hash_seed",
    ]
    assert find_differences(register_of(PLAIN), register_of(HYBRID)) == ["groups"]


def test_what_was_not_told_is_the_fingerprint() -> None:
    assert find_differences(register_of(PLAIN, "a"), register_of(PLAIN, "b")) == ["fingerprint"]


def test_only_the_latest_identities_are_looked_into(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_ledger, "MAX_LOOKED_AT", 2)
    with Server() as server:
        for number in range(4):
            other = server.process(f"other {number}").join(PLAIN, f"other {number}")
            store(other, make_chain(number, 1))
        engine = server.process("engine").join(PLAIN, "engine")
        found = [explain(engine, make_chain(number, 1)).miss for number in range(4)]
        assert found == [Miss.NEVER_SEEN, Miss.NEVER_SEEN, Miss.OTHER_IDENTITY, Miss.OTHER_IDENTITY]


def test_the_log_says_once_in_what_an_engine_differs_that_has_the_blocks(caplog: pytest.LogCaptureFixture) -> None:
    with Server() as server:
        other = server.process("other").join(PLAIN, "other", identity=parts(model="m", revision="1"))
        store(other, make_chain(1, 1))
        engine = server.process("engine").join(PLAIN, "engine", identity=parts(model="m", revision="2"))
        for _ in range(3):
            explain(engine, make_chain(1, 1))
    lines = [one.getMessage() for one in caplog.records if "stored by an engine" in one.getMessage()]
    [line] = lines
    assert line.startswith(
        "an engine of m computes prompts whose blocks are stored by an engine that differs in revision;"
    )
    assert [one.levelname for one in caplog.records if one.getMessage() in lines] == ["WARNING"]
