"""The identity of an SGLang engine's rank: everything that its pages depend on and its keys do not say.

SGLang's keys cover tokens, the name of an adapter and a salt. No key covers the model, dtype, layout or rank, and two
ranks give one key to different bytes. Nor does a key cover the environment's choice of kernels and number formats, or
the content of an adapter.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from kvoffload.errors import IdentityError
from kvoffload.keys.canonical import Plain
from kvoffload.keys.identity import Identity, LayerDtype, ParallelShape
from kvoffload.keys.model_files import identify_adapter, identify_revision
from kvoffload.kvspec import KVGeometry
from kvoffload.sglang.pools import dtype_name

HASH_ALGORITHM = "sglang sha256 of pages"
_COMMIT = re.compile(r"[0-9a-f]{40}")

OF_ONE_START = frozenset(
    {
        # Where it listens, and what it is called there.
        "host", "port", "grpc_port", "nccl_port", "dist_init_addr", "dist_timeout", "gated_launch_port",
        "engine_info_bootstrap_port", "disaggregation_bootstrap_port", "encoder_bootstrap_port",
        "smg_http_sidecar_port", "served_model_name", "fastapi_root_path", "api_key", "admin_api_key",
        "ssl_keyfile", "ssl_certfile",
        "ssl_ca_certs", "ssl_keyfile_password", "skip_server_warmup", "base_gpu_id", "watchdog_timeout",
        "soft_watchdog_timeout", "sleep_on_idle", "gc_threshold", "gc_warning_threshold_secs", "numa_node",
        # Logs, traces and metrics.
        "log_level", "log_level_http", "log_requests", "log_requests_level", "log_requests_format",
        "log_requests_target", "crash_dump_folder", "show_time_cost", "enable_metrics", "enable_cache_report",
        "enable_trace", "trace_modules", "otlp_traces_endpoint", "otlp_service_name", "kv_events_config",
        "decode_log_interval", "extra_metric_labels", "stat_loggers", "export_metrics_to_file_dir",
        # How much it does at once, and in which order.
        "max_running_requests", "max_queued_requests", "max_total_tokens", "mem_fraction_static", "schedule_policy",
        "schedule_conservativeness", "chunked_prefill_size", "max_prefill_tokens", "prefill_max_requests",
        "stream_interval", "radix_eviction_policy", "radix_eviction_policy_config", "cuda_graph_max_bs_decode",
        "cuda_graph_max_bs_prefill", "cuda_graph_bs_decode", "cuda_graph_bs_prefill", "cuda_graph_config",
        "max_mamba_cache_size", "mamba_full_memory_ratio", "swa_full_tokens_ratio", "max_loaded_loras",
        "lora_eviction_policy",
        # Sampling after the model, and text processing before it.
        "random_seed", "sampling_backend", "grammar_backend", "sampling_defaults", "preferred_sampling_params",
        "tokenizer_path", "tokenizer_mode", "tokenizer_backend", "tokenizer_worker_num", "detokenizer_worker_num",
        "skip_tokenizer_init", "chat_template", "completion_template", "reasoning_parser", "tool_call_parser",
        # Adapters: their content is part of the identity elsewhere, and SGLang's own form has a number that differs at
        # each start.
        "lora_paths",
        # Ourselves.
        "enable_unified_cache_external_linker", "unified_cache_external_linker_backend",
        "unified_cache_external_linker_config",
        # Its host cache. How its pages lie there is in no record.
        "enable_hierarchical_cache", "hicache_ratio", "hicache_size", "hicache_host_memory_mode",
        "hicache_host_memory_fraction", "hicache_write_policy", "hicache_io_backend", "hicache_mem_layout",
        "hicache_storage_backend", "hicache_storage_prefetch_policy", "hicache_storage_backend_extra_config",
        "hicache_storage_prefetch_retry_poll_interval", "hicache_storage_prefetch_retry_max_attempts",
    }
)  # fmt: skip
"""Arguments that two engines with the same pages may differ in. Every other one is part of the identity, one that a
later version adds too: an argument too many costs a miss, one too few a wrong hit."""


VARIABLES = "SGLANG_"
VARIABLES_OF_ONE_START = frozenset(
    {
        # Which start it is, where it listens, and on which processors it runs.
        "SGLANG_RUN_ID", "SGLANG_PORT", "SGLANG_GRPC_PORT", "SGLANG_TCP_STORE_PORT", "SGLANG_BACKUP_PORT_BASE",
        "SGLANG_HOST_IP", "SGLANG_ZMQ_SOURCE_IP", "SGLANG_ZMQ_ALLOWED_PEERS", "SGLANG_IS_FIRST_RANK_ON_NODE",
        "SGLANG_CPU_OMP_THREADS_BIND", "SGLANG_SET_CPU_AFFINITY", "SGLANG_AUTO_NUMA_BIND", "SGLANG_NUMA_BIND_V2",
        "SGLANG_USE_MODELSCOPE", "SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE",
        # Where it keeps what it compiles.
        "SGLANG_CACHE_DIR", "SGLANG_DG_CACHE_DIR", "SGLANG_JIT_CACHE_DIR", "SGLANG_CUTE_AOT_CACHE_DIR",
        # Profiles, logs and dumps.
        "SGLANG_TORCH_PROFILER_DIR", "SGLANG_RECORD_STEP_TIME", "SGLANG_CACHE_HIT_RATE_WINDOW_SECONDS",
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION", "SGLANG_PYSPY_DUMP_BEFORE_CRASH", "SGLANG_EXPOSE_OWN_ENV_VARS",
        # How long it waits, and for how much.
        "SGLANG_WARMUP_TIMEOUT", "SGLANG_TIMEOUT_KEEP_ALIVE", "SGLANG_REQ_RUNNING_TIMEOUT",
        "SGLANG_REQ_WAITING_TIMEOUT", "SGLANG_REQUEST_STATE_WAIT_TIMEOUT", "SGLANG_UVICORN_WORKER_HEALTHCHECK_TIMEOUT",
    }
)  # fmt: skip
VARIABLES_THAT_TELL = ("SGLANG_LOG_", "SGLANG_PROFILE_", "SGLANG_OTLP_", "SGLANG_CUDA_COREDUMP")
"""Variables of the environment that two engines with the same pages may differ in, and how names of such begin. As with
arguments, one that is not listed counts."""


def identify_rank(
    arguments: Any, geometry: KVGeometry, *, version: str, dtype: Any, rank: int, variables: Mapping[str, str]
) -> Identity:
    """`variables`: of the process's environment. IdentityError: the model has no revision that stays what it is, or an
    adapter has no folder here."""
    return Identity(
        engine=f"sglang {version}",
        model=str(arguments.model_path),
        revision=_find_revision(arguments),
        model_config={
            "arguments": describe_arguments(arguments),
            "variables": choose_variables(variables),
            "adapters": _identify_adapters(arguments),
            "rank": rank,
        },
        model_dtype=dtype_name(dtype),
        layers=tuple(LayerDtype(layer=layer.name, dtype=layer.dtype) for layer in geometry.layers.values()),
        geometry=geometry.describe(),
        parallel=ParallelShape(tensor=arguments.tp_size),
        hash_algorithm=HASH_ALGORITHM,
        hash_seed="",
    )


def resolve_arguments(arguments: Any) -> Any:
    """Returns the arguments with the engine's own choices filled in. The engine's record has only those that a user
    gave."""
    resolve = getattr(arguments, "resolved_dict", None)
    return arguments if resolve is None else SimpleNamespace(**resolve())


def describe_arguments(arguments: Any) -> dict[str, Plain]:
    """Describes the arguments that were resolved, or that the engine's class declares. Other attributes are a process's
    own notes."""
    if isinstance(arguments, SimpleNamespace):
        names = set(vars(arguments))
    else:
        names = {name for kind in type(arguments).__mro__ for name in vars(kind).get("__annotations__", {})}
    told = sorted(name for name in names - OF_ONE_START if not name.startswith("_"))
    return {name: _plain(getattr(arguments, name, None)) for name in told}


def choose_variables(variables: Mapping[str, str]) -> dict[str, Plain]:
    return {
        name: value
        for name, value in sorted(variables.items())
        if name.startswith(VARIABLES)
        and name not in VARIABLES_OF_ONE_START
        and not name.startswith(VARIABLES_THAT_TELL)
    }


def _identify_adapters(arguments: Any) -> list[Plain]:
    """Describes the adapters that the engine is started with: SGLang's keys have their names and paths alone. One that
    it loads later has a number of its own in them, which no other engine has."""
    return [[name, path, identify_adapter(Path(path))] for name, path in _list_adapters(arguments.lora_paths or ())]


def _list_adapters(given: Any) -> list[tuple[str, str]]:
    """Names and paths, in whichever of SGLang's forms they were given."""
    if isinstance(given, Mapping):
        return [(str(name), str(one["lora_path"] if isinstance(one, Mapping) else one)) for name, one in given.items()]
    listed = []
    for one in given:
        if isinstance(one, str):
            name, _, path = one.partition("=")
            listed.append((name, path or name))
        elif isinstance(one, Mapping):
            listed.append((str(one["lora_name"]), str(one["lora_path"])))
        else:
            listed.append((str(one.lora_name), str(one.lora_path)))
    return listed


def _find_revision(arguments: Any) -> str:
    folder = Path(arguments.model_path)
    if folder.is_dir():
        return identify_revision(folder)
    revision = str(arguments.revision or "")
    if not _COMMIT.fullmatch(revision):
        raise IdentityError(
            f"model {arguments.model_path}: revision {revision or 'main'} may be another one tomorrow",
            remedy="give the commit to --revision, or load the model from a folder",
        )
    return revision


def _plain(value: Any) -> Plain:
    if value is None or isinstance(value, bool | int | float | str | bytes):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value)
