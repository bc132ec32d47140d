"""vLLM and SGLang on one cache server: one pool for both, in which each finds what it has saved itself.

The two need other packages, so each has an environment of its own, with kvoffload in both. This program starts a
server and both engines as a user does (the commands are printed), asks each the same prompt, empties what the engine
has cached itself, and asks again:

    python examples/10_sglang_and_vllm/run.py MODEL --vllm VENV/bin/python --sglang VENV/bin/python

`--vllm-arguments` and `--sglang-arguments` are added to their commands, in one string each. Exit code 0: each engine
has restored its prompt with an equal answer, and neither has found a block of the other's.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from serving import serve

from kvoffload.client import Client, ClientTerms, Member
from kvoffload.protocol import Role

PAGE = 32
PROMPT = [(17 * at + 5 * at * at) % 500 + 3 for at in range(10 * PAGE + 5)]
NEW_TOKENS = 8
START_S = 600.0
LOOK_S = 0.2


@dataclass(frozen=True)
class Told:
    """Of one request: its answer, and how many tokens of its prompt were not computed."""

    tokens: Sequence[int]
    cached: int


class VLLM:
    """What differs between the two: how it is started, asked and emptied."""

    name = "vLLM"
    flush_path = "/reset_prefix_cache"
    environment: Mapping[str, str] = {"VLLM_SERVER_DEV_MODE": "1"}
    """Without it nobody may empty its cache over HTTP."""

    @staticmethod
    def command(python: str, model: str, port: int, server: Path) -> list[str]:
        connector = {
            "kv_connector": "KVOffloadConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"server": str(server)},
        }
        command = [python, "-m", "vllm.entrypoints.cli.main", "serve", model, "--port", str(port)]
        command += ["--block-size", str(PAGE), "--enable-prompt-tokens-details"]
        return [*command, "--kv-transfer-config", json.dumps(connector)]

    @staticmethod
    def ask(port: int, model: str) -> Told:
        body = {"model": model, "prompt": PROMPT, "max_tokens": NEW_TOKENS, "temperature": 0, "ignore_eos": True}
        answer = post(port, "/v1/completions", {**body, "return_token_ids": True})
        details = answer["usage"]["prompt_tokens_details"] or {}
        return Told(answer["choices"][0]["token_ids"], details.get("cached_tokens") or 0)


class SGLang:
    """The other one."""

    name = "SGLang"
    flush_path = "/flush_cache"
    environment: Mapping[str, str] = {}

    @staticmethod
    def command(python: str, model: str, port: int, server: Path) -> list[str]:
        linker = {
            "linker": "KVOffloadLinker",
            "linker_module_path": "kvoffload.sglang.plugin",
            "linker_extra_config": {"server": str(server)},
        }
        command = [python, "-m", "sglang.launch_server", "--model-path", model, "--port", str(port)]
        command += ["--page-size", str(PAGE), "--device", "cpu"]
        command += ["--enable-unified-cache-external-linker", "--unified-cache-external-linker-backend", "dynamic"]
        return [*command, "--unified-cache-external-linker-config", json.dumps(linker)]

    @staticmethod
    def ask(port: int, model: str) -> Told:
        sampling = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
        answer = post(port, "/generate", {"input_ids": PROMPT, "sampling_params": sampling})
        return Told(answer["output_ids"], answer["meta_info"]["cached_tokens"])


@contextmanager
def start(kind: type[VLLM | SGLang], python: str, model: str, arguments: str, server: Path) -> Iterator[int]:
    """The engine's port, when it listens."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [*kind.command(python, model, port, server), *shlex.split(arguments)]
    print(shlex.join(command), flush=True)
    # In a group of its own: it ends with all processes that it starts.
    process = subprocess.Popen(command, env=os.environ | kind.environment, stdout=sys.stderr, start_new_session=True)
    try:
        yield port
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            process.wait()


def await_health(port: int) -> None:
    until_s = time.monotonic() + START_S
    while True:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
        except OSError:
            if time.monotonic() > until_s:
                raise
            time.sleep(LOOK_S)
        else:
            return


def await_saved(client: Client, blocks: int) -> None:
    """An engine has saved when it has answered, or a moment later."""
    until_s = time.monotonic() + START_S
    while client.stats().readable < blocks and time.monotonic() < until_s:
        time.sleep(LOOK_S)


def post(port: int, path: str, body: Mapping[str, object]) -> Any:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=START_S) as answer:
        text = answer.read()
    return json.loads(text) if text.startswith(b"{") else None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    for kind in (VLLM, SGLang):
        name = kind.name.lower()
        parser.add_argument(f"--{name}", required=True, metavar="PYTHON", help=f"of the environment with {kind.name}")
        parser.add_argument(f"--{name}-arguments", default="", metavar="TEXT", help="more of its own")
    options = vars(parser.parse_args())
    model, engines, is_right = options["model"], {}, True
    pages = (len(PROMPT) - 1) // PAGE
    with ExitStack() as stack:
        server = stack.enter_context(serve(memory="1GiB"))
        for kind in (VLLM, SGLang):
            name = kind.name.lower()
            given = (options[name], model, options[f"{name}_arguments"], server)
            engines[kind] = stack.enter_context(start(kind, *given))
        observer = Member(engine="example", role=Role.OBSERVER)
        client = stack.enter_context(Client(ClientTerms(socket=server, member=observer)))
        assert client.wait_until_served(START_S), client.fault
        for number, (kind, port) in enumerate(engines.items(), 1):
            await_health(port)
            first = kind.ask(port, model)
            own = kind.ask(port, model)
            await_saved(client, number * pages)
            post(port, kind.flush_path, {})
            again = kind.ask(port, model)
            print(
                f"{kind.name:<6} cached {first.cached} of {len(PROMPT)} tokens at first, {again.cached} when its own "
                f"cache was emptied; answers {'equal' if again.tokens == own.tokens else 'DIFFER'}; "
                f"{client.stats().readable} blocks in the pool",
                flush=True,
            )
            is_right &= first.cached == 0 and again.cached == pages * PAGE and again.tokens == own.tokens
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
