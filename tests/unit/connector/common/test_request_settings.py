"""A request's wishes: what is allowed counts, what is not is said, and nothing fails."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from kvoffload.connector.common.request_settings import RequestSettings, read_settings


@pytest.mark.parametrize(
    "params", [{}, {"remote_engine_id": "x", "do_remote_prefill": True}, {"kvoffload_receipt": {"saved_s": 0.0}}]
)
def test_without_settings_of_ours_everything_is_default(params: dict[str, object]) -> None:
    assert read_settings(params) == (RequestSettings(), "")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("skip_load", True),
        ("skip_load", False),
        ("skip_save", True),
        ("max_load_tokens", 0),
        ("max_load_tokens", 10**9),
        ("max_save_tokens", 0),
        ("prompt_only", True),
        ("receipt", True),
        ("pin_s", 0),
        ("pin_s", 0.5),
        ("pin_s", 3600),
        ("tenant", ""),
        ("tenant", "a" * 64),
        ("session", ""),
        ("session", "run 7/" + "a" * 58),
        ("session_ttl_s", 0.5),
        ("session_ttl_s", 3600),
    ],
)
def test_an_allowed_value_is_taken(name: str, value: Any) -> None:
    assert read_settings({name: value}) == (RequestSettings(**{name: value}), "")


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("skip_load", 1, "true or false"),
        ("skip_save", "yes", "true or false"),
        ("receipt", 1, "true or false"),
        ("max_load_tokens", -1, "a whole number, 0 or more"),
        ("max_load_tokens", 1.5, "a whole number, 0 or more"),
        ("max_load_tokens", True, "a whole number, 0 or more"),
        ("max_load_tokens", "7", "a whole number, 0 or more"),
        ("max_save_tokens", -1, "a whole number, 0 or more"),
        ("prompt_only", 1, "true or false"),
        ("pin_s", -0.1, "a number of seconds from 0 to 3600"),
        ("pin_s", 3601, "a number of seconds from 0 to 3600"),
        ("pin_s", 10**400, "a number of seconds from 0 to 3600"),
        ("pin_s", float("nan"), "a number of seconds from 0 to 3600"),
        ("pin_s", True, "a number of seconds from 0 to 3600"),
        ("pin_s", "5s", "a number of seconds from 0 to 3600"),
        ("tenant", "a" * 65, "a text of at most 64 characters"),
        ("tenant", ["a"], "a text of at most 64 characters"),
        ("session", "a" * 65, "a text of at most 64 printable ASCII characters"),
        ("session", "a\nb", "a text of at most 64 printable ASCII characters"),
        ("session", "\ud800", "a text of at most 64 printable ASCII characters"),
        ("session", 7, "a text of at most 64 printable ASCII characters"),
        ("session_ttl_s", 3601, "a number of seconds from 0 to 3600"),
    ],
)
def test_a_wrong_value_leaves_its_own_term_at_the_default(name: str, value: object, allowed: str) -> None:
    others = {"skip_load": True, "skip_save": True, "max_load_tokens": 5, "pin_s": 1.5, "tenant": "acme"}
    others |= {"max_save_tokens": 6, "prompt_only": True}
    settings, complaint = read_settings({**others, name: value})
    default = getattr(RequestSettings(), name)
    assert settings == dataclasses.replace(RequestSettings(**others), **{name: default})  # type: ignore[arg-type]
    assert complaint.startswith(f"{name}=")
    assert complaint.endswith(f" is ignored, allowed is {allowed}")


def test_all_that_is_wrong_is_said_in_one_short_line() -> None:
    _, complaint = read_settings({"tenant": "a\nb" * 10_000, "pin_s": [[0] * 10_000], "skip_load": "\r\n"})
    assert "\n" not in complaint
    assert "\r" not in complaint
    assert len(complaint) < 300
    assert [part.split("=")[0] for part in complaint.split("; ")] == ["skip_load", "pin_s", "tenant"]


@pytest.mark.parametrize(
    ("params", "own", "session"),
    [
        ({"session_ttl_s": 5}, "own", "own"),
        ({"session_ttl_s": 5, "session": "ours"}, "own", "ours"),
        ({"session_ttl_s": 5}, "a\nb", ""),
        ({"skip_load": True}, "own", ""),
    ],
)
def test_the_engines_own_name_of_a_session_counts_where_a_time_is_set(
    params: dict[str, object], own: str, session: str
) -> None:
    assert read_settings(params, own)[0].session == session


def test_a_misspelt_name_is_told_and_names_of_other_connectors_are_not() -> None:
    settings, complaint = read_settings(
        {"sessions": "a", "do_remote_prefill": True, "remote_block_ids": [1], "tp_size": 2}
    )
    assert settings == RequestSettings()
    assert complaint == "'sessions' is ignored, perhaps session is meant"


@pytest.mark.parametrize("field", dataclasses.fields(RequestSettings), ids=lambda field: str(field.name))
def test_null_is_as_good_as_absent(field: dataclasses.Field[object]) -> None:
    assert read_settings({field.name: None}) == (RequestSettings(), "")


@pytest.mark.parametrize(
    ("most", "prompt_only", "limit"),
    [(None, False, None), (9, False, 9), (None, True, 30), (9, True, 9), (40, True, 30)],
)
def test_what_is_saved_ends_where_the_request_wants_it(most: int | None, prompt_only: bool, limit: int | None) -> None:
    assert RequestSettings(max_save_tokens=most, prompt_only=prompt_only).find_save_limit(30) == limit
