"""Which paths there are, what they answer, and the same as an OpenAPI document."""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from kvoffload import __version__
from kvoffload.web.http_message import HttpError, Request, Response, json_response

Answer = Callable[[Request], Awaitable[Response]]
_BEARER = "Bearer "


@dataclass(frozen=True, kw_only=True)
class Route:
    """`is_action`: it changes something, and needs the token. `statuses`: what it answers, besides refusals."""

    method: str
    path: str
    summary: str
    answer: Answer
    content_types: Sequence[str] = ("application/json",)
    statuses: Mapping[HTTPStatus, str] = field(default_factory=lambda: {HTTPStatus.OK: "as the summary says"})
    is_action: bool = False
    body: Mapping[str, Any] | None = None
    """The JSON schema of what it takes; None: it takes nothing."""


class Router:
    """Of one token; without one there are no actions."""

    def __init__(self, routes: Sequence[Route], *, token: str = "") -> None:
        describe = Route(
            method="GET", path="/openapi.json", summary="This interface, as OpenAPI.", answer=self._describe
        )
        self._routes = [*routes, describe]
        self._token = token
        self._document = describe_routes(self._routes)

    async def answer(self, request: Request) -> Response:
        head = request.head
        here = [route for route in self._routes if route.path == head.path]
        if not here:
            raise HttpError(HTTPStatus.NOT_FOUND, f"there is no {head.path[:100]}; /openapi.json says what there is")
        method = "GET" if head.method == "HEAD" else head.method
        route = next((route for route in here if route.method == method), None)
        if route is None:
            allowed = [*(route.method for route in here), *(["HEAD"] if here[0].method == "GET" else [])]
            raise HttpError(
                HTTPStatus.METHOD_NOT_ALLOWED, f"{head.path} takes {' or '.join(allowed)}", Allow=", ".join(allowed)
            )
        if head.query:
            raise HttpError(HTTPStatus.BAD_REQUEST, f"{head.path} takes no query")
        if route.is_action:
            self._check_token(request)
        if request.body and route.body is None:
            raise HttpError(HTTPStatus.BAD_REQUEST, f"{head.path} takes no body")
        return await route.answer(request)

    def _check_token(self, request: Request) -> None:
        if not self._token:
            raise HttpError(HTTPStatus.FORBIDDEN, "no actions are taken: http_token_file is not set")
        given = request.head.headers.get("authorization", "")
        if not given.startswith(_BEARER) or not hmac.compare_digest(
            given.removeprefix(_BEARER).encode(), self._token.encode()
        ):
            raise HttpError(HTTPStatus.UNAUTHORIZED, "say `Authorization: Bearer TOKEN`", WWW_Authenticate="Bearer")

    async def _describe(self, _request: Request) -> Response:
        return json_response(self._document)


def describe_routes(routes: Sequence[Route]) -> dict[str, Any]:
    """OpenAPI 3.1."""
    paths: dict[str, Any] = {}
    for route in routes:
        paths.setdefault(route.path, {})[route.method.lower()] = _describe_route(route)
    return {
        "openapi": "3.1.0",
        "info": {"title": "kvoffload", "version": __version__},
        "paths": paths,
        "components": {
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
            "schemas": {
                "Refusal": {
                    "type": "object",
                    "properties": {"error": {"type": "string"}},
                    "required": ["error"],
                    "additionalProperties": False,
                }
            },
        },
    }


def _describe_route(route: Route) -> dict[str, Any]:
    refusal = {"application/json": {"schema": {"$ref": "#/components/schemas/Refusal"}}}
    refused = {"default": {"description": "refused, with why in one line", "content": refusal}}
    told = {
        str(status.value): {
            "description": text,
            "content": {
                kind: {"schema": {"type": "object"} if kind == "application/json" else {"type": "string"}}
                for kind in route.content_types
            },
        }
        for status, text in route.statuses.items()
    }
    action: dict[str, Any] = {"security": [{"token": []}]} if route.is_action else {}
    if route.body is not None:
        action["requestBody"] = {"required": True, "content": {"application/json": {"schema": route.body}}}
    return {"summary": route.summary, "responses": {**told, **refused}, **action}
