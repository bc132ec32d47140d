"""A proxy over several `vllm serve`, each with a cache server of its own: a prompt goes where most of it is.

    python examples/07_router/router.py --listen 127.0.0.1:8000 --token-file TOKEN \\
        --pool http://127.0.0.1:8001,http://127.0.0.1:9471 --pool http://127.0.0.1:8002,http://127.0.0.1:9472

A pool is an engine and the `kvoffload web` of its cache server. One engine makes tokens of a prompt, each cache server
is asked how many of them it has (`/v1/prefix`), and `choice.py` chooses. Where nothing is known, engines take turns.

A cache server may have blocks of several models: it is asked about the one that the engine has loaded, as `/v1/models`
says. Where engines of one model differ, it is asked about the identity that stands third in a pool
(`kvoffload inspect identities` shows them). The engine that is chosen is told how many tokens were counted on
(`expected_hit_tokens`): its metrics say how many came. With `--access-log` the router prints a line of JSON for each
prompt, with the receipt that the engine gives: where the prompt's tokens came from. vLLM gives none with streams.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web
from choice import choose

ASK_S = 0.5
"""For tokens, and for each cache server's answer: a router must not cost more than it saves."""
MAX_BODY_BYTES = 16 << 20
MAX_ANSWER_BYTES = 4 << 20
"""An answer with more bytes is passed on without looking for its receipt."""
PROMPTS = {"/v1/completions": "prompt", "/v1/chat/completions": "messages"}
_FAULTS = (aiohttp.ClientError, TimeoutError, ValueError, KeyError, TypeError)
_OF_ONE_CONNECTION = ("host", "content-length", "transfer-encoding", "connection", "keep-alive")


@dataclass(eq=False)
class Pool:
    """An engine, the HTTP face of its cache server, and what it was given and has not computed yet."""

    engine: str
    cache: str
    identity: str = ""
    waiting_tokens: int = 0
    loaded: dict[str, str] = field(default_factory=dict)
    """Maps each name by which the engine serves a model to the name by which it has loaded it. Requests that name none
    mean the first one."""


class Router:
    """A router that runs in one loop."""

    def __init__(self, pools: list[Pool], *, token: str, seed: str | None, has_access_log: bool = False) -> None:
        self._pools = pools
        self._has_access_log = has_access_log
        self._headers = {"Authorization": f"Bearer {token}"}
        self._seed = {} if seed is None else {"seed": seed}
        self._turn = 0
        self._session: aiohttp.ClientSession

    async def open(self, _app: web.Application) -> Any:
        # Answers are passed on as they come: what an engine packed is not unpacked on its way.
        whole = aiohttp.ClientTimeout(total=None, sock_connect=5)
        async with aiohttp.ClientSession(timeout=whole, auto_decompress=False) as self._session:
            yield

    async def serve(self, request: web.Request) -> web.StreamResponse:
        """The engine that is chosen; those after it if it cannot be reached."""
        body = await request.read()
        turn, self._turn = self._turn, self._turn + 1
        given = self._read_prompt(request.path, body)
        tokens = await self._read_tokens(request.path, given, turn)
        hits: list[int | None] = [None] * len(self._pools)
        if tokens:
            hits = await asyncio.gather(*(self._ask(pool, tokens, given) for pool in self._pools))
        waiting = [pool.waiting_tokens for pool in self._pools]
        first = choose(hits, waiting, tokens=len(tokens), turn=turn)
        for at in range(first, first + len(self._pools)):
            pool, hit = self._pools[at % len(self._pools)], hits[at % len(self._pools)]
            wishes = ({"expected_hit_tokens": hit} if hit else {}) | ({"receipt": True} if self._has_access_log else {})
            told = self._add_wishes(given, wishes) if given and wishes else body
            response = await self._pass_on(request, told, pool, len(tokens) - (hit or 0))
            if response is not None:
                return response
        return web.json_response({"error": "no engine can be reached"}, status=502)

    def _read_prompt(self, path: str, body: bytes) -> dict[str, Any]:
        """Empty: it is no prompt. What is wrong with it is for an engine to say."""
        try:
            given = json.loads(body) if path in PROMPTS else {}
            return given if isinstance(given, dict) else {}
        except ValueError:
            return {}

    def _add_wishes(self, given: dict[str, Any], wishes: dict[str, Any]) -> bytes:
        """The request with how many of its tokens should be there, and whether it wants a receipt."""
        params = given.get("kv_transfer_params")
        params = (params if isinstance(params, dict) else {}) | wishes
        return json.dumps(given | {"kv_transfer_params": params}).encode()

    async def _read_tokens(self, path: str, given: dict[str, Any], turn: int) -> list[int]:
        """Returns the prompt's tokens as the engine will make them; empty: they are not known."""
        try:
            prompt = given[PROMPTS[path]]
            if isinstance(prompt, list) and set(map(type, prompt)) == {int}:
                return prompt
            # Fields that change the template change the tokens.
            also = ("model", "tools", "chat_template", "chat_template_kwargs", "add_special_tokens")
            question = {PROMPTS[path]: prompt} | {name: given[name] for name in also if name in given}
            engine = self._pools[turn % len(self._pools)].engine
            return list((await self._post(f"{engine}/tokenize", question, {}))["tokens"])
        except _FAULTS:
            return []

    async def _ask(self, pool: Pool, tokens: list[int], given: dict[str, Any]) -> int | None:
        """How many of them its cache has of what the engine has loaded. None: it does not say, or there is no such
        model; of several identities it is the one that has most."""
        try:
            about = {"identity": pool.identity} if pool.identity else {"model": await self._find_loaded(pool, given)}
            salt = {"salt": given["cache_salt"]} if given.get("cache_salt") else {}
            question = {"tokens": tokens, **about, **salt, **self._seed}
            told = await self._post(f"{pool.cache}/v1/prefix", question, self._headers)
            hits = [row["hit_tokens"] for row in told["identities"]]
            return max((hit for hit in hits if hit is not None), default=None)
        except _FAULTS:
            return None

    async def _find_loaded(self, pool: Pool, given: dict[str, Any]) -> str:
        """The model that a request means, by the name that an engine has loaded it by. KeyError: it has no such one."""
        if given.get("model", "") not in ("", *pool.loaded) or not pool.loaded:
            limit = aiohttp.ClientTimeout(total=ASK_S)
            async with self._session.get(f"{pool.engine}/v1/models", timeout=limit) as answer:
                answer.raise_for_status()
                rows = json.loads(await answer.read())["data"]
            pool.loaded = {row["id"]: row.get("root") or row["id"] for row in rows}
        return pool.loaded[given.get("model") or next(iter(pool.loaded), "")]

    async def _post(self, address: str, body: object, headers: dict[str, str]) -> Any:
        limit = aiohttp.ClientTimeout(total=ASK_S)
        async with self._session.post(address, json=body, headers=headers, timeout=limit) as answer:
            answer.raise_for_status()
            return json.loads(await answer.read())

    async def _pass_on(self, request: web.Request, body: bytes, pool: Pool, lacking: int) -> web.StreamResponse | None:
        """None: the engine cannot be reached, or ended before it said anything."""
        headers = {name: value for name, value in request.headers.items() if name.lower() not in _OF_ONE_CONNECTION}
        target = pool.engine + str(request.rel_url)
        begun_s, seen = time.monotonic(), bytearray()
        pool.waiting_tokens += lacking
        try:
            try:
                answer = await self._session.request(request.method, target, data=body, headers=headers)
            except aiohttp.ClientConnectionError:
                # It may come back as another one.
                pool.loaded = {}
                return None
            async with answer:
                kept = {name: value for name, value in answer.headers.items() if name.lower() not in _OF_ONE_CONNECTION}
                response = web.StreamResponse(status=answer.status, headers=kept)
                await response.prepare(request)
                async for part in answer.content.iter_any():
                    # The prompt is computed when the first part of the answer is there.
                    pool.waiting_tokens, lacking = pool.waiting_tokens - lacking, 0
                    if self._has_access_log and len(seen) <= MAX_ANSWER_BYTES:
                        seen += part
                    await response.write(part)
                await response.write_eof()
                if self._has_access_log and request.path in PROMPTS:
                    _log_access(request, pool, answer.status, time.monotonic() - begun_s, bytes(seen))
                return response
        finally:
            pool.waiting_tokens -= lacking


def _log_access(request: web.Request, pool: Pool, status: int, seconds: float, answer: bytes) -> None:
    """Prints one line about a prompt. The receipt is null if the engine gave none."""
    try:
        receipt = json.loads(answer)["kv_transfer_params"]["kvoffload_receipt"]
    except (ValueError, KeyError, TypeError):
        receipt = None
    line = {"path": request.path, "engine": pool.engine, "status": status, "seconds": round(seconds, 3)}
    print(json.dumps(line | {"receipt": receipt}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--listen", default="127.0.0.1:8000", help="HOST:PORT")
    parser.add_argument("--pool", action="append", required=True, help="ENGINE,CACHE[,IDENTITY]; once for each")
    parser.add_argument("--token-file", type=Path, required=True, help="what the web processes have as http_token_file")
    parser.add_argument("--seed", help="the engines' PYTHONHASHSEED, if they have one")
    parser.add_argument("--access-log", action="store_true", help="print a line of JSON for each prompt")
    options = parser.parse_args()
    pools = [Pool(*(address.rstrip("/") for address in pool.split(","))) for pool in options.pool]
    token = options.token_file.read_text().strip()
    router = Router(pools, token=token, seed=options.seed, has_access_log=options.access_log)
    app = web.Application(client_max_size=MAX_BODY_BYTES)
    app.cleanup_ctx.append(router.open)
    app.router.add_route("*", "/{path:.*}", router.serve)
    host, _, port = options.listen.rpartition(":")
    web.run_app(app, host=host, port=int(port))


if __name__ == "__main__":
    main()
