"""Messages between servers reveal no secret by accident."""

from __future__ import annotations

from kvoffload.protocol import CAPABILITIES, Introduce, LinkOpened, OpenLink, Register
from kvoffload.protocol.message import CONTROL, Phase


def test_peers_need_a_capability_and_a_greeting_and_no_identity_of_their_own() -> None:
    for message in (OpenLink, Introduce):
        assert message.capability in CAPABILITIES
        assert message.needs is Phase.GREETED
        assert message.channels == CONTROL


def test_links_are_sealed_unless_somebody_says_otherwise() -> None:
    assert OpenLink().is_sealed


def test_an_identity_is_introduced_by_what_its_engines_register_too() -> None:
    shared = {"fingerprint", "hash_block_size", "groups"}
    assert set(Introduce.__annotations__) - {"op", "needs", "capability", "reply"} == shared
    assert shared <= set(Register.__annotations__)
    assert LinkOpened.op == OpenLink.reply.op
