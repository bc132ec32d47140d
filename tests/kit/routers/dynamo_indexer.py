"""Dynamo's indexer as a process of its own: it hears an engine's events and says how much of a prompt is where.

`requirements/routers.txt` has the wheel. It is asked as its documentation says: `POST /register`, `POST /query`.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from tests.kit.free_ports import free_port
from tests.kit.server.tiers import await_that

IS_THERE = importlib.util.find_spec("dynamo") is not None
MISSING = "Dynamo's indexer is not installed: requirements/routers.txt"
SALT_PREFIX = "dynamo-cache-salt:"
"""Prefix that Dynamo's own workers put before a salt, so that it recognises one among a block's extra keys."""
MODEL, ENGINE = "m", 1


class DynamoIndexer:
    """Dynamo's indexer, fed by one engine."""

    def __init__(self, port: int) -> None:
        self._address = f"http://127.0.0.1:{port}"

    def register(self, endpoint: str, replay_endpoint: str, *, block_size: int) -> None:
        """It listens to this engine from now on."""
        given = {"instance_id": ENGINE, "model_name": MODEL, "block_size": block_size}
        self._post("/register", {**given, "endpoint": endpoint, "replay_endpoint": replay_endpoint})

    def count_tokens(self, tokens: Sequence[int], *, salt: str = "", adapter: str = "", medium: str = "cpu") -> int:
        """How many of a prompt's first tokens are there, by what it has heard."""
        given: dict[str, Any] = {"token_ids": list(tokens), "model_name": MODEL}
        given |= {"cache_salt": salt} if salt else {}
        given |= {"lora_name": adapter} if adapter else {}
        instances = self._post("/query", given)["instances"]
        return int(instances[str(ENGINE)][medium]) if str(ENGINE) in instances else 0

    def is_up(self) -> bool:
        with suppress(OSError), urllib.request.urlopen(f"{self._address}/health", timeout=5) as answer:
            return bool(answer.status == 200)
        return False

    def _post(self, path: str, what: dict[str, Any]) -> Any:
        body, kind = json.dumps(what).encode(), {"Content-Type": "application/json"}
        request = urllib.request.Request(self._address + path, data=body, headers=kind)
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.loads(answer.read())


@contextmanager
def dynamo_indexer() -> Iterator[DynamoIndexer]:
    """It is killed on the way out: what it knew is gone."""
    port = free_port()
    command = [sys.executable, "-m", "dynamo.indexer", "--port", str(port)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            indexer = DynamoIndexer(port)
            await_that(indexer.is_up)
            yield indexer
        finally:
            process.kill()
