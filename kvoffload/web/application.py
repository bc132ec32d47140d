"""The answers at each path."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator, Mapping
from http import HTTPStatus
from typing import Any

from kvoffload.client.inspector import describe_agent
from kvoffload.config.sources import LoadedSettings, format_shown
from kvoffload.errors import ServerError
from kvoffload.metrics.exposition import OPEN_TYPE, PLAIN_TYPE, expose
from kvoffload.top.ledger_rows import Prices
from kvoffload.top.memory_worth import find_worth
from kvoffload.top.samples import Sample, as_row, compare
from kvoffload.web.hint_envelope import BODY as HINTS_BODY
from kvoffload.web.hint_envelope import read_envelope
from kvoffload.web.hints import Hints
from kvoffload.web.history import EVERY_S, History
from kvoffload.web.http_message import HttpError, Request, Response, json_response
from kvoffload.web.ledger import describe_ledger
from kvoffload.web.page import read_page
from kvoffload.web.prefix_question import BODY, QUERY, Question, read_body, read_query
from kvoffload.web.prefix_question import MAX_BODY_BYTES as MAX_QUESTION_BYTES
from kvoffload.web.prefixes import Prefixes
from kvoffload.web.readings import read_differing, read_ignored, read_insight, read_stats, read_worth
from kvoffload.web.routes import Route, Router
from kvoffload.web.watcher import Watcher

MAX_TENANT_LETTERS = 64
_QUOTA = {
    "type": "object",
    "properties": {
        "tenant": {"type": "string", "minLength": 1, "maxLength": MAX_TENANT_LETTERS},
        "quota_bytes": {"type": "integer", "minimum": 1, "maximum": 2**64 - 1},
    },
    "required": ["tenant", "quota_bytes"],
    "additionalProperties": False,
}
_SESSIONS = {"session": {"type": "string", "description": "the one that is meant; all without it"}}
_BOTH = {HTTPStatus.OK: "yes", HTTPStatus.SERVICE_UNAVAILABLE: "no, and why"}


class Application:
    """Answers for one server."""

    def __init__(
        self, watcher: Watcher, prefixes: Prefixes, hints: Hints, loaded: LoadedSettings, *, token: str = ""
    ) -> None:
        self._watcher = watcher
        self._prefixes = prefixes
        self._hints = hints
        self._token = token
        self._config = hide_secrets(loaded)
        self._prices = Prices.from_settings(loaded.settings)
        self._history = History()
        self._page = read_page()
        self.router = Router(
            [
                Route(
                    method="GET",
                    path="/",
                    summary="A page that draws /stats and /history.",
                    answer=self._show_page,
                    content_types=("text/html",),
                ),
                Route(
                    method="GET",
                    path="/history",
                    summary="Counts of the last hour, by columns.",
                    answer=self._look_back,
                ),
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
                Route(
                    method="GET",
                    path="/ledger",
                    summary="What each tenant, model and agent's session asked for, got and occupied.",
                    answer=self._show_ledger,
                    needs_token=True,
                ),
                Route(method="GET", path="/config", summary="The settings, and where each is from.", answer=self._show),
                Route(
                    method="GET",
                    path="/v1/prefix",
                    summary="How many tokens of a prompt a load could bring, of each identity. Lists have commas.",
                    answer=self._find_prefix,
                    query=QUERY,
                    needs_token=True,
                ),
                Route(
                    method="POST",
                    path="/v1/prefix",
                    summary="The same for longer prompts, and for several.",
                    answer=self._find_prefixes,
                    body=BODY,
                    body_bytes=MAX_QUESTION_BYTES,
                    needs_token=True,
                ),
                Route(
                    method="GET",
                    path="/v1/sessions",
                    summary="What agents' sessions got of the cache, the one with the latest turn first.",
                    answer=self._list_agents,
                    query=_SESSIONS,
                    needs_token=True,
                ),
                Route(
                    method="POST",
                    path="/v1/hints",
                    summary="Prefixes that are to be brought up, retained or let go: vLLM's envelope of hints.",
                    answer=self._hint,
                    body=HINTS_BODY,
                    body_bytes=MAX_QUESTION_BYTES,
                    needs_token=True,
                    statuses={HTTPStatus.OK: "what was done, by action and identity"},
                ),
                Route(
                    method="POST",
                    path="/clear",
                    summary="Memory forgets all blocks; tiers below keep theirs.",
                    answer=self._clear,
                    needs_token=True,
                    statuses={HTTPStatus.OK: "how many blocks there were"},
                ),
                Route(
                    method="POST",
                    path="/quota",
                    summary="A tenant's quota, until the server ends. One without a quota gets none.",
                    answer=self._set_quota,
                    body=_QUOTA,
                    needs_token=True,
                    statuses={HTTPStatus.OK: "what was set"},
                ),
                Route(
                    method="POST",
                    path="/drain",
                    summary="The cache server accepts no new process, and ends when no process holds a block.",
                    answer=self._drain,
                    needs_token=True,
                    statuses={HTTPStatus.ACCEPTED: "what it still waits for"},
                ),
            ],
            token=token,
        )

    async def keep_history(self) -> None:
        """A row each few seconds, until it is cancelled."""
        while True:
            self._history.add(time.time(), await self._tell())
            await asyncio.sleep(EVERY_S)

    async def _show_page(self, _request: Request) -> Response:
        return self._page

    async def _look_back(self, _request: Request) -> Response:
        return json_response(self._history.describe())

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
        told = () if seen.insight is None else read_insight(seen.insight)
        worth = (
            ()
            if seen.stats is None or seen.insight is None
            else read_worth(find_worth(seen.stats, seen.insight, self._prices))
        )
        differing = () if seen.stats is None else read_differing(seen.survey)
        ignored = read_ignored(self._hints.ignored)
        body = expose([*read_stats(seen.stats), *told, *worth, *differing, *ignored], is_open=is_open)
        return Response(body=body, content_type=OPEN_TYPE if is_open else PLAIN_TYPE)

    async def _stats(self, _request: Request) -> Response:
        told = await self._tell()
        return json_response(told, HTTPStatus.OK if told["up"] else HTTPStatus.SERVICE_UNAVAILABLE)

    async def _tell(self) -> dict[str, Any]:
        seen = await self._watcher.look()
        sample = Sample(time_s=0.0, stats=seen.stats, insight=seen.insight, survey=seen.survey, fault=seen.fault)
        return as_row(sample, compare(None, sample, self._prices))

    async def _show_ledger(self, _request: Request) -> Response:
        with _as_gateway():
            agents = await self._watcher.list_agents(self._token)
        seen = await self._watcher.look()
        if seen.stats is None or seen.insight is None:
            raise HttpError(HTTPStatus.BAD_GATEWAY, seen.fault or "the server keeps no ledger")
        return json_response(describe_ledger(seen.stats, seen.insight, agents, self._prices))

    async def _show(self, _request: Request) -> Response:
        return json_response(self._config)

    async def _find_prefix(self, request: Request) -> Response:
        return await self._answer_question(read_query(request.head.query))

    async def _find_prefixes(self, request: Request) -> Response:
        return await self._answer_question(read_body(request.read_json()))

    async def _answer_question(self, question: Question) -> Response:
        with _as_gateway():
            found = await self._prefixes.answer(question)
        told = [{"identities": rows, "is_partial": found.is_partial} for rows in found.prompts]
        return json_response({"prompts": told} if question.is_batch else told[0])

    async def _list_agents(self, request: Request) -> Response:
        wanted = request.head.query.get("session")
        with _as_gateway():
            found = await self._watcher.list_agents(self._token)
        return json_response(
            {"sessions": [describe_agent(one) for one in found.sessions if wanted in (None, one.name)]}
        )

    async def _hint(self, request: Request) -> Response:
        with _as_gateway():
            return json_response(await self._hints.do(read_envelope(request.read_json())))

    async def _clear(self, _request: Request) -> Response:
        with _as_gateway():
            return json_response({"blocks": await self._watcher.clear(self._token)})

    async def _set_quota(self, request: Request) -> Response:
        given = request.read_json()
        tenant, quota_bytes = given.get("tenant"), given.get("quota_bytes")
        is_number = isinstance(quota_bytes, int) and not isinstance(quota_bytes, bool) and 0 < quota_bytes < 2**64
        if given.keys() != {"tenant", "quota_bytes"} or not _is_name(tenant) or not is_number:
            raise HttpError(HTTPStatus.BAD_REQUEST, 'say {"tenant": "a name", "quota_bytes": 1 to 2^64 - 1}')
        assert isinstance(tenant, str)
        assert isinstance(quota_bytes, int)
        with _as_gateway():
            await self._watcher.set_quota(tenant, quota_bytes, self._token)
        return json_response(given)

    async def _drain(self, _request: Request) -> Response:
        with _as_gateway():
            draining = await self._watcher.drain(self._token)
        waits = {"leases": draining.leases, "reserved": draining.reserved, "sessions": draining.sessions}
        return json_response(waits, HTTPStatus.ACCEPTED)


def _is_name(value: object) -> bool:
    return isinstance(value, str) and value.isprintable() and 0 < len(value) <= MAX_TENANT_LETTERS


@contextlib.contextmanager
def _as_gateway() -> Iterator[None]:
    """Turns a fault of the cache server into BAD_GATEWAY, because the client is not to blame."""
    try:
        yield
    except ServerError as fault:
        raise HttpError(HTTPStatus.BAD_GATEWAY, fault.message) from fault


def hide_secrets(loaded: LoadedSettings) -> Mapping[str, Any]:
    """Returns settings as the page shows them: without users and passwords of addresses."""
    settings = loaded.settings
    return {
        name: {"value": format_shown(name, getattr(settings, name)), "source": loaded.sources[name].value}
        for name in type(settings).model_fields
    }
