"""Questions about prompts: what is asked, and what is refused in one line."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

import pytest

from kvoffload.keys.prompt_hashes import MAX_TOKEN
from kvoffload.protocol.limits import MAX_BLOCKS
from kvoffload.web.http_message import HttpError
from kvoffload.web.prefix_question import BODY, MAX_PROMPTS, NO_LIMIT, QUERY, Question, read_body, read_query

ONE, TWO = "0a" * 32, "ff" * 32


def test_a_prompt_by_its_hashes() -> None:
    question = read_body({"hashes": [ONE, TWO, "0A0b"], "limit": 48})
    [prompt] = question.prompts
    assert prompt.hashes == b"\x0a" * 32 + b"\xff" * 32 + b"\x0a\x0b" + bytes(30)
    assert (prompt.tokens, prompt.limit, question.is_batch) == (None, 48, False)
    assert (question.alignment, question.wait_ms, question.meant.seed) == (1, 0, None)


def test_a_prompt_by_its_tokens_is_never_loaded_whole() -> None:
    question = read_body({"tokens": [1, 0, MAX_TOKEN], "salt": "s", "tenant": "t", "seed": "", "model": "m"})
    [prompt] = question.prompts
    assert prompt.tokens is not None
    assert (prompt.tokens.tolist(), prompt.limit) == ([1, 0, MAX_TOKEN], 2)
    assert (prompt.salt, prompt.tenant, question.meant.seed, question.meant.model) == ("s", "t", "", "m")
    assert read_body({"tokens": []}).prompts[0].limit == 0
    assert read_body({"tokens": [1], "limit": 1}).prompts[0].limit == 1


def test_several_at_once() -> None:
    question = read_body({"prompts": [{"hashes": [ONE]}, {"tokens": [7]}], "identity": "AB", "wait_ms": 5})
    assert ([one.tokens is None for one in question.prompts], question.is_batch) == ([True, False], True)
    assert (question.meant.identity, question.wait_ms) == ("ab", 5)
    assert read_body({"prompts": []}).prompts == ()


def as_plain(question: Question) -> list[Any]:
    [prompt] = question.prompts
    tokens = None if prompt.tokens is None else prompt.tokens.tolist()
    return [
        prompt.hashes,
        tokens,
        prompt.salt,
        prompt.limit,
        question.meant.model,
        question.meant.seed,
        question.wait_ms,
    ]


@pytest.mark.parametrize(
    ("query", "body"),
    [
        ({"hashes": f"{ONE},{TWO}", "limit": "9"}, {"hashes": [ONE, TWO], "limit": 9}),
        ({"tokens": "1,2", "salt": "5", "seed": "0"}, {"tokens": [1, 2], "salt": "5", "seed": "0"}),
        ({"hashes": "", "model": "a,b", "wait_ms": "1000"}, {"hashes": [], "model": "a,b", "wait_ms": 1000}),
    ],
)
def test_an_address_says_the_same(query: dict[str, str], body: dict[str, Any]) -> None:
    assert as_plain(read_query(query)) == as_plain(read_body(body))


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({}, "either `hashes` or `tokens`"),
        ({"hashes": [], "tokens": []}, "either `hashes` or `tokens`"),
        ({"hashes": ONE}, f"a list of {MAX_BLOCKS}"),
        ({"hashes": ["00"] * (MAX_BLOCKS + 1)}, f"a list of {MAX_BLOCKS}"),
        ({"hashes": [ONE + "00"]}, "2 to 64 hexadecimal digits"),
        ({"hashes": [""]}, "2 to 64 hexadecimal digits"),
        ({"hashes": ["abc"]}, "2 to 64 hexadecimal digits"),
        ({"hashes": [5]}, "2 to 64 hexadecimal digits"),
        ({"hashes": [], "salt": "a"}, "go with `tokens`"),
        ({"tokens": "1"}, "a list of whole numbers"),
        ({"tokens": [1, True]}, "a list of whole numbers"),
        ({"tokens": [1.0]}, "a list of whole numbers"),
        ({"tokens": [[1]]}, "a list of whole numbers"),
        ({"tokens": [-1]}, "allowed is 0 to"),
        ({"tokens": [10**30]}, "allowed is 0 to"),
        ({"tokens": [1], "salt": "\ud800"}, "printable letters"),
        ({"tokens": [1], "seed": "x" * 513}, "512 printable letters"),
        ({"tokens": [1], "tenant": 5}, "`tenant` is text"),
        ({"tokens": [1], "limit": -1}, "`limit` is a whole number from 0"),
        ({"tokens": [1], "limit": NO_LIMIT + 1}, "`limit` is a whole number from 0"),
        ({"tokens": [1], "alignment": 0}, "`alignment` is a whole number from 1"),
        ({"tokens": [1], "wait_ms": 1001}, "`wait_ms` is a whole number from 0 to 1000"),
        ({"tokens": [1], "wait_ms": True}, "`wait_ms` is a whole number"),
        ({"tokens": [1], "identity": "xy"}, "hexadecimal"),
        ({"tokens": [1], "more": 1}, "'more' is not asked here, allowed are alignment"),
        ({"prompts": [{"tokens": [1], "seed": "a"}]}, "'seed' is not asked here"),
        ({"prompts": [], "tokens": [1]}, "'tokens' is not asked here"),
        ({"prompts": [5]}, f"a list of {MAX_PROMPTS} objects"),
        ({"prompts": {}}, f"a list of {MAX_PROMPTS} objects"),
        ({"prompts": [{"tokens": []}] * (MAX_PROMPTS + 1)}, f"a list of {MAX_PROMPTS} objects"),
    ],
)
def test_anything_else_is_refused_in_one_line(given: dict[str, Any], why: str) -> None:
    with pytest.raises(HttpError, match=why) as fault:
        read_body(given)
    assert fault.value.status is HTTPStatus.BAD_REQUEST
    assert len(str(fault.value).splitlines()) == 1
    assert len(str(fault.value)) < 300


@pytest.mark.parametrize(
    "query", [{"tokens": "1,,2"}, {"tokens": "1,-2"}, {"tokens": "1", "limit": "x"}, {"tokens": "²"}, {"more": "1"}]
)
def test_a_wrong_query_string_is_a_bad_request(query: dict[str, str]) -> None:
    with pytest.raises(HttpError) as fault:
        read_query(query)
    assert fault.value.status is HTTPStatus.BAD_REQUEST


def test_all_that_may_be_said_is_described() -> None:
    assert set(BODY["properties"]) == {*QUERY, "prompts"}  # type: ignore[call-overload]
    assert all(schema["description"] for schema in QUERY.values())
