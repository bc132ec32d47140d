"""docs/protocol.md speaks of messages, codes and limits that exist."""

from __future__ import annotations

import re

from docs.generate import render_site_pages
from kvoffload.protocol import CAPABILITIES, MESSAGES, ErrorCode, GroupTerms, HandshakeSettings, Register, advance
from kvoffload.protocol.handshake import Agreement
from kvoffload.protocol.limits import FRAME_BYTES, MAX_PACKET_SEGMENTS, PACKET_BYTES
from kvoffload.protocol.message import Phase
from kvoffload.protocol.shape import Shape, name_of
from kvoffload.types import ReuseRule
from kvoffload.units import MIB
from tests.house.tree import ROOT

TEXT = (ROOT / "docs" / "protocol.md").read_text()
NAMES = {name_of(message) for message in MESSAGES}


def test_every_arrow_of_a_picture_is_a_message() -> None:
    arrows = re.findall(r"(?:── |◄─* )([a-z_]+)[ (]", TEXT)
    assert len(arrows) > 30
    assert set(arrows) <= NAMES


def test_every_error_in_a_picture_has_its_code() -> None:
    codes = re.findall(r"error\(([A-Z_]+)", TEXT)
    assert codes
    assert set(codes) <= {code.name for code in ErrorCode}


def test_every_word_of_the_wire_is_declared() -> None:
    fields = {field.name for message in MESSAGES for field in Shape(message).fields}
    known = NAMES | fields | CAPABILITIES | {"op", "number", "session", "expires_ns", "boot_id", "fingerprint"}
    words = set(re.findall(r"`([a-z]+(?:_[a-z]+)+)`", TEXT)) - {"acquire_deadline"}
    assert words <= known


def test_limits_are_those_of_the_code() -> None:
    assert f"| at most | {PACKET_BYTES // 1024} KiB | {FRAME_BYTES // MIB} MiB |" in TEXT
    assert f"packets of up to {MAX_PACKET_SEGMENTS} segments" in TEXT


def test_the_refusal_that_is_shown_is_the_one_that_is_sent() -> None:
    def register(record_bytes: int) -> Register:
        groups = tuple(
            GroupTerms(record_bytes=size, block_size=16, reuse=ReuseRule.PREFIX) for size in (1, record_bytes)
        )
        return Register(
            fingerprint=bytes(32), hash_algorithm="sha256", hash_seed=b"", hash_block_size=16, groups=groups
        )

    settings = HandshakeSettings(capabilities=frozenset(), domain="")
    agreed = Agreement(phase=Phase.GREETED, protocol=1)
    refusal = advance(settings, agreed, register(104), known=register(100))
    assert not isinstance(refusal, Agreement)
    assert f"\n    {refusal.message}\n" in TEXT


def test_every_message_has_its_table() -> None:
    page = render_site_pages()["docs/protocol-messages.md"]
    assert all(f"\n### {name}\n" in page for name in NAMES)
    links = set(re.findall(r"\(#([a-z_]+)\)", page))
    assert links <= set(re.findall(r"^### ([a-z_]+)$", page, re.M))
