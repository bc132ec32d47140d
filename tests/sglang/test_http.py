"""SGLang's server over HTTP, started by the command of docs/sglang.md in the environment of `make sglang`.

Answers after a restore are compared with those of the engine's own cache. Prompts that run together are computed in
batches of another shape each time, so the model is one of float32, where that changes no token.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import httpx
import pytest
from openai import OpenAI
from prometheus_client.parser import text_string_to_metric_families

from tests.kit.free_ports import free_port
from tests.sglang.engine import ANSWER_S, PAGE, PATIENT, ROOT, START_S, build_model
from tests.sglang.planned import plan_records, registered_records
from tests.sglang.shared_records import Observer, observed, zeroed
from tests.vllm.cache_server import SharedServer

pytestmark = pytest.mark.sglang

TOGETHER = 30
"""How many requests run at once."""
NEW_TOKENS = 8
LOOK_S = 0.2
OFFLINE = {"HF_HUB_OFFLINE": "1"}
LIMITS = ["--max-total-tokens", "16384", "--dtype", "float32", "--enable-metrics"]
"""Options that the test adds to the command. Without the first SGLang takes most of the memory for its pool."""
EXTRA = {"return_cached_tokens_details": True, "ignore_eos": True}


def read_command(model: Path, socket: Path) -> tuple[dict[str, str], list[str]]:
    """Returns the first command of the page that starts a server, with this model and this cache server, and the
    variables that stand before it."""
    page = (ROOT / "docs/sglang.md").read_text()
    block = next(one for one in re.findall(r"^```\n(.*?)^```", page, re.M | re.S) if "sglang.launch_server" in one)
    words = shlex.split(block.replace("\\\n", " ").replace("/run/kvoffload.sock", str(socket)))
    at = words.index("python")
    variables = dict(word.split("=", 1) for word in words[:at])
    return variables, [sys.executable, *(str(model) if word == "MODEL" else word for word in words[at + 1 :])]


@dataclass(frozen=True)
class Reply:
    """An answer, and where the server says that its prompt came from."""

    text: str
    logprobs: tuple[float, ...]
    own: int
    restored: int


class HTTPEngine:
    """SGLang's server, a process group of its own. Owned by the test's thread; `ask` may be called by many."""

    def __init__(self, command: Sequence[str], log: Path, *, variables: Mapping[str, str]) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self._log = log
        settings = {f"KVOFFLOAD_{name.upper()}": value for name, value in PATIENT.items() if name != "memory"}
        with log.open("w") as output:
            self._process = subprocess.Popen(
                [*command, "--port", str(port)],
                cwd=log.parent,
                env={**os.environ, **OFFLINE, **settings, **variables},
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        self._api = OpenAI(base_url=f"{self.url}/v1", api_key="none", timeout=ANSWER_S, max_retries=0)
        self.model = ""

    def ask(self, prompt: str) -> Reply:
        answer: Any = self._api.completions.create(
            model=self.model, prompt=prompt, max_tokens=NEW_TOKENS, temperature=0, logprobs=1, extra_body=EXTRA
        )
        own, restored = _read_cached(answer)
        choice = answer.choices[0]
        return Reply(choice.text, tuple(choice.logprobs.token_logprobs), own, restored)

    def ask_together(self, prompts: Sequence[str]) -> list[Reply]:
        with ThreadPoolExecutor(len(prompts)) as threads:
            return list(threads.map(self.ask, prompts))

    def stream(self, prompt: str) -> list[str]:
        """Returns the parts of a chat's answer, as they come."""
        parts = self._api.chat.completions.create(
            model=self.model,
            messages=[{"role": "user", "content": prompt}],
            max_tokens=NEW_TOKENS,
            temperature=0,
            stream=True,
            extra_body=EXTRA,
        )
        return [part.choices[0].delta.content or "" for part in parts if part.choices]

    def chat(self, prompt: str) -> tuple[str, int]:
        """Returns the answer, and how many tokens of the prompt were restored."""
        answer: Any = self._api.chat.completions.create(
            model=self.model,
            messages=[{"role": "user", "content": prompt}],
            max_tokens=NEW_TOKENS,
            temperature=0,
            extra_body=EXTRA,
        )
        return answer.choices[0].message.content, _read_cached(answer)[1]

    def flush(self) -> None:
        """Empties its own cache, as soon as no request runs."""
        answer = httpx.post(f"{self.url}/flush_cache", params={"timeout": ANSWER_S}, timeout=2 * ANSWER_S)
        assert answer.status_code == 200, answer.text

    def read_metrics(self) -> dict[str, float]:
        """Returns our metrics in the engine's `/metrics`, by name and our own label, if there is one."""
        text = httpx.get(f"{self.url}/metrics", timeout=ANSWER_S).text
        found = {}
        for sample in (one for family in text_string_to_metric_families(text) for one in family.samples):
            if sample.name.startswith("kvoffload_") and "le" not in sample.labels:
                assert {"model_name", "tp_rank", "pp_rank"} <= sample.labels.keys()
                own = "".join(sample.labels.get(label, "") for label in ("tier", "reason", "hook"))
                found[f"{sample.name} {own}".strip()] = sample.value
        return found

    def read_log(self) -> str:
        return self._log.read_text(errors="replace")

    def __enter__(self) -> Self:
        try:
            self._await_health()
            self.model = self._api.models.list().data[0].id
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._api.close()

    def _await_health(self) -> None:
        gate = threading.Event()
        for _ in range(int(START_S / LOOK_S)):
            assert self._process.poll() is None, self.read_log()[-4000:]
            try:
                if httpx.get(f"{self.url}/health", timeout=START_S).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            gate.wait(LOOK_S)
        raise AssertionError(f"the server does not start:\n{self.read_log()[-4000:]}")


def _read_cached(answer: Any) -> tuple[int, int]:
    """Returns the tokens of the engine's own cache, and those that the linker brought. An answer tells of neither where
    there are none."""
    found = (answer.model_extra.get("sglext") or {}).get("cached_tokens_details") or {}
    return found.get("device", 0), found.get("host", 0)


@dataclass(frozen=True)
class Served:
    engine: HTTPEngine
    server: SharedServer
    observer: Observer
    model: Path

    def save(self, prompts: Sequence[str]) -> list[Reply]:
        """Returns the answers by the engine's own hits; afterwards its cache is empty, and ours has the prompts."""
        before = self.observer.count()
        cold = self.engine.ask_together(prompts)
        assert not any(one.own or one.restored for one in cold)
        own = self.engine.ask_together(prompts)
        assert all(one.own >= 4 * PAGE and not one.restored for one in own)
        self.observer.await_pages(before + sum(one.own for one in own) // PAGE)
        self.engine.flush()
        return own


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("http")
    model = build_model("mha_text", folder / "model")
    with SharedServer(folder) as server:
        server.start()
        variables, command = read_command(model, server.socket)
        with (
            HTTPEngine([*command, *LIMITS], folder / "log", variables=variables) as engine,
            observed(server) as observer,
        ):
            yield Served(engine, server, observer, model)


def make_text(number: int) -> str:
    """Returns a prompt of some 100 tokens that differs from the others at its first word."""
    return f"{number}. " + " ".join(f"The engine asks {number * 7 + at} blocks of the cache." for at in range(6))


def test_the_command_of_the_page_starts_a_server_that_keeps_pages(served: Served) -> None:
    assert "kvoffload keeps pages of rank 0 in" in served.engine.read_log()
    planned = plan_records(served.model, page_tokens=PAGE, kv_dtype="float32")
    assert registered_records(served.observer) == planned


def test_a_restored_answer_has_the_bits_of_the_engines_own_hit(served: Served) -> None:
    prompt = make_text(101)
    (own,) = served.save([prompt])
    restored = served.engine.ask(prompt)
    assert (restored.own, restored.restored) == (0, own.own)
    assert (restored.text, restored.logprobs) == (own.text, own.logprobs)


def test_the_engines_own_metrics_have_what_was_asked_saved_and_restored(served: Served) -> None:
    prompt = make_text(104)
    before = served.engine.read_metrics()
    (own,) = served.save([prompt])
    restored = served.engine.ask(prompt)

    def grown() -> dict[str, float]:
        return {name: value - before.get(name, 0) for name, value in served.engine.read_metrics().items()}

    # A miss is counted when the request has not asked again for a second.
    served.observer.await_that(lambda: grown().get("kvoffload_misses_total never_seen", 0) > 0, "no miss is counted")
    found = grown()
    assert found["kvoffload_hits_total memory"] == restored.restored == own.own
    record_bytes = found["kvoffload_loaded_bytes_total"] / (own.own / PAGE)
    assert found["kvoffload_saved_bytes_total"] >= found["kvoffload_loaded_bytes_total"] > 0
    assert found["kvoffload_saved_bytes_total"] % record_bytes == 0
    assert found["kvoffload_load_seconds_count"] == 1
    assert found["kvoffload_queries_total"] >= found["kvoffload_hits_total memory"]
    assert before["kvoffload_server_up"] == 1
    assert served.engine.read_metrics()["kvoffload_failed_loads_total"] == 0


def test_zeros_in_the_records_change_the_answer(served: Served) -> None:
    prompt = make_text(102)
    (own,) = served.save([prompt])
    with zeroed(served.server):
        spoiled = served.engine.ask(prompt)
    assert spoiled.restored == own.own
    assert spoiled.logprobs != own.logprobs
    served.engine.flush()


def test_thirty_at_once_are_restored_after_a_flush_and_answer_as_before(served: Served) -> None:
    prompts = [make_text(number) for number in range(TOGETHER)]
    own = served.save(prompts)
    restored = served.engine.ask_together(prompts)
    assert [(one.own, one.restored) for one in restored] == [(0, one.own) for one in own]
    assert [one.text for one in restored] == [one.text for one in own]


def test_a_stream_after_a_flush_has_the_parts_that_it_had_before(served: Served) -> None:
    prompt = make_text(103)
    before = served.observer.count()
    cold = "".join(served.engine.stream(prompt))
    parts = served.engine.stream(prompt)
    served.observer.await_pages(before + 4)
    served.engine.flush()
    text, restored = served.engine.chat(prompt)
    assert restored >= 4 * PAGE
    served.engine.flush()
    again = served.engine.stream(prompt)
    assert len(parts) > 2
    assert "".join(again) == "".join(parts) == cold == text
