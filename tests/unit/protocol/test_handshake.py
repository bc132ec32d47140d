"""The handshake, as tables."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvoffload.protocol import (
    CAPABILITIES,
    CODEC,
    MESSAGES,
    Acquire,
    Adopt,
    Agreement,
    Bye,
    ClientMessage,
    Error,
    ErrorCode,
    Greeting,
    GroupTerms,
    HandshakeSettings,
    Hello,
    HelloAccepted,
    IdentityField,
    Phase,
    Prefetch,
    Register,
    Role,
    Stats,
    Subscribe,
    advance,
    agree_version,
    check_call,
)
from kvoffload.types import ReuseRule
from tests.kit.protocol.examples import draw_message
from tests.kit.protocol.version_two import Pin

SETTINGS = HandshakeSettings(capabilities=frozenset({"adopt", "events"}), domain="blue", software="kvoffload 1")
HELLO = Hello(protocol_min=1, protocol_max=1, capabilities=("events", "prefetch", "warp"))
GROUPS = (
    GroupTerms(record_bytes=4096, block_size=16, reuse=ReuseRule.PREFIX, shards=2),
    GroupTerms(record_bytes=100, block_size=32, reuse=ReuseRule.WINDOW, window=1024),
)
IDENTITY = (IdentityField(name="model_dtype", value="bfloat16"), IdentityField(name="revision", value="r1"))
REGISTER = Register(
    fingerprint=bytes(range(32)),
    hash_algorithm="sha256",
    hash_seed=b"\x05" * 32,
    hash_block_size=16,
    groups=GROUPS,
    ranks=2,
    identity=IDENTITY,
)
COMPARED = ["hash_algorithm", "hash_seed", "hash_block_size", "groups", "ranks", "fingerprint"]
GREETED = Agreement(phase=Phase.GREETED, protocol=1, capabilities=frozenset({"events"}))


def refuse(found: Any) -> Error:
    assert isinstance(found, Error)
    assert CODEC.encode_answer(found, number=1, boot_id=1)
    assert not found.retryable
    return found


class TestHello:
    def test_accepted_settings_are_what_both_have(self) -> None:
        agreed = advance(SETTINGS, Agreement(), HELLO)
        assert agreed == GREETED
        assert agreed.describe(SETTINGS) == HelloAccepted(
            protocol=1, capabilities=("events",), domain="blue", software="kvoffload 1"
        )

    @pytest.mark.parametrize(
        ("server", "client", "expected"),
        [
            ((1, 1), (1, 1), 1),
            ((1, 2), (1, 1), 1),
            ((1, 1), (1, 2), 1),
            ((1, 2), (1, 2), 2),
            ((2, 4), (1, 3), 3),
            ((2, 2), (1, 1), None),
            ((1, 1), (2, 2), None),
            ((1, 4), (3, 2), None),
            ((3, 2), (1, 4), None),
        ],
    )
    def test_the_highest_common_version_wins(self, server: Any, client: Any, expected: int | None) -> None:
        settings = replace(SETTINGS, protocol_min=server[0], protocol_max=server[1])
        found = advance(settings, Agreement(), replace(HELLO, protocol_min=client[0], protocol_max=client[1]))
        if expected is not None:
            assert isinstance(found, Agreement)
            assert found.protocol == expected
            return
        refusal = refuse(found)
        ours, theirs = f"{server[0]} to {server[1]}", f"{client[0]} to {client[1]}"
        assert (refusal.code, refusal.field) == (ErrorCode.VERSION, "protocol")
        assert (refusal.server_value, refusal.client_value) == (ours, theirs)
        assert refusal.message == f"hello: protocol is {ours} here, {theirs} there"

    @pytest.mark.parametrize(("domain", "is_right"), [("", True), ("blue", True), ("red", False)])
    def test_a_client_that_expects_another_domain_is_refused(self, domain: str, is_right: bool) -> None:
        found = advance(SETTINGS, Agreement(), replace(HELLO, domain=domain))
        if is_right:
            assert found == GREETED
            return
        refusal = refuse(found)
        assert (refusal.code, refusal.field) == (ErrorCode.MISMATCH, "domain")
        assert refusal.message == "hello: domain is blue here, red there"

    def test_a_greeting_is_judged_like_a_hello(self) -> None:
        greeting = Greeting(protocol_min=1, protocol_max=3, engine="e", role=Role.WORKER, domain="blue")
        assert agree_version(SETTINGS, greeting) == 1
        assert refuse(agree_version(SETTINGS, replace(greeting, domain="red"))).about_op == Greeting.op
        assert refuse(agree_version(SETTINGS, replace(greeting, protocol_min=2))).code is ErrorCode.VERSION

    def test_a_greeting_of_another_version_is_told_which_side_has_what(self) -> None:
        greeting = Greeting(protocol_min=90, protocol_max=91, engine="e", role=Role.WORKER, software="kvoffload 9")
        assert refuse(agree_version(SETTINGS, greeting)).message == (
            "the server is kvoffload 1 and has 1 to 1, the client is kvoffload 9 and has 90 to 91"
        )

    def test_hello_after_a_reconnect_begins_anew(self) -> None:
        registered = advance(SETTINGS, GREETED, REGISTER)
        assert isinstance(registered, Agreement)
        assert advance(SETTINGS, registered, HELLO) == GREETED


class TestRegister:
    def test_what_nobody_registered_before_is_accepted(self) -> None:
        assert advance(SETTINGS, GREETED, REGISTER) == replace(GREETED, phase=Phase.REGISTERED, register=REGISTER)

    def test_another_rank_of_the_same_is_accepted(self) -> None:
        found = advance(SETTINGS, GREETED, replace(REGISTER, rank=1, tenant="t"), known=REGISTER)
        assert isinstance(found, Agreement)
        assert found.phase is Phase.REGISTERED

    def test_an_identity_that_is_not_described_is_accepted(self) -> None:
        assert isinstance(advance(SETTINGS, GREETED, replace(REGISTER, identity=()), known=REGISTER), Agreement)

    @pytest.mark.parametrize(
        ("change", "field", "line"),
        [
            ({"hash_algorithm": "xxh3"}, "hash_algorithm", "sha256 here, xxh3 there"),
            ({"hash_seed": b"\x06" * 32}, "hash_seed", "050505050505... here, 060606060606... there"),
            ({"hash_seed": b""}, "hash_seed", "050505050505... here, (nothing) there"),
            ({"hash_block_size": 32}, "hash_block_size", "16 here, 32 there"),
            ({"ranks": 4}, "ranks", "2 here, 4 there"),
            ({"groups": GROUPS[:1]}, "groups", "2 here, 1 there"),
            (
                {"groups": (GROUPS[0], replace(GROUPS[1], record_bytes=101))},
                "groups[1].record_bytes",
                "100 here, 101 there",
            ),
            (
                {"groups": (GROUPS[0], replace(GROUPS[1], reuse=ReuseRule.CHUNK))},
                "groups[1].reuse",
                "WINDOW here, CHUNK there",
            ),
            ({"groups": (GROUPS[0], replace(GROUPS[1], window=512))}, "groups[1].window", "1024 here, 512 there"),
            ({"groups": (replace(GROUPS[0], shards=1), GROUPS[1])}, "groups[0].shards", "2 here, 1 there"),
            ({"fingerprint": b"\xff" * 32}, "fingerprint", "000102030405... here, ffffffffffff... there"),
            (
                {
                    "fingerprint": b"\xff" * 32,
                    "identity": (replace(IDENTITY[0], value="float16"), IDENTITY[1]),
                },
                "identity.model_dtype",
                "bfloat16 here, float16 there",
            ),
        ],
    )
    def test_a_refusal_names_the_field_and_both_values(self, change: dict[str, Any], field: str, line: str) -> None:
        refusal = refuse(advance(SETTINGS, GREETED, replace(REGISTER, **change), known=REGISTER))
        assert (refusal.code, refusal.field, refusal.about_op) == (ErrorCode.MISMATCH, field, Register.op)
        assert refusal.message == f"register: {field} is {line}"

    def test_values_are_in_full_in_the_data(self) -> None:
        refusal = refuse(advance(SETTINGS, GREETED, replace(REGISTER, fingerprint=b"\xff" * 32), known=REGISTER))
        assert (refusal.server_value, refusal.client_value) == (bytes(range(32)).hex(), "ff" * 32)

    def test_the_longest_values_fit_an_error(self) -> None:
        name = "é" * 64
        known = replace(REGISTER, identity=(IdentityField(name=name, value="é" * 256),))
        other = replace(REGISTER, identity=(IdentityField(name=name, value="è" * 256),))
        assert refuse(advance(SETTINGS, GREETED, other, known=known)).client_value == "è" * 256
        assert refuse(advance(replace(SETTINGS, domain="é" * 64), Agreement(), replace(HELLO, domain="𝄞" * 32)))

    @pytest.mark.parametrize(
        ("settings", "field"),
        [({"hash_algorithm": "xxh3"}, "hash_algorithm"), ({"hash_seed": b"\x06" * 32}, "hash_seed")],
    )
    def test_a_server_may_insist_on_one_hash(self, settings: dict[str, Any], field: str) -> None:
        assert refuse(advance(replace(SETTINGS, **settings), GREETED, REGISTER)).field == field

    @given(draw_message((Register,)))
    def test_a_register_agrees_with_itself(self, register: Register) -> None:
        assert isinstance(advance(SETTINGS, GREETED, register, known=register), Agreement)

    @given(draw_message((Register,)), draw_message((Register,)), st.sampled_from(COMPARED))
    def test_it_never_agrees_with_one_that_differs(self, register: Register, other: Register, name: str) -> None:
        changed = replace(register, **{name: getattr(other, name)})
        found = advance(SETTINGS, GREETED, changed, known=register)
        if changed == register:
            assert isinstance(found, Agreement)
        else:
            assert refuse(found).field.startswith(name)


class TestOperations:
    @pytest.mark.parametrize(
        ("agreed", "message", "code", "line"),
        [
            (Agreement(), REGISTER, ErrorCode.NOT_GREETED, "register came before hello was accepted"),
            (Agreement(), Stats(), ErrorCode.NOT_GREETED, "stats came before hello was accepted"),
            (
                GREETED,
                Acquire(name_space=1, chain=b""),
                ErrorCode.NOT_REGISTERED,
                "acquire came before register was accepted",
            ),
            (
                GREETED,
                Adopt(former_boot_id=1, index_bytes=1, segment_sizes=b""),
                ErrorCode.UNSUPPORTED,
                "adopt needs capability adopt, not agreed",
            ),
            (GREETED, Pin(lease=1), ErrorCode.UNKNOWN_OPERATION, "pin is of protocol version 2, agreed is 1"),
        ],
    )
    def test_what_is_not_agreed_is_answered(
        self, agreed: Agreement, message: ClientMessage, code: ErrorCode, line: str
    ) -> None:
        refusal = check_call(agreed, message)
        assert refusal == Error(code=code, message=line, about_op=message.op)

    def test_a_register_before_hello_is_refused(self) -> None:
        assert refuse(advance(SETTINGS, Agreement(), REGISTER)).code is ErrorCode.NOT_GREETED

    def test_what_is_agreed_passes(self) -> None:
        assert check_call(Agreement(), HELLO) is None
        assert check_call(Agreement(), Bye()) is None
        assert check_call(GREETED, Subscribe()) is None
        assert check_call(replace(GREETED, protocol=2), Pin(lease=1)) is None
        registered = replace(GREETED, phase=Phase.REGISTERED, capabilities=frozenset({"prefetch"}))
        assert check_call(registered, Prefetch(name_space=1, chain=b"")) is None

    @given(draw_message(tuple(kind for kind in MESSAGES if issubclass(kind, ClientMessage))), st.sampled_from(Phase))
    def test_with_everything_agreed_only_the_phase_counts(self, message: ClientMessage, phase: Phase) -> None:
        agreed = Agreement(phase=phase, protocol=1, capabilities=CAPABILITIES)
        assert (check_call(agreed, message) is None) is (message.needs <= phase)
