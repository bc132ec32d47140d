"""When names change, the server is told to let go of retained prefixes; a bounded number is remembered."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from kvoffload.client import HintSettings
from kvoffload.connector.hints import kept_names
from kvoffload.connector.hints.kept_names import LAST_NAMES, KeptNames
from kvoffload.protocol import HintAction


def note(kept: KeptNames, chain: bytes, session: str = "", tenant: str = "") -> None:
    kept.note(HintSettings(action=HintAction.RETAIN, chain=chain, session=session, tenant=tenant))


def lost(kept: KeptNames) -> list[tuple[str, bytes]]:
    found = []
    while kept:
        settings = kept.take()
        assert (settings.action, settings.session) == (HintAction.RELEASE, "")
        found.append((settings.tenant, bytes(settings.chain)))
    return found


def name(letter: str) -> bytes:
    return letter.encode() * 32


def test_the_last_names_of_each_prefix_are_let_go() -> None:
    kept = KeptNames()
    note(kept, b"")
    note(kept, b"".join(name(chr(65 + at % 26)) for at in range(LAST_NAMES)) + name("z"))
    kept.doubt()
    assert len(kept) == 0
    kept.settle(are_same=False)
    [(_, names)] = lost(kept)
    assert (len(names), names[-32:]) == (LAST_NAMES * 32, name("z"))
    kept.settle(are_same=False)
    assert lost(kept) == []


def test_a_session_has_only_its_latest_prefix() -> None:
    kept = KeptNames()
    note(kept, name("a"), "s")
    note(kept, name("b"), "s")
    note(kept, name("c"), "s", "acme")
    kept.doubt()
    kept.settle(are_same=False)
    assert lost(kept) == [("", name("b")), ("acme", name("c"))]


def test_what_is_found_again_is_let_go_at_a_later_change() -> None:
    kept = KeptNames()
    note(kept, name("a"))
    kept.doubt()
    note(kept, name("b"))
    kept.settle(are_same=True)
    kept.doubt()
    note(kept, name("c"))
    assert lost(kept) == []
    kept.doubt()
    assert lost(kept) == [("", name("a") + name("b"))], "names are taken back once"
    kept.settle(are_same=False)
    assert lost(kept) == [("", name("c"))]


def test_so_many_are_remembered_and_let_go_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_names, "MAX_PREFIXES", 3)
    monkeypatch.setattr(kept_names, "AT_ONCE", 2)
    kept = KeptNames()
    for letter in "abcd":
        note(kept, name(letter))
    note(kept, name("b"))
    kept.doubt()
    note(kept, name("e"))
    kept.settle(are_same=True)
    kept.doubt()
    kept.settle(are_same=False)
    assert lost(kept) == [("", name("d") + name("b")), ("", name("e"))]
