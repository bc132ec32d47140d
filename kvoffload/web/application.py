"""What is answered at each path."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from kvoffload.config import LoadedSettings, format_value
from kvoffload.errors import ServerError
from kvoffload.metrics.exposition import OPEN_TYPE, PLAIN_TYPE, expose
from kvoffload.top.samples import Sample, as_row, compare
from kvoffload.web.http_message import HttpError, Request, Response, json_response
from kvoffload.web.readings import read_stats
from kvoffload.web.routes import Route, Router
from kvoffload.web.watcher import Watcher

_BOTH = {HTTPStatus.OK: "yes", HTTPStatus.SERVICE_UNAVAILABLE: "no, and why"}


class Application:
    """Answers for one server."""

    def __init__(self, watcher: Watcher, loaded: LoadedSettings, *, token: str = "") -> None:
        self._watcher = watcher
        self._token = token
        self._config = hide_secrets(loaded)
        self.router = Router(
            [
                Route(method="GET", path="/healthz", summary="Whether this process answers.", answer=self._healthz),
                Route(
                    method="GET",
                    path="/readyz",
                    summary="Whether the cache server answers.",
                    answer=self._readyz,
                    statuses=_BOTH,
                ),
                Route(
                    method="GET",
                    path="/metrics",
                    summary="Every metric, for Prometheus; as OpenMetrics where that is accepted.",
                    answer=self._metrics,
                    content_types=("text/plain", "application/openmetrics-text"),
                ),
                Route(
                    method="GET",
                    path="/stats",
                    summary="Counts of the cache server, its tiers and tenants.",
                    answer=self._stats,
                    statuses=_BOTH,
                ),
                Route(method="GET", path="/config", summary="The settings, and where each is from.", answer=self._show),
                Route(
                    method="POST",
                    path="/drain",
                    summary="The cache server takes nothing new, and ends when nobody holds anything.",
                    answer=self._drain,
                    is_action=True,
                    statuses={HTTPStatus.ACCEPTED: "what it still waits for"},
                ),
            ],
            token=token,
        )

    async def _healthz(self, _request: Request) -> Response:
        return json_response({"ok": True})

    async def _readyz(self, _request: Request) -> Response:
        seen = await self._watcher.look()
        if seen.stats is None:
            return json_response({"ready": False, "why": seen.fault}, HTTPStatus.SERVICE_UNAVAILABLE)
        return json_response({"ready": True})

    async def _metrics(self, request: Request) -> Response:
        seen = await self._watcher.look()
        is_open = "application/openmetrics-text" in request.head.headers.get("accept", "")
        body = expose(read_stats(seen.stats), is_open=is_open)
        return Response(body=body, content_type=OPEN_TYPE if is_open else PLAIN_TYPE)

    async def _stats(self, _request: Request) -> Response:
        seen = await self._watcher.look()
        sample = Sample(time_s=0.0, stats=seen.stats, fault=seen.fault)
        status = HTTPStatus.SERVICE_UNAVAILABLE if seen.stats is None else HTTPStatus.OK
        return json_response(as_row(sample, compare(None, sample)), status)

    async def _show(self, _request: Request) -> Response:
        return json_response(self._config)

    async def _drain(self, request: Request) -> Response:
        if request.body:
            raise HttpError(HTTPStatus.BAD_REQUEST, "/drain takes no body")
        try:
            draining = await self._watcher.drain(self._token)
        except ServerError as fault:
            raise HttpError(HTTPStatus.BAD_GATEWAY, fault.message) from fault
        waits = {"leases": draining.leases, "reserved": draining.reserved, "sessions": draining.sessions}
        return json_response(waits, HTTPStatus.ACCEPTED)


def hide_secrets(loaded: LoadedSettings) -> Mapping[str, Any]:
    """Settings name files with secrets and never hold one; an address may have a user's name in it."""
    settings = loaded.settings
    return {
        name: {"value": _hide_user(format_value(name, getattr(settings, name))), "source": loaded.sources[name].value}
        for name in type(settings).model_fields
    }


def _hide_user(text: str) -> str:
    scheme, mark, rest = text.partition("://")
    _, at, place = rest.rpartition("@")
    return f"{scheme}://***@{place}" if mark and at else text
