"""Paths, methods and tokens."""

from __future__ import annotations

import json
from dataclasses import replace
from http import HTTPStatus

import pytest

from kvoffload.web.http_message import MAX_BODY_BYTES, HttpError, Request, Response, json_response
from kvoffload.web.routes import Route, Router
from tests.kit.web.asked import TOKEN, ask

LONG = 3 * MAX_BODY_BYTES


async def answer(_request: Request) -> Response:
    return json_response({"done": True})


def router(token: str = TOKEN) -> Router:
    routes = [
        Route(method="GET", path="/look", summary="Looks.", answer=answer),
        Route(method="POST", path="/act", summary="Acts.", answer=answer, needs_token=True),
        Route(
            method="GET",
            path="/find",
            summary="Finds.",
            answer=answer,
            query={"a": {"type": "string"}, "b": {"type": "integer"}},
            needs_token=True,
        ),
        Route(method="POST", path="/find", summary="Finds.", answer=answer, body_bytes=LONG, needs_token=True),
    ]
    return Router(routes, token=token)


@pytest.mark.parametrize("method", ["GET", "HEAD"])
async def test_what_is_there_is_answered(method: str) -> None:
    assert (await router().answer(ask(method, "/look"))).status is HTTPStatus.OK


@pytest.mark.parametrize(
    ("request_", "status", "text"),
    [
        (ask("GET", "/none"), 404, "there is no /none"),
        (ask("GET", "/" + "x" * 4000), 404, "there is no /x"),
        (ask("DELETE", "/look"), 405, "/look takes GET or HEAD"),
        (ask("GET", "/act"), 405, "/act takes POST"),
        (ask("GET", "/look", query="a"), 400, "no query"),
        (ask("GET", "/look", body=b"a"), 400, "no body"),
        (ask("GET", "/find", query="c"), 400, "/find takes only a, b in its query"),
        (ask("GET", "/find", query="a"), 401, "Authorization: Bearer"),
        (ask("POST", "/act"), 401, "Authorization: Bearer"),
        (ask("POST", "/act", authorization="Bearer wrong"), 401, "Authorization: Bearer"),
        (ask("POST", "/act", authorization=f"Basic {TOKEN}"), 401, "Authorization: Bearer"),
        (ask("POST", "/act", authorization="Bearer \xe4"), 401, "Authorization: Bearer"),
    ],
)
async def test_everything_else_is_refused_in_one_line(request_: Request, status: int, text: str) -> None:
    with pytest.raises(HttpError) as fault:
        await router().answer(request_)
    assert fault.value.status == status
    assert text in str(fault.value)
    assert len(str(fault.value)) < 200


async def test_an_action_needs_the_token() -> None:
    assert (await router().answer(ask("POST", "/act", authorization=f"Bearer {TOKEN}"))).status is HTTPStatus.OK
    for given in ("Bearer ", f"Bearer {TOKEN}"):
        with pytest.raises(HttpError) as fault:
            await router("").answer(ask("POST", "/act", authorization=given))
        assert fault.value.status is HTTPStatus.FORBIDDEN


async def test_all_routes_are_in_the_document() -> None:
    document = json.loads((await router().answer(ask("GET", "/openapi.json"))).body)
    assert set(document["paths"]) == {"/look", "/act", "/find", "/openapi.json"}
    assert [one["name"] for one in document["paths"]["/find"]["get"]["parameters"]] == ["a", "b"]
    assert document["paths"]["/act"]["post"]["security"] == [{"token": []}]


def limit_of(path: str, size: int, **headers: str) -> int:
    head = replace(ask("POST", path, **headers).head, body_bytes=size)
    return router().find_body_limit(head)


def test_only_who_has_the_token_may_send_more() -> None:
    assert limit_of("/act", LONG) == limit_of("/none", LONG) == MAX_BODY_BYTES
    assert limit_of("/find", LONG, authorization=f"Bearer {TOKEN}") == LONG
    with pytest.raises(HttpError, match="Authorization: Bearer"):
        limit_of("/find", MAX_BODY_BYTES + 1)
    # A short body is refused with the answer, and the connection goes on.
    assert limit_of("/find", MAX_BODY_BYTES) == LONG
