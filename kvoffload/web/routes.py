"""Which paths there are, what they answer, and the same as an OpenAPI document."""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from kvoffload import __version__
from kvoffload.web.http_message import (
    MAX_BODY_BYTES,
    HttpError,
    Request,
    RequestHead,
    Response,
    json_response,
)

Answer = Callable[[Request], Awaitable[Response]]
_BEARER = "Bearer "


@dataclass(frozen=True, kw_only=True)
class Route:
    """`needs_token`: it changes something, or tells what not everybody may know. `statuses`: what it answers, besides
    refusals."""

    method: str
    path: str
    summary: str
    answer: Answer
    content_types: Sequence[str] = ("application/json",)
    statuses: Mapping[HTTPStatus, str] = field(default_factory=lambda: {HTTPStatus.OK: "as the summary says"})
    needs_token: bool = False
    query: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """The JSON schemas of what may be said in the address; lists have commas."""
    body: Mapping[str, Any] | None = None
    """The JSON schema of what it takes; None: it takes nothing."""
    body_bytes: int = MAX_BODY_BYTES
    """Bytes of a body at most. A body over `MAX_BODY_BYTES` needs the token."""


class Router:
    """Routes requests by one token; without one nothing that needs it is answered."""

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
        if not head.query.keys() <= route.query.keys():
            known = f"only {', '.join(sorted(route.query))} in its query" if route.query else "no query"
            raise HttpError(HTTPStatus.BAD_REQUEST, f"{head.path} takes {known}")
        if route.needs_token:
            self._check_token(head)
        if request.body and route.body is None:
            raise HttpError(HTTPStatus.BAD_REQUEST, f"{head.path} takes no body")
        return await route.answer(request)

    def find_body_limit(self, head: RequestHead) -> int:
        """Returns how many bytes of the body may be read. HttpError: the body is over `MAX_BODY_BYTES`, and the token
        is missing or wrong."""
        routes = (route for route in self._routes if (route.method, route.path) == (head.method, head.path))
        limit = max((route.body_bytes for route in routes), default=MAX_BODY_BYTES)
        if head.body_bytes > MAX_BODY_BYTES and limit > MAX_BODY_BYTES:
            self._check_token(head)
        return limit

    def _check_token(self, head: RequestHead) -> None:
        if not self._token:
            raise HttpError(HTTPStatus.FORBIDDEN, f"{head.path} needs a token, and http_token_file is not set")
        given = head.headers.get("authorization", "")
        if not given.startswith(_BEARER) or not hmac.compare_digest(
            given.removeprefix(_BEARER).encode(), self._token.encode()
        ):
            raise HttpError(HTTPStatus.UNAUTHORIZED, "say `Authorization: Bearer TOKEN`", WWW_Authenticate="Bearer")

    async def _describe(self, _request: Request) -> Response:
        return json_response(self._document)


def describe_routes(routes: Sequence[Route]) -> dict[str, Any]:
    """Describes the routes by OpenAPI 3.1."""
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
    action: dict[str, Any] = {"security": [{"token": []}]} if route.needs_token else {}
    if route.query:
        action["parameters"] = [
            {"name": name, "in": "query", "style": "form", "explode": False, "schema": schema}
            for name, schema in route.query.items()
        ]
    if route.body is not None:
        action["requestBody"] = {"required": True, "content": {"application/json": {"schema": route.body}}}
    return {"summary": route.summary, "responses": {**told, **refused}, **action}
