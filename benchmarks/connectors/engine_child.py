"""A vLLM engine in a process of its own, with one connector or none; is asked by lines of JSON (bench/child.py)."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.connectors.accounting import CpuSeconds, HookClock, find_server, process_cpu, read_cpu
from kvoffload.bench.child import Child, answer_commands
from kvoffload.errors import BenchmarkError, ServerError
from tests.vllm.engine import Engine, prepare_environment, start_engine

KVOFFLOAD = "KVOffloadConnector"
FIRST_TOKEN, LAST_TOKEN = 3, 511
"""The range of tokens in prompts; every model here knows them."""
QUIET_S = 0.5
QUIET_CPU_S = 0.01
MAX_LOOKS = 60
COPIES = 5


@contextmanager
def run_engine(folder: Path, model: str, connector: dict[str, object] | None, **arguments: object) -> Iterator[Child]:
    """`connector` is a `kv_transfer_config`; `arguments` are the engine's. `folder` is where models are built."""
    given = {"model": model, "folder": str(folder), "connector": connector, "arguments": arguments}
    with Child(__name__, json.dumps(given)) as child:
        yield child


def kvoffload(**settings: object) -> dict[str, object]:
    return {"kv_connector": KVOFFLOAD, "kv_role": "kv_both", "kv_connector_extra_config": settings}


def make_prompt(seed: int, tokens: int) -> list[int]:
    """The same for the same seed; those of different seeds share no block."""
    return random.Random(seed).choices(range(FIRST_TOKEN, LAST_TOKEN), k=tokens)


class EngineCommands:
    """The commands that an engine's process obeys. `clock` measures our own connector alone."""

    def __init__(self, engine: Engine, clock: HookClock) -> None:
        self._engine = engine
        self._clock = clock
        side = self._find_side()
        self._server = find_server(side.parts.cache) if side is not None else 0

    def generate(self, seed: int, tokens: int, new_tokens: int) -> dict[str, float]:
        """One request: seconds until the last token, and prompt tokens that were not computed."""
        return self.generate_tokens(make_prompt(seed, tokens), new_tokens)

    def generate_tokens(self, prompt: list[int], new_tokens: int) -> dict[str, Any]:
        begun_s = time.perf_counter()
        output = self._engine.generate(prompt, max_tokens=new_tokens)
        seconds = time.perf_counter() - begun_s
        answer = list(output.outputs[0].token_ids)
        return {"seconds": seconds, "cached": output.num_cached_tokens or 0, "answer": answer}

    def reset(self) -> None:
        """Drops what the engine itself has cached, when its connector owes it nothing any more."""
        self._engine.reset_local()

    def wait_until_saved(self) -> None:
        self._engine.drain()

    def serve_batch(self, seed: int, requests: int, tokens: int, new_tokens: int) -> dict[str, float]:
        """All at once: wall seconds until the last token, and CPU seconds until all is saved."""
        prompts = [{"prompt_token_ids": make_prompt(seed + number, tokens)} for number in range(requests)]
        begun_s, before = time.perf_counter(), self._read_cpu()
        outputs = self._engine.llm.generate(prompts, _greedy(new_tokens), use_tqdm=False)  # type: ignore[arg-type]
        wall_s = time.perf_counter() - begun_s
        self._engine.drain()
        spent = self._read_cpu().since(before)
        side = self._find_side()
        return {
            "wall_s": wall_s,
            "cached": sum(output.num_cached_tokens or 0 for output in outputs),
            "kept": _count_kept(side.parts.cache) if side is not None else 0,
            "ours": spent.ours,
            **asdict(spent),
        }

    def server_start(self, size_bytes: int) -> dict[str, float]:
        """CPU seconds of the server until it came to rest, and of writing as much new memory once, in one thread."""
        import mmap

        import numpy as np

        spent_s = self._wait_until_quiet()
        with mmap.mmap(-1, size_bytes) as memory:
            begun_s = time.thread_time()
            view = np.frombuffer(memory, np.uint8)
            view.fill(1)
            written_s = time.thread_time() - begun_s
            del view
        return {"server": spent_s, "written": written_s}

    def measure_steps(self, seed: int, requests: int) -> list[tuple[int, int, float, int]]:
        from benchmarks.connectors.steps import measure_engine_steps

        return measure_engine_steps(self._engine, self._clock, seed=seed, requests=requests)

    def copy_pinned(self, size_bytes: int) -> float:
        """Seconds that one piece of pinned memory takes to the GPU."""
        import torch

        source, target = (
            torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True),
            torch.empty(size_bytes, dtype=torch.uint8, device="cuda"),
        )
        seconds = []
        for _ in range(COPIES):
            torch.cuda.synchronize()
            begun_s = time.perf_counter()
            target.copy_(source)
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - begun_s)
        return min(seconds)

    def runner(self) -> str:
        """The module of vLLM's model runner, and the graphs that it captures."""
        worker = self._engine.llm.llm_engine.model_executor.driver_worker.worker
        mode = worker.vllm_config.compilation_config.cudagraph_mode
        return f"{type(worker.model_runner).__module__}, {mode.name}"

    def record_published(self) -> None:
        """Begins to record what the connector publishes."""
        from benchmarks.connectors.kept import PublishedRecords

        side = self._find_side()
        assert side is not None
        self._records = PublishedRecords(side)

    def count_published(self) -> dict[str, int]:
        """Bytes kept, and those that some boundary of what was served needs."""
        return self._records.count()

    def _read_cpu(self) -> CpuSeconds:
        return read_cpu(self._clock, self._server)

    def _wait_until_quiet(self) -> float:
        spent_s = process_cpu(self._server)
        for _ in range(MAX_LOOKS):
            time.sleep(QUIET_S)
            before_s, spent_s = spent_s, process_cpu(self._server)
            if spent_s - before_s < QUIET_CPU_S:
                break
        return spent_s

    def _find_side(self) -> Any:
        scheduler: Any = self._engine.core.scheduler
        return scheduler.connector.scheduler_side if type(scheduler.connector).__name__ == KVOFFLOAD else None


def _count_kept(client: Any) -> int:
    """Bytes. A call waits for no longer than a step may, and after a few late answers none is asked for a while."""
    for _ in range(MAX_LOOKS):
        client.begin_step()
        with suppress(ServerError):
            return int(client.stats().used_bytes)
        time.sleep(QUIET_S)
    raise BenchmarkError("the server does not tell its counts", remedy="measure on a quieter machine")


def _greedy(new_tokens: int) -> Any:
    from vllm import SamplingParams

    return SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)


def _make_numba_bearable() -> None:
    """LMCache imports numba. vLLM 0.32 then asks every object of every module for its `__dict__` at a CPU worker's
    start, and llvmlite's library answers even that with a function of its own, on which the start fails."""
    from llvmlite.binding import ffi  # type: ignore[import-untyped]

    library = type(ffi.lib)
    find = library.__getattr__

    def find_function(self: object, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return find(self, name)

    library.__getattr__ = find_function


def main(given_text: str) -> None:
    """One engine until the end of the input. What vLLM says goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # comes with the end of the input, which is an end with a close
    given = json.loads(given_text)
    prepare_environment(VLLM_LOGGING_LEVEL="ERROR", VLLM_USE_FLASHINFER_SAMPLER="0")
    from benchmarks.connectors.model import MODELS

    model = MODELS[given["model"]]
    folder = Path(given["folder"]) / model.name
    if not folder.exists():
        model.build(folder)
    clock = HookClock()
    arguments = given["arguments"]
    if given["connector"] is not None:
        arguments["kv_transfer_config"] = given["connector"]
        if given["connector"]["kv_connector"] == KVOFFLOAD:
            from kvoffload.connector.facade import KVOffloadConnector

            clock.watch(KVOffloadConnector)
        elif "module_path" in str(given["connector"]):
            _make_numba_bearable()
    engine = start_engine(model, folder, **arguments)
    commands = EngineCommands(engine, clock)
    sys.stdout = answers
    print(json.dumps("ready"), flush=True)
    names = [name for name in vars(EngineCommands) if not name.startswith("_")]
    answer_commands({name: getattr(commands, name) for name in names})
    engine.close()
