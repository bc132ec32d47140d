"""Starts real vLLM engines on the CPU: their environment, their settings, the pool that shares them.

vLLM reads a part of its environment when it is imported and the rest when an engine starts, so everything that touches
os.environ for it is here, and this module imports vllm in functions only.
"""

from __future__ import annotations

import gc
import json
import os
import random
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from platform import machine
from typing import TYPE_CHECKING, Any

from tests.vllm.forked_processes import prepare_processes

if TYPE_CHECKING:
    from vllm import LLM, RequestOutput, SamplingParams
    from vllm.v1.engine.core import EngineCore

    from tests.vllm.tiny_models import GroupShape, TinyModel

Json = bool | int | float | str | None | list["Json"] | dict[str, "Json"]

NO_FP8 = "this processor has neither AVX-512 nor AMX, which vLLM needs for a cache of fp8"

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    # One thread for each rank, free to move: a second one only waits at barriers while others use the machine,
    # and vLLM's own choice binds threads to cores and refuses two ranks on one NUMA node.
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # lets collective_rpc take functions
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # a process forked from this one would have the plugin already
}

SETTINGS: Mapping[str, object] = {
    "skip_tokenizer_init": True,
    "enforce_eager": True,
    "enable_prefix_caching": True,
    "kv_cache_memory_bytes": 256 << 20,
    "max_model_len": 4096,
    "max_num_seqs": 8,
    "use_tqdm_on_load": False,
}

FIRST_PROMPT_TOKEN = 3  # after the tokenizer's special tokens
MAX_DRAIN_STEPS = 500_000
"""An idle engine waits for some things by its clock, and makes thousands of steps in a second meanwhile."""


def prepare_environment(**overrides: str) -> None:
    """Sets what vLLM and huggingface_hub read when they are imported; belongs before that.

    A variable that the caller's shell set must not decide what a test loads or where it logs.
    """
    for name in [name for name in os.environ if name.startswith("VLLM_")]:
        del os.environ[name]
    os.environ.update(ENVIRONMENT | overrides)


def make_prompt(seed: int, length: int) -> list[int]:
    """Makes the same tokens for the same seed; prompts of different seeds share no block."""
    from tests.vllm.tiny_models import VOCAB_SIZE

    return random.Random(seed).choices(range(FIRST_PROMPT_TOKEN, VOCAB_SIZE), k=length)


def make_sampling(*, max_tokens: int, logprobs: int | None = None, **wishes: Json) -> SamplingParams:
    """Makes parameters of a greedy request for exactly `max_tokens` tokens."""
    from vllm import SamplingParams

    return SamplingParams(
        temperature=0,
        max_tokens=max_tokens,
        ignore_eos=True,
        logprobs=logprobs,
        detokenize=False,
        extra_args={"kv_transfer_params": wishes} if wishes else None,
    )


@dataclass(frozen=True, slots=True)
class EngineKey:
    """Two requests for an engine with equal keys get the same one."""

    model: str
    has_own_processes: bool
    arguments: str


class Engine:
    """A running engine and the model in it. One thread may use it."""

    def __init__(self, model: TinyModel, llm: LLM, *, has_own_processes: bool) -> None:
        self.model = model
        self.llm = llm
        self.has_own_processes = has_own_processes
        self.settle: Callable[[], None] = lambda: None
        """Waits until what the connector has told to others has arrived."""
        self.lost_slots = 0
        """Slots of the pool whose answers were lost with a server: they stay with the session until the engine ends."""

    def generate(
        self, prompt: list[int], *, max_tokens: int = 8, logprobs: int | None = None, salt: str = "", **wishes: Json
    ) -> RequestOutput:
        """Greedy, exactly `max_tokens` tokens. `wishes` are the request's kv_transfer_params."""
        sampling = make_sampling(max_tokens=max_tokens, logprobs=logprobs, **wishes)
        named: Any = {"prompt_token_ids": prompt, **({"cache_salt": salt} if salt else {})}
        return self.llm.generate(named, sampling, use_tqdm=False)[0]

    def ask_workers(self, function: Callable[..., Json], *args: object) -> list[Any]:
        """Runs `function(worker, *args)` in each worker process; its answers, JSON values, come in rank order.

        Answers travel as JSON text: vLLM rebuilds others by type, and a type that it cannot rebuild ends the thread
        that receives, so the call would wait for ever.
        """

        def answer_as_text(worker: Any) -> str:
            return json.dumps(function(worker, *args))

        return [json.loads(answer) for answer in self.llm.collective_rpc(answer_as_text)]

    @property
    def core(self) -> EngineCore:
        """The engine's core, for an engine in this process: its scheduler is `core.scheduler`."""
        assert not self.has_own_processes, "the core of an engine with its own processes is not here"
        return self.llm.llm_engine.engine_core.engine_core

    def drain(self) -> None:
        """Lets an engine without requests step until it has nothing more to do, its connector neither, and settles.

        With processes of its own it steps by itself, and tells when it has come to rest. In this process only the
        caller steps it.
        """
        client = self.llm.llm_engine.engine_core
        if self.has_own_processes:
            client.call_utility("pause_scheduler", "wait", False)  # answered when idle
            client.call_utility("resume_scheduler")
            self.settle()
            return
        for _ in range(MAX_DRAIN_STEPS):
            if not self.core.scheduler.has_requests():
                self.settle()
                return
            self.llm.llm_engine.step()
        raise RuntimeError(f"{self.model.name}: still busy after {MAX_DRAIN_STEPS} steps without a request")

    def reset_local(self) -> None:
        """Drops every prefix that the engine caches, and nothing of the connector's."""
        self.drain()
        if not self.llm.reset_prefix_cache():
            raise RuntimeError(f"{self.model.name}: the engine could not reset its prefix cache, a block is still held")

    def forget(self) -> None:
        """Drops every cached prefix, the connector's too, so that no test sees what another one left."""
        self.drain()
        if not self.llm.reset_prefix_cache(reset_connector=True):
            raise RuntimeError(f"{self.model.name}: the engine could not reset its prefix cache, a block is still held")

    def close(self) -> None:
        self.llm.llm_engine.engine_core.shutdown()
        if not self.has_own_processes:
            _leave_torch_distributed()


def start_engine(model: TinyModel, folder: Path, *, has_own_processes: bool = False, **arguments: object) -> Engine:
    """Starts an engine on the model saved in `folder`; `arguments` win over the model's, those over SETTINGS.

    In this process it takes about 2 s, and the scheduler and workers can be looked at. With its own processes, as
    users run it, about 20 s. A start that fails raises vLLM's own error.
    """
    import pytest
    import torch
    from vllm import LLM, envs

    _spare_imports()
    settings = {**SETTINGS, **model.engine_args, **arguments}
    if lacks_kernels(settings):
        pytest.skip(NO_FP8)
    envs.disable_envs_cache()  # an engine in this process has frozen what the next one must read again
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = str(int(has_own_processes))
    if has_own_processes or any(name.endswith("parallel_size") for name in settings):
        prepare_processes()
    if torch.get_num_threads() > 1:  # torch was imported before the environment was set
        torch.set_num_threads(1)
    try:
        with model.starting():
            llm = LLM(str(folder), **settings)  # type: ignore[arg-type]
    except BaseException:
        if not has_own_processes:
            _leave_torch_distributed()
        raise
    return Engine(model, llm, has_own_processes=has_own_processes)


def lacks_kernels(arguments: Mapping[str, object]) -> bool:
    """Whether vLLM has no kernels on this processor for the cache that an engine with these arguments would have."""
    flags = set(Path("/proc/cpuinfo").read_text().split())
    is_fp8 = str(arguments.get("kv_cache_dtype", "")).startswith("fp8")
    return is_fp8 and machine() == "x86_64" and not flags & {"avx512f", "amx_tile"}


@cache
def _spare_imports() -> None:
    """Keeps garbage collections from going through the objects imported before the first engine started.

    Those are 650,000 objects, and vLLM collects ten times while an engine starts and ends, which was three quarters of
    the time. It also freezes what there is when an engine has started, and undoes that for all when it ends: neither
    may happen, so that what belongs to an engine, and nothing else, is looked through and freed.
    """
    gc.collect()
    gc.freeze()
    gc.freeze = gc.unfreeze = lambda: None


def _leave_torch_distributed() -> None:
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown

    # An engine that could not start has left its connector for the next one.
    ensure_kv_transfer_shutdown()
    cleanup_dist_env_and_memory()
    gc.collect()


class EnginePool:
    """Engines shared by the tests of a session: one per model and arguments, the least recently used closed first.

    Only one may run inside this process, because vLLM keeps its connector and its process groups in globals.
    """

    def __init__(
        self, root: Path, *, max_engines: int = 3, prepare: Callable[[Engine], None] = lambda engine: None
    ) -> None:
        """`prepare` is called with each engine that has started."""
        self._root = root
        self._max_engines = max_engines
        self._prepare = prepare
        self._engines: OrderedDict[EngineKey, Engine] = OrderedDict()

    def acquire(self, model: TinyModel, *, has_own_processes: bool = False, **arguments: object) -> Engine:
        """A running engine with empty caches, the caller's until the next call. `arguments` are JSON values."""
        key = EngineKey(model.name, has_own_processes, json.dumps(arguments, sort_keys=True))
        if key in self._engines:
            self._engines.move_to_end(key)
        else:
            self._make_room(has_own_processes=has_own_processes)
            folder = self.model_folder(model)
            self._engines[key] = start_engine(model, folder, has_own_processes=has_own_processes, **arguments)
            self._prepare(self._engines[key])
        engine = self._engines[key]
        engine.forget()
        return engine

    def model_folder(self, model: TinyModel) -> Path:
        """Returns where the model is saved; built at the first call."""
        folder = self._root / model.name
        if not folder.exists():
            model.build(folder)
        return folder

    def leave_process(self) -> None:
        """Ends the one that runs in this process, for a test that starts one of its own. Those with processes of their
        own go on: each takes half a minute to start."""
        for key in [key for key in self._engines if not key.has_own_processes]:
            self._engines.pop(key).close()

    def close(self) -> None:
        while self._engines:
            self._engines.popitem(last=False)[1].close()

    def _make_room(self, *, has_own_processes: bool) -> None:
        if not has_own_processes:
            self.leave_process()
        surplus = len(self._engines) + 1 - self._max_engines
        for key in list(self._engines)[: max(0, surplus)]:
            self._engines.pop(key).close()


def make_room(worker: Any) -> Json:
    """Gives a stage the tensors that it takes over from the one before, for `Engine.ask_workers`: on a CPU vLLM makes
    none."""
    runner = worker.model_runner
    runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
        batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
    )
    return True


@dataclass(frozen=True, slots=True)
class CacheShape:
    """The engine's real KV-cache configuration, in the words of the tiny models' table."""

    num_blocks: int
    hash_block_size: int
    layout: str
    groups: tuple[GroupShape, ...]


def cache_shapes(engine: Engine) -> list[CacheShape]:
    """One for each rank."""
    from tests.vllm.tiny_models import GroupShape

    return [
        CacheShape(
            **(
                answer
                | {
                    "groups": tuple(
                        GroupShape(**group | {name: tuple(group[name]) for name in ("layers", "pages")})
                        for group in answer["groups"]
                    )
                }
            )
        )
        for answer in engine.ask_workers(_describe_cache)
    ]


def _describe_cache(worker: Any) -> Json:
    from kvoffload.connector.engine import vllm_compat

    config = worker.model_runner.kv_cache_config
    return {
        "num_blocks": config.num_blocks,
        "hash_block_size": vllm_compat.hash_block_size(worker.vllm_config, config),
        "layout": config.kv_cache_layout,
        "groups": [_describe_group(group) for group in config.kv_cache_groups],
    }


def _describe_group(group: Any) -> dict[str, Json]:
    spec = group.kv_cache_spec
    own = getattr(spec, "kv_cache_specs", {})  # of layers with pages of several sizes
    pages = [own[name].real_page_size_bytes for name in group.layer_names] if own else []
    return {
        "kind": type(own[group.layer_names[0]] if own else spec).__name__,
        "layers": [int(name.split(".")[2]) for name in group.layer_names],  # model.layers.3.self_attn.attn
        "block_size": spec.block_size,
        "page_bytes": sum(pages) if own else spec.real_page_size_bytes,
        "padded_page_bytes": spec.page_size_bytes,
        "pages": pages,
    }
