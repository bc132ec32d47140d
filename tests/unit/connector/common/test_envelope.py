"""An envelope of hints: what is allowed is done, and whatever else is in it does no harm and is named shortly."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from hypothesis import given
from hypothesis import strategies as st

from kvoffload.connector.common.envelope import MAX_ACTIONS, NOTHING, Ignored, Wish, read_envelope
from kvoffload.protocol import HintAction


def action(kind: Any = "retain", payload: Any = None, version: Any = "1") -> dict[str, Any]:
    return {"action_id": "1", "action_type": kind, "action_version": version, "payload": payload}


def envelope(*actions: Any, version: Any = "1") -> dict[str, Any]:
    return {"protocol_version": version, "message_id": "m", "actions": list(actions)}


def test_none_is_none() -> None:
    assert read_envelope(None) is NOTHING
    assert read_envelope(envelope()) == NOTHING


def test_every_action_is_read_with_what_it_says() -> None:
    read = read_envelope(
        envelope(
            action("prefetch", {"tokens": 64}),
            action("retain", {"session": "a", "ttl_s": 0.5, "priority": 9}),
            action("release", {"session": None, "of another": "router"}),
            action("priority", {"session": "a", "priority": 3}),
            action("hand_over", {"session": "a"}),
        )
    )
    assert read.wishes == (
        Wish(action=HintAction.PREFETCH, tokens=64),
        Wish(action=HintAction.RETAIN, session="a", ttl_s=0.5, priority=9),
        Wish(action=HintAction.RELEASE),
        Wish(action=HintAction.PRIORITISE, session="a", priority=3),
        Wish(action=HintAction.HAND_OVER, session="a"),
    )
    assert (read.ignored, read.complaint) == ((), "")


def test_vllms_own_structs_say_the_same() -> None:
    given = envelope(action("retain", {"ttl_s": 5}))
    actions = [SimpleNamespace(**one) for one in given["actions"]]
    assert read_envelope(SimpleNamespace(**{**given, "actions": actions})) == read_envelope(given)


@pytest.mark.parametrize(
    ("one", "ignored"),
    [
        (action("move"), ("move", Ignored.UNKNOWN_ACTION)),
        (action(version="2"), ("retain", Ignored.UNKNOWN_VERSION)),
        (action(version=1), ("retain", Ignored.UNKNOWN_VERSION)),
    ],
)
def test_what_is_not_known_is_ignored_without_a_word_beside_what_is(one: Any, ignored: Any) -> None:
    read = read_envelope(envelope(one, action("prefetch")))
    assert read.wishes == (Wish(action=HintAction.PREFETCH),)
    assert (read.ignored, read.complaint) == ((ignored,), "")


def test_an_envelope_of_another_version_says_nothing() -> None:
    read = read_envelope(envelope(action(), version="2"))
    assert (read.wishes, read.ignored) == ((), (("", Ignored.UNKNOWN_VERSION),))


@pytest.mark.parametrize(
    ("one", "said"),
    [
        (action("x" * 33), "an action_type is a text of 32 letters"),
        (action(7), "an action_type is a text of 32 letters"),
        ("an action", "an action_type is a text of 32 letters"),
        (action(payload=[1]), "the action retain is ignored, its payload is an object"),
        (action(payload={"tokens": -1}), "tokens=-1, allowed is a whole number, 0 or more"),
        (action(payload={"tokens": True}), "tokens=True, allowed is a whole number, 0 or more"),
        (action(payload={"tokens": 1.5}), "tokens=1.5, allowed is a whole number, 0 or more"),
        (action(payload={"session": "a\nb"}), "allowed is a text of at most 64 printable ASCII characters"),
        (action(payload={"ttl_s": float("nan")}), "ttl_s=nan, allowed is a number of seconds from 0 to 86400"),
        (action(payload={"ttl_s": 86401}), "ttl_s=86401, allowed is a number of seconds from 0 to 86400"),
        (action(payload={"priority": 10}), "priority=10, allowed is a whole number from 0 to 9"),
        (action("priority", {"priority": 3}), "the action priority is ignored: it needs the name of a session"),
        (action("hand_over"), "the action hand_over is ignored: it needs the name of a session"),
        (action(payload={"tokens": 10**5000}), "tokens=a number of 16610 bits, allowed is a whole number, 0 or more"),
        (
            action(payload={"ttl_s": [10**5000]}),
            "ttl_s=[a number of 16610 bits], allowed is a number of seconds from 0 to 86400",
        ),
    ],
)
def test_what_is_wrong_is_said_in_one_short_line(one: Any, said: str) -> None:
    read = read_envelope(envelope(one, action("prefetch")))
    assert read.wishes == (Wish(action=HintAction.PREFETCH),)
    assert [why for _, why in read.ignored] == [Ignored.WRONG]
    assert read.complaint.endswith(said)
    assert "\n" not in read.complaint
    assert len(read.complaint) < 200


@pytest.mark.parametrize("given", ["text", 7, [], {}, {"protocol_version": "1", "actions": "ab"}, {"actions": []}])
def test_what_is_no_envelope_is_said_too(given: object) -> None:
    read = read_envelope(given)
    assert (read.wishes, read.ignored) == ((), (("", Ignored.WRONG),))
    assert read.complaint.startswith("kv_hints is ignored")


def test_actions_of_an_envelope_beyond_the_limit_are_ignored() -> None:
    read = read_envelope(envelope(*[action()] * (MAX_ACTIONS + 5)))
    assert len(read.wishes) == MAX_ACTIONS
    assert read.ignored == (("", Ignored.TOO_MANY),)
    assert read.complaint == f"kv_hints has {MAX_ACTIONS + 5} actions, the first {MAX_ACTIONS} are taken"


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=8,
)


@given(st.builds(envelope, st.builds(action, _JSON, _JSON, _JSON), version=_JSON | st.just("1")) | _JSON)
def test_nothing_that_json_can_say_is_a_fault(given: Any) -> None:
    read = read_envelope(given)
    assert len(read.complaint) < 500
    assert not read.wishes or not read.ignored
