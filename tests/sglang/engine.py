"""A real SGLang engine for tests: started with our linker, asked, flushed, ended."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import Queue
from types import TracebackType
from typing import Any, Self

from tests.sglang.engine_process import REPLY

ROOT = Path(__file__).parents[2]
VLLM_PYTHON = ROOT / ".venv/bin/python"
"""Python of the environment with vLLM."""
START_S = 480.0
ANSWER_S = 240.0
FLUSH_TRIES = 100
FLUSH_S = 0.1
PAGE = 16
NEW_TOKENS = 12

LINKER = {"linker": "KVOffloadLinker", "linker_module_path": "kvoffload.sglang.plugin"}
ZEROING = {"linker": "ZeroingLinker", "linker_module_path": "zeroing_linker"}
"""The same, with a control (`stand_ins`)."""
ARGUMENTS: Mapping[str, object] = {
    "device": "cpu",
    "dtype": "bfloat16",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "skip_tokenizer_init": True,
    "disable_cuda_graph": True,
    "page_size": PAGE,
    "max_total_tokens": 2048,
    "max_running_requests": 4,
    "chunked_prefill_size": 512,
    "random_seed": 1,
    "log_level": "info",
}
STORAGE = {
    "backend_name": "kvoffload",
    "module_path": "kvoffload.sglang.hicache_storage",
    "class_name": "KVOffloadStorage",
    "interface_v1": 1,
    "prefetch_threshold": PAGE,
}
HICACHE: Mapping[str, object] = {
    "enable_hierarchical_cache": True,
    "hicache_ratio": 2.0,
    "hicache_io_backend": "direct",
    "hicache_mem_layout": "page_first_direct",
    "hicache_write_policy": "write_through",
    "hicache_storage_backend": "dynamic",
    "hicache_storage_prefetch_policy": "wait_complete",
}
PATIENT = {"acquire_deadline": "5s", "step_budget": "1s", "memory": "256MiB"}
"""Tests ask on a machine that others use too: a hit that comes late would be a miss."""


@dataclass(frozen=True)
class Answer:
    """The answer to a request. Answers are equal if their numbers are, wherever they came from."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]


@dataclass(frozen=True)
class Told:
    """An answer, and where the engine says that its prompt came from."""

    answer: Answer
    own: int
    """Tokens of the engine's own cache."""
    restored: int
    """Tokens that the linker brought."""


def make_prompt(seed: int, length: int = 100) -> list[int]:
    return [(at * 37 + seed * 101 + at * at * seed) % 500 + 3 for at in range(length)]


class EngineProcess:
    """An engine in a process group of its own, told what to do by lines of JSON. Owned by the test's thread."""

    def __init__(self, command: Sequence[str], log: Path, *, environment: Mapping[str, str]) -> None:
        self._log_file = log
        self._log = log.open("a")
        self._replies: Queue[dict[str, Any] | None] = Queue()
        self._process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def wait_until_started(self) -> Self:
        self._take(START_S)
        return self

    def ask(self, command: Mapping[str, object]) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        return self._take(ANSWER_S)

    def read_log(self) -> str:
        self._log.flush()
        return self._log_file.read_text(errors="replace")

    def close(self) -> None:
        """Ends all of its processes, which it began in a group of their own. It may have been ended before."""
        if self._process.stdin is not None and self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._reader.join()
        self._log.close()

    def __enter__(self) -> Self:
        return self.wait_until_started()

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _take(self, timeout_s: float) -> dict[str, Any]:
        reply = self._replies.get(timeout=timeout_s)
        assert reply is not None, f"the engine ended:\n{self.read_log()[-4000:]}"
        return reply

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(REPLY):
                self._replies.put(json.loads(line.removeprefix(REPLY)))
            else:
                self._log.write(line)
        self._replies.put(None)


class SGLangEngine(EngineProcess):
    """A real SGLang engine."""

    def __init__(
        self,
        model: Path,
        log: Path,
        *,
        linker: Mapping[str, object] | None = None,
        kind: Mapping[str, str] = LINKER,
        storage: Mapping[str, object] | None = None,
        **arguments: object,
    ) -> None:
        """Our settings, for the engine's linker or for the storage of its HiCache; None: it runs without us."""
        given: dict[str, object] = {"model_path": str(model), **ARGUMENTS, **arguments}
        if linker is not None:
            given |= {
                "enable_unified_cache_external_linker": True,
                "unified_cache_external_linker_backend": "dynamic",
                "unified_cache_external_linker_config": {**kind, "linker_extra_config": {**PATIENT, **linker}},
            }
        if storage is not None:
            extra = {**STORAGE, "settings": {**PATIENT, **storage}}
            given = {**HICACHE, "hicache_storage_backend_extra_config": json.dumps(extra), **given}
        command = [sys.executable, "-m", "tests.sglang.engine_process", json.dumps(given)]
        super().__init__(command, log, environment=engine_environment(int(str(given.get("tp_size", 1)))))

    def generate(
        self, *prompts: Sequence[int], salt: str | None = None, adapter: str = "", new_tokens: int = NEW_TOKENS
    ) -> list[Told]:
        return self.time(*prompts, salt=salt, adapter=adapter, new_tokens=new_tokens)[1]

    def time(
        self, *prompts: Sequence[int], salt: str | None = None, adapter: str = "", new_tokens: int = NEW_TOKENS
    ) -> tuple[float, list[Told]]:
        """The same, and how many seconds it took until all had their last token."""
        command = {"prompts": prompts, "salt": salt, "adapter": adapter, "new_tokens": new_tokens}
        reply = self.ask({"do": "generate", **command})
        assert "answers" in reply, reply
        return reply["seconds"], [_read_told(one) for one in reply["answers"]]

    def flush(self) -> None:
        """Its own cache is empty from here on. The engine refuses until it has put its last request away, which it has
        answered before."""
        gate = threading.Event()
        for _ in range(FLUSH_TRIES):
            if self.ask({"do": "flush"}) == {"flushed": True}:
                return
            gate.wait(FLUSH_S)
        raise AssertionError("the engine does not empty its cache")

    def update_weights(self, folder: Path) -> None:
        assert self.ask({"do": "update_weights", "folder": str(folder)}) == {"updated": True}

    def update_parameter(self, folder: Path, name: str, *, flushes: bool) -> None:
        command = {"do": "update_parameter", "folder": str(folder), "name": name, "flushes": flushes}
        assert self.ask(command) == {"updated": True}


def build_model(kind: str, folder: Path, *, seed: int = 1) -> Path:
    """In a process of its own, with the engine's packages."""
    command = [sys.executable, "-m", "tests.sglang.tiny_models", kind, str(folder), str(seed)]
    subprocess.run(command, cwd=ROOT, env=engine_environment(), check=True, capture_output=True)
    return folder


def engine_environment(ranks: int = 1) -> dict[str, str]:
    return {
        **os.environ,
        "SGLANG_USE_CPU_ENGINE": "1",
        "HF_HUB_OFFLINE": "1",
        # Without it there may be no more ranks than NUMA nodes.
        **({"SGLANG_CPU_OMP_THREADS_BIND": "0|1"} if ranks == 2 else {}),
    }


def _read_told(one: Mapping[str, Any]) -> Told:
    details = one["details"] or {}
    restored = sum(count for place, count in details.items() if place != "device" and isinstance(count, int))
    return Told(Answer(tuple(one["tokens"]), tuple(one["logprobs"])), details.get("device", 0), restored)
