"""Envelopes of hints over HTTP: what is read, what is ignored, and what is refused in one line."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

import pytest

from kvoffload.protocol import HintAction
from kvoffload.web.hint_envelope import MAX_ACTIONS, MAX_TTL_S, Action, IgnoredAction, read_envelope
from kvoffload.web.http_message import HttpError
from kvoffload.web.prefix_question import NO_LIMIT

ONE = "0a" * 32


def make(kind: str = "retain", *, version: str = "1", envelope: str = "1", **payload: Any) -> dict[str, Any]:
    action = {"action_id": "a", "action_type": kind, "action_version": version, "payload": payload}
    return {"protocol_version": envelope, "message_id": "m", "actions": [action]}


def read(kind: str = "retain", **payload: Any) -> Action:
    [action] = read_envelope(make(kind, **payload)).actions
    assert isinstance(action, Action)
    return action


def test_an_action_with_all_that_may_be_said() -> None:
    action = read(hashes=[ONE], limit=8, session="s", ttl_s=1.5, priority=9, model="m", identity="AB")
    assert (action.name, action.kind, action.does) == ("a", "retain", HintAction.RETAIN)
    assert (action.session, action.ttl_ms, action.priority) == ("s", 1500, 9)
    assert (action.meant.model, action.meant.identity) == ("m", "ab")
    assert action.prompt is not None
    assert (action.prompt.hashes, action.prompt.limit) == (b"\x0a" * 32, 8)


def test_a_number_of_tokens_is_the_limit_and_a_list_is_the_prompt() -> None:
    action = read(hashes=[ONE], tokens=16)
    assert action.prompt is not None
    assert action.prompt.limit == 16
    prompts = [read(kind, tokens=[1, 2, 3]).prompt for kind in ("prefetch", "retain")]
    assert [prompt.limit for prompt in prompts if prompt is not None] == [2, NO_LIMIT]


@pytest.mark.parametrize("kind", ["retain", "release", "priority", "hand_over"])
def test_a_session_needs_no_prompt(kind: str) -> None:
    assert read(kind, session="s").prompt is None


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (make("move", any_thing=1), "unknown_action"),
        (make(version="2", any_thing=1), "unknown_version"),
        (make("move", version="2"), "unknown_version"),
        (make(envelope="2"), "unknown_version"),
    ],
)
def test_what_is_not_known_is_ignored_whatever_it_says(given: dict[str, Any], why: str) -> None:
    kind = given["actions"][0]["action_type"]
    assert read_envelope(given).actions == (IgnoredAction(name="a", kind=kind, why=why),)


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({}, "`actions` is a list"),
        ({**make(), "more": 1}, "'more' is not asked here"),
        ({**make(), "message_id": 7}, "`message_id` is text"),
        ({**make(), "actions": [{}] * (MAX_ACTIONS + 1)}, f"list of {MAX_ACTIONS}"),
        ({**make(), "actions": ["retain"]}, "objects"),
        ({**make(), "actions": [{"payload": []}]}, "actions[0]: `payload` is an object"),
        (make(), "retain needs a prompt, by `hashes` or `tokens` or a `session`"),
        (make("prefetch", session="s"), "prefetch needs a prompt, by `hashes` or `tokens`"),
        (make("hand_over", hashes=[ONE]), "hand_over needs a `session`"),
        (make(session="s", tokens=-1), "`limit` is a whole number from 0"),
        (make(session="s", tokens=True), "`tokens` is a list"),
        (make(session="ä" * 65), "`session` has 128 bytes"),
        (make(session="a\nb"), "printable"),
        (make(session="s", ttl_s=MAX_TTL_S + 1), f"`ttl_s` is a number from 0 to {MAX_TTL_S}"),
        (make(session="s", ttl_s=float("nan")), "`ttl_s`"),
        (make(session="s", ttl_s=True), "`ttl_s`"),
        (make(session="s", priority=10), "`priority` is a whole number from 0 to 9"),
        (make(session="s", more=1), "actions[0]: 'more' is not asked here"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(given: dict[str, Any], line: str) -> None:
    with pytest.raises(HttpError) as fault:
        read_envelope(given)
    assert fault.value.status is HTTPStatus.BAD_REQUEST
    assert line in str(fault.value)
    assert "\n" not in str(fault.value)
