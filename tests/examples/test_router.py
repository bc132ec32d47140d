"""The router of examples, 07_router/router.py, between two engines that are played and two real cache servers."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from kvoffload.cli.web import MIN_TOKEN_LETTERS
from tests.examples.serve import EXAMPLES
from tests.kit.cache.cache_model import fingerprint
from tests.kit.cli.web_process import get, is_there, web
from tests.kit.free_ports import free_port, free_ports
from tests.kit.server.tiers import await_that, serving
from tests.kit.web.vllm_blocks import BLOCK, SEED, engine, name_blocks, save

choose = runpy.run_path(str(EXAMPLES / "07_router/choice.py"))["choose"]
PATIENT = """
import sys
sys.path.insert(0, sys.argv[1])
del sys.argv[1]
import router
router.ASK_S = 30.0
router.main()
"""
"""The router on a machine whose caches are late: what it is told late counts, too."""
TEXT_TOKENS = 10 * BLOCK
RECEIPT = {"tokens": {"engine": 0, "computed": 5, "memory": 16, "disk": 32}, "saved_s": 0.25, "loaded_bytes": 4096}
told_params: list[Any] = []
"""The `kv_transfer_params` of the requests, one after the other."""


def make_tokens(text: str) -> list[int]:
    """Makes tokens as the played engines do: several of each letter, so that texts of a few letters have several
    blocks."""
    return [ord(letter) for letter in text for _ in range(TEXT_TOKENS)]


class PlayedEngine(BaseHTTPRequestHandler):
    """An engine that answers its name to every prompt, in two parts."""

    protocol_version = "HTTP/1.1"

    def end_headers(self) -> None:
        # Clients must not keep a connection to an engine that has been closed.
        self.send_header("Connection", "close")
        super().end_headers()

    def do_GET(self) -> None:
        self._tell({"data": [{"id": "m", "root": "made-up/model"}, {"id": "n", "root": "another"}]})

    def do_POST(self) -> None:
        given = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/tokenize":
            text = given["prompt"] if "prompt" in given else "".join(one["content"] for one in given["messages"])
            self._tell({"tokens": make_tokens(text)})
            return
        told_params.append(given.get("kv_transfer_params"))
        if not given.get("stream") and (given.get("kv_transfer_params") or {}).get("receipt"):
            self._tell({"choices": [], "kv_transfer_params": {"kvoffload_receipt": RECEIPT}})
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for part in (b"data: ", str(self.server.server_address[1]).encode()):
            self.wfile.write(b"%x\r\n%b\r\n" % (len(part), part))
        self.wfile.write(b"0\r\n\r\n")

    def _tell(self, what: dict[str, Any]) -> None:
        data = json.dumps(what).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def played_engine(port: int = 0) -> Iterator[ThreadingHTTPServer]:
    server = ThreadingHTTPServer(("127.0.0.1", port), PlayedEngine)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@dataclass
class Routed:
    """A router with what lies behind it. Engines are named by their ports."""

    address: str
    ports: list[int]
    engines: list[ExitStack]
    sockets: list[Path]
    caches: list[ExitStack] = field(default_factory=list)

    def ask(self, prompt: object, path: str = "/v1/completions", name: str = "prompt", **more: Any) -> int:
        """Asks, and returns the number of the engine that answered."""
        body = json.dumps({"model": "m", name: prompt, "stream": True} | more).encode()
        request = urllib.request.Request(self.address + path, data=body, headers={"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=30) as answer:
            assert answer.headers["Content-Type"] == "text/event-stream"
            return self.ports.index(int(answer.read().removeprefix(b"data: ")))


@contextmanager
def router(folder: Path, *options: str, identity: str = "") -> Iterator[Routed]:
    token = folder / "token"
    token.write_text("x" * MIN_TOKEN_LETTERS)
    token.chmod(0o600)
    with ExitStack() as all_:
        ports = free_ports(2)
        engines = [all_.enter_context(ExitStack()) for _ in ports]
        caches = [all_.enter_context(ExitStack()) for _ in ports]
        sockets, pools = [folder / "one", folder / "two"], []
        for at, port in enumerate(ports):
            engines[at].enter_context(played_engine(port))
            server = caches[at].enter_context(serving(sockets[at]))
            await_that(lambda server=server: server.has_memory)
            address = caches[at].enter_context(web(sockets[at], f"http_token_file={token}"))
            await_that(lambda address=address: get(f"{address}/readyz")[0] == 200)
            pools += ["--pool", f"http://127.0.0.1:{port},{address}" + (f",{identity}" if identity else "")]
        listen = f"127.0.0.1:{free_port()}"
        command = [
            sys.executable,
            "-c",
            PATIENT,
            str(EXAMPLES / "07_router"),
            "--listen",
            listen,
            "--token-file",
            str(token),
        ]
        with (
            (folder / "log").open("w") as log,
            subprocess.Popen([*command, *pools, "--seed", SEED, *options], stdout=log) as process,
        ):
            try:
                await_that(lambda: is_there(f"http://{listen}/v1/models"))
                yield Routed(f"http://{listen}", ports, engines, sockets, caches)
            finally:
                process.terminate()


def test_a_prompt_goes_where_most_of_it_is_and_turns_are_taken_elsewhere(tmp_path: Path) -> None:
    with router(tmp_path) as routed, engine(routed.sockets[0]) as one, engine(routed.sockets[1]) as two:
        save(one, name_blocks(make_tokens("ab")))
        save(two, name_blocks(make_tokens("abc")))
        save(two, name_blocks(make_tokens("x")))
        save(one, name_blocks(make_tokens("xyz")))
        for _ in range(3):
            assert routed.ask("abcd") == 1
            assert routed.ask("xyzz") == 0
        chat = [{"role": "user", "content": "xyz?"}]
        assert routed.ask(chat, "/v1/chat/completions", "messages") == 0
        assert routed.ask(make_tokens("abcc")) == 1
        # Both have the same of it, or nothing: they take turns.
        assert sorted(routed.ask("ab!") for _ in range(4)) == [0, 0, 1, 1]
        assert sorted(routed.ask("new") for _ in range(4)) == [0, 0, 1, 1]
        routed.engines[1].close()
        assert routed.ask("abcd") == 0


def test_only_what_the_engine_has_loaded_counts(tmp_path: Path) -> None:
    """One server may have blocks of several models, and of engines of one model that differ."""
    with (
        router(tmp_path) as routed,
        engine(routed.sockets[0], "another") as another,
        engine(routed.sockets[0]) as _,
        engine(routed.sockets[1]) as mine,
    ):
        save(another, name_blocks(make_tokens("abcd")))
        save(mine, name_blocks(make_tokens("ab")))
        assert {routed.ask("abcd") for _ in range(4)} == {1}
        assert {routed.ask("abcd", model="n") for _ in range(4)} == {0}
        # No engine has such a model.
        assert {routed.ask("abcd", model="none") for _ in range(4)} == {0, 1}
    (tmp_path / "again").mkdir()
    with (
        router(tmp_path / "again", identity=fingerprint("another").hex()[:8]) as routed,
        engine(routed.sockets[0], "another") as another,
        engine(routed.sockets[1]) as mine,
    ):
        save(another, name_blocks(make_tokens("ab")))
        save(mine, name_blocks(make_tokens("abcd")))
        assert {routed.ask("abcd") for _ in range(4)} == {0}


def test_the_engine_is_told_what_was_counted_on(tmp_path: Path) -> None:
    with router(tmp_path) as routed, engine(routed.sockets[0]) as one, engine(routed.sockets[1]):
        save(one, name_blocks(make_tokens("ab")))
        save(one, name_blocks(make_tokens("xy"), salt="s"))
        told_params.clear()
        assert routed.ask("abc", kv_transfer_params={"pin_s": 5}) == 0
        assert routed.ask("ab") == 0
        routed.ask("new", kv_transfer_params={"pin_s": 6})
        assert routed.ask("xyz", cache_salt="s") == 0
        there = 2 * TEXT_TOKENS
        assert told_params == [
            {"pin_s": 5, "expected_hit_tokens": there},
            # The last token is always computed.
            {"expected_hit_tokens": there - BLOCK},
            {"pin_s": 6},
            {"expected_hit_tokens": there},
        ]


def test_the_access_log_has_each_prompts_receipt(tmp_path: Path) -> None:
    with router(tmp_path, "--access-log") as routed:
        told_params.clear()
        body = json.dumps({"model": "m", "prompt": "ab", "kv_transfer_params": {"pin_s": 5}}).encode()
        with urllib.request.urlopen(f"{routed.address}/v1/completions", data=body, timeout=30) as answer:
            assert json.load(answer)["kv_transfer_params"]["kvoffload_receipt"] == RECEIPT
        routed.ask("ab")
        assert told_params == [{"pin_s": 5, "receipt": True}, {"receipt": True}]
        log = tmp_path / "log"
        await_that(lambda: log.read_text().count('"receipt"') == 2)
        lines = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]
        engines = {f"http://127.0.0.1:{port}" for port in routed.ports}
        assert {line["engine"] for line in lines} <= engines
        assert [(line["path"], line["status"]) for line in lines] == [("/v1/completions", 200)] * 2
        assert [line["receipt"] for line in lines] == [RECEIPT, None], "a stream has none"
        assert all(line["seconds"] >= 0 for line in lines)


def test_where_no_cache_answers_engines_take_turns(tmp_path: Path) -> None:
    with router(tmp_path) as routed:
        for cache in routed.caches:
            cache.close()
        assert sorted(routed.ask("ab") for _ in range(4)) == [0, 0, 1, 1]
        routed.engines[0].close()
        assert [routed.ask("ab") for _ in range(3)] == [1, 1, 1]
        routed.engines[1].close()
        with pytest.raises(urllib.error.HTTPError, match="502"):
            routed.ask("ab")


@pytest.mark.parametrize(
    ("hits", "waiting", "turn", "chosen"),
    [
        ([None, None, None], [9, 0, 5], 4, 1),
        ([0, 0], [0, 0], 0, 0),
        ([0, 0], [0, 0], 1, 1),
        ([50, 80], [0, 0], 0, 1),
        ([50, 80], [0, 30], 0, 0),
        ([50, 80], [0, 30], 1, 1),
        ([50, 80], [0, 31], 1, 0),
        ([None, 10], [0, 0], 0, 1),
        ([None, 10], [0, 11], 0, 0),
        ([100, 100], [7, 3], 0, 1),
    ],
)
def test_what_is_done_first_is_chosen(hits: list[int | None], waiting: list[int], turn: int, chosen: int) -> None:
    assert choose(hits, waiting, tokens=100, turn=turn) == chosen
