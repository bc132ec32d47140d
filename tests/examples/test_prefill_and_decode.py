"""The proxy of examples, 08_prefill_and_decode/proxy.py, before engines that are played."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from tests.examples.serve import EXAMPLES
from tests.kit.cli.web_process import is_there
from tests.kit.free_ports import free_port
from tests.kit.server.tiers import await_that

TOLD = {"expect_tokens": 96}
STREAM = b"data: one\n\ndata: two\n\n"


class PlayedEngine(BaseHTTPRequestHandler):
    """An engine that answers with parameters for the decoder if it is the producer, and streams two parts to a client
    that wants a stream."""

    server: EngineServer

    def do_GET(self) -> None:
        self._tell(b"{}", "application/json")

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.heard.append(asked)
        if self.server.is_broken:
            self.send_error(500)
        elif asked.get("stream"):
            self._tell(STREAM, "text/event-stream")
        else:
            self._tell(json.dumps({"kv_transfer_params": TOLD}).encode(), "application/json")

    def _tell(self, data: bytes, kind: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


class EngineServer(ThreadingHTTPServer):
    """An engine, and all that it was asked."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), PlayedEngine)
        self.heard: list[dict[str, Any]] = []
        self.is_broken = False
        self.address = f"http://127.0.0.1:{self.server_address[1]}"


@contextmanager
def played() -> Iterator[EngineServer]:
    server = EngineServer()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@dataclass(frozen=True)
class Apart:
    """The proxy, and what lies behind it."""

    address: str
    prefill: EngineServer
    decode: EngineServer

    def ask(self, path: str = "/v1/completions", **asked: object) -> bytes:
        body = json.dumps({"model": "m", "prompt": "hello", "stream": True, **asked}).encode()
        request = urllib.request.Request(self.address + path, data=body, headers={"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=30) as answer:
            said: bytes = answer.read()
            return said


@pytest.fixture
def apart() -> Iterator[Apart]:
    with played() as prefill, played() as decode:
        listen = f"127.0.0.1:{free_port()}"
        command = [sys.executable, str(EXAMPLES / "08_prefill_and_decode/proxy.py"), "--listen", listen]
        command += ["--prefill", prefill.address, "--decode", decode.address + "/"]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
            try:
                await_that(lambda: is_there(f"http://{listen}/v1/models"))
                yield Apart(f"http://{listen}", prefill, decode)
            finally:
                process.terminate()


def test_one_engine_computes_the_prompt_and_the_other_is_told_what_to_expect(apart: Apart) -> None:
    assert apart.ask(max_tokens=7, stream_options={}, min_tokens=2, kv_transfer_params={"tenant": "acme"}) == STREAM
    whole = {"model": "m", "prompt": "hello"}
    assert apart.prefill.heard == [
        {**whole, "max_tokens": 1, "stream": False, "kv_transfer_params": {"tenant": "acme"}}
    ]
    (decoded,) = apart.decode.heard
    assert decoded["kv_transfer_params"] == {"tenant": "acme", **TOLD}
    assert (decoded["max_tokens"], decoded["min_tokens"], decoded["stream"]) == (7, 2, True)


def test_chats_are_as_prompts_are(apart: Apart) -> None:
    assert apart.ask("/v1/chat/completions", max_completion_tokens=9, n=2) == STREAM
    (computed,), (decoded,) = apart.prefill.heard, apart.decode.heard
    assert (computed["max_completion_tokens"], computed["n"]) == (1, 1)
    assert (decoded["max_completion_tokens"], decoded["n"], decoded["kv_transfer_params"]) == (9, 2, TOLD)


def test_what_is_no_prompt_goes_to_one_engine(apart: Apart) -> None:
    apart.ask("/tokenize")
    assert (len(apart.prefill.heard), len(apart.decode.heard)) == (0, 1)


@pytest.mark.parametrize("is_gone", [False, True], ids=["a fault", "gone"])
def test_without_a_prefill_engine_the_other_computes_the_prompt(apart: Apart, is_gone: bool) -> None:
    if is_gone:
        apart.prefill.server_close()
    apart.prefill.is_broken = True
    assert apart.ask() == STREAM
    assert apart.decode.heard == [{"model": "m", "prompt": "hello", "stream": True}]


def test_what_is_no_request_is_for_the_engine_to_refuse(apart: Apart) -> None:
    request = urllib.request.Request(apart.address + "/v1/completions", data=b"[1]")
    apart.decode.is_broken = True
    with pytest.raises(urllib.error.HTTPError, match="500"):
        urllib.request.urlopen(request, timeout=30)
    assert (apart.prefill.heard, apart.decode.heard) == ([], [[1]])
    apart.decode.server_close()
    with pytest.raises(urllib.error.HTTPError, match="502"):
        apart.ask()
