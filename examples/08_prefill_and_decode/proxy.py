"""A proxy before engines that compute prompts and engines that answer: each prompt is computed by one of the first.

    python examples/08_prefill_and_decode/proxy.py --listen 127.0.0.1:8000 \\
        --prefill http://127.0.0.1:8001 --decode http://127.0.0.1:8002

The first engine is asked for one token. The `kv_transfer_params` of its answer say what it has saved, or is saving, and
go to the second engine with the request itself. That engine restores the prompt. Where no prefill engine answers, it
computes the prompt.
"""

from __future__ import annotations

import argparse
import itertools
import json
from typing import Any

import aiohttp
from aiohttp import web

MAX_BODY_BYTES = 16 << 20
PROMPTS = ("/v1/completions", "/v1/chat/completions")
ONE_TOKEN = {"max_tokens": 1, "max_completion_tokens": 1, "n": 1, "stream": False}
"""Of what a client may ask for, how the first engine is asked."""
NOT_OF_ONE = ("stream_options", "min_tokens", "best_of")
_FAULTS = (aiohttp.ClientError, ValueError)
_OF_ONE_CONNECTION = ("host", "content-length", "transfer-encoding", "connection", "keep-alive")


class Proxy:
    """A proxy that runs in one loop. Engines of each kind take turns."""

    def __init__(self, prefill: list[str], decode: list[str]) -> None:
        self._prefill = itertools.cycle([address.rstrip("/") for address in prefill])
        self._decode = itertools.cycle([address.rstrip("/") for address in decode])
        self._session: aiohttp.ClientSession

    async def open(self, _app: web.Application) -> Any:
        # Answers are passed on as they come: what an engine packed is not unpacked on its way.
        whole = aiohttp.ClientTimeout(total=None, sock_connect=5)
        async with aiohttp.ClientSession(timeout=whole, auto_decompress=False) as self._session:
            yield

    async def serve(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        headers = {name: value for name, value in request.headers.items() if name.lower() not in _OF_ONE_CONNECTION}
        if request.path in PROMPTS:
            body = await self._compute_prompt(request.path, body, headers)
        return await self._pass_on(request, body, headers)

    async def _compute_prompt(self, path: str, body: bytes, headers: dict[str, str]) -> bytes:
        """Returns the request as the second engine is to get it. What is wrong with it is for that one to say."""
        try:
            asked = json.loads(body)
            own = asked.get("kv_transfer_params") or {}
            first = {name: value for name, value in asked.items() if name not in NOT_OF_ONE}
            first |= {name: value for name, value in ONE_TOKEN.items() if name in asked or name == "max_tokens"}
            target = next(self._prefill) + path
            headers = headers | {"Accept-Encoding": "identity"}
            async with self._session.post(target, json=first, headers=headers) as answer:
                answer.raise_for_status()
                told = json.loads(await answer.read()).get("kv_transfer_params") or {}
            return json.dumps(asked | {"kv_transfer_params": own | told}).encode()
        except (*_FAULTS, AttributeError, TypeError):
            return body

    async def _pass_on(self, request: web.Request, body: bytes, headers: dict[str, str]) -> web.StreamResponse:
        target = next(self._decode) + str(request.rel_url)
        try:
            answer = await self._session.request(request.method, target, data=body, headers=headers)
        except aiohttp.ClientConnectionError:
            return web.json_response({"error": "no engine can be reached"}, status=502)
        async with answer:
            kept = {name: value for name, value in answer.headers.items() if name.lower() not in _OF_ONE_CONNECTION}
            response = web.StreamResponse(status=answer.status, headers=kept)
            await response.prepare(request)
            async for part in answer.content.iter_any():
                await response.write(part)
            await response.write_eof()
            return response


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--listen", default="127.0.0.1:8000", help="HOST:PORT")
    parser.add_argument("--prefill", action="append", required=True, help="an engine with kv_producer; once for each")
    parser.add_argument("--decode", action="append", required=True, help="an engine with kv_consumer; once for each")
    options = parser.parse_args()
    proxy = Proxy(options.prefill, options.decode)
    app = web.Application(client_max_size=MAX_BODY_BYTES)
    app.cleanup_ctx.append(proxy.open)
    app.router.add_route("*", "/{path:.*}", proxy.serve)
    host, _, port = options.listen.rpartition(":")
    web.run_app(app, host=host, port=int(port))


if __name__ == "__main__":
    main()
