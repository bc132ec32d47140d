"""The installed SGLang has the hooks that the linker and the storage have, in their shapes, and calls them where and as
we think.

Read from source alone: nothing of SGLang is imported. What a release changes is named here on the day it is tried.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from kvoffload.plan.sglang_pages import ONE_POOL, WINDOW_POOLS
from kvoffload.sglang import hicache_storage, plugin, pools, tested
from kvoffload.sglang.weight_updates import CHECK, SELECT
from tests.vllm.contract import complain_of_calls, find_calls

pytestmark = pytest.mark.sglang

CACHE = "srt/mem_cache"
WRAPPER = f"{CACHE}/unified_cache/unified_cache_linker.py"
FACTORY = f"{CACHE}/unified_cache/linker_factory.py"
TREE = f"{CACHE}/unified_radix_cache.py"
STORAGE = f"{CACHE}/hicache_storage.py"
CONTROLLERS = ("srt/managers/cache_controller.py", f"{CACHE}/hybrid_cache/hybrid_cache_controller.py")
UPDATER = "srt/managers/scheduler_components/weight_updater.py"

LINKER_CALLS = {
    "lookup": (WRAPPER,),
    "load": (WRAPPER,),
    "start_layer_wise_loading": (WRAPPER,),
    "finish_layer_wise_loading": (WRAPPER,),
    "cancel_queued_load": (WRAPPER,),
    "offload": (WRAPPER,),
    "num_completed_offloads": (WRAPPER,),
    "pop_completed_offload": (WRAPPER,),
    "reset": (WRAPPER,),
    "close": (WRAPPER,),
}
STORAGE_CALLS = {
    "register_mem_pool_host": CONTROLLERS[:1],
    "register_mem_host_pool_v2": CONTROLLERS[1:],
    "batch_exists": CONTROLLERS,
    "batch_get_v1": CONTROLLERS[:1],
    "batch_set_v1": CONTROLLERS[:1],
    "batch_exists_v2": CONTROLLERS[1:],
    "batch_get_v2": CONTROLLERS,
    "batch_set_v2": CONTROLLERS[1:],
    "clear": CONTROLLERS[1:],
    "close": CONTROLLERS[:1],
}
NOT_CALLED = frozenset({"note_fault", "exists", "get", "batch_get", "set", "batch_set"})
"""Of ours: the first is our own, the others are called without `interface_v1` alone."""
TREE_CALLS = (
    "match",
    "load_back",
    "offload_nodes",
    "start_layer_wise_loading",
    "finish_loads",
    "num_completed_offloads",
    "take_completed_offloads",
    "commit_completed_offloads",
    "release_request",
    "reset",
    "close",
)
"""How the engine's tree uses what drives the linker: each leads to one of our hooks."""
READ_PARAMS = (
    "page_size",
    "token_to_kv_pool_allocator",
    "tp_cache_group",
    "sliding_window_size",
    "swa_gates_prefix_match",
    "decoder_swa_bounded_replay",
    "draft_swa_window",
    "enable_mamba_extra_buffer",
    "mtp_draft_device_pools",
    "sidecar_draft_device_pools",
)
READ_ARGUMENTS = (
    "model_path",
    "revision",
    "device",
    "served_model_name",
    "enable_metrics",
    "extra_metric_labels",
    "chunked_prefill_size",
    "tp_size",
    "pp_size",
    "dp_size",
    "attn_cp_size",
    "dcp_size",
    "nnodes",
    "enable_dp_attention",
    "speculative_algorithm",
    "enable_multimodal",
    "disaggregation_mode",
    "enable_memory_saver",
    "enable_linker_mla_dedup",
    "hicache_storage_backend",
    "lora_paths",
)


@cache
def sglang_folder() -> Path:
    found = find_spec("sglang")
    assert found is not None
    assert found.origin is not None
    return Path(found.origin).parent


@cache
def read(path: str) -> str:
    return (sglang_folder() / path).read_text()


@cache
def find_class(path: str, name: str) -> ast.ClassDef | None:
    """Finds a class of a file; `Outer.Inner` is one inside of another."""
    body: list[ast.stmt] = ast.parse(read(path)).body
    found: ast.ClassDef | None = None
    for part in name.split("."):
        found = next((one for one in body if isinstance(one, ast.ClassDef) and one.name == part), None)
        body = [] if found is None else found.body
    return found


def list_fields(kind: ast.ClassDef | None) -> list[str]:
    body = [] if kind is None else kind.body
    return [
        one.target.id
        for one in body
        if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name) and "ClassVar" not in ast.unparse(one)
    ]


def list_methods(kind: ast.ClassDef | None) -> dict[str, ast.FunctionDef]:
    body = [] if kind is None else kind.body
    return {one.name: one for one in body if isinstance(one, ast.FunctionDef)}


def write_signature(kind: ast.ClassDef, method: str) -> str:
    """Writes names of parameters as `tested` has them. Without a constructor of its own it is a data class."""
    found = list_methods(kind).get(method)
    if found is None:
        return f"({', '.join(['self', *list_fields(kind)])})" if method == "__init__" else ""
    given = found.args
    named = [
        *given.posonlyargs,
        *given.args,
        *filter(None, [given.vararg]),
        *given.kwonlyargs,
        *filter(None, [given.kwarg]),
    ]
    return f"({', '.join(one.arg for one in named)})"


def complain_of_signatures(path: str, name: str, signatures: Mapping[str, str]) -> Iterator[str]:
    kind = find_class(path, name)
    if kind is None:
        yield f"{name}: {path} has none"
        return
    for method, signature in signatures.items():
        found = write_signature(kind, method)
        if found != signature:
            yield f"{name}.{method}: {found or 'absent'}, tested was {signature}"
    for method, found_method in list_methods(kind).items():
        is_abstract = any(ast.unparse(one).endswith("abstractmethod") for one in found_method.decorator_list)
        if is_abstract and method not in signatures:
            yield f"{name}.{method}: a new hook, which must be ours too"


def make_linker() -> Any:
    return plugin.derive_linker(object, None, version="", pool_name=str)


def make_storage() -> Any:
    return hicache_storage.derive_storage(
        object, None, version="", find_arguments=lambda: None, find_group=lambda: None
    )


def test_the_version_is_the_tested_one() -> None:
    assert version("sglang") == tested.VERSION


@pytest.mark.parametrize(
    ("path", "name", "signatures"),
    [
        (WRAPPER, "UnifiedCacheLinker", tested.LINKER),
        (WRAPPER, "LayerWiseLoadCounter", tested.COUNTER),
        (STORAGE, "PoolTransfer", tested.TRANSFER),
        (STORAGE, "PoolTransferResult", tested.RESULT),
        (STORAGE, "HiCacheStorage", tested.STORAGE),
        (UPDATER, "SchedulerWeightUpdaterManager", {**tested.UPDATER, CHECK: "(self, recv_req)"}),
    ],
    ids=lambda value: value if isinstance(value, str) and "/" not in value else "",
)
def test_the_hooks_have_the_shapes_that_were_tested(path: str, name: str, signatures: Mapping[str, str]) -> None:
    assert list(complain_of_signatures(path, name, signatures)) == []


def test_every_hook_of_the_linker_is_called_where_and_as_we_think() -> None:
    linker = make_linker()
    assert {name for name in vars(linker) if not name.startswith("_")} - LINKER_CALLS.keys() == {"note_fault"}
    receivers = re.compile(r"(?:^|\.)cache_linker$")
    assert complain_of_calls(linker, {WRAPPER: read(WRAPPER)}, LINKER_CALLS, receivers=receivers) == []


def test_every_hook_of_the_storage_is_called_where_and_as_we_think() -> None:
    storage = make_storage()
    assert {name for name in vars(storage) if not name.startswith("_")} - STORAGE_CALLS.keys() == NOT_CALLED
    sources = {path: read(path) for path in CONTROLLERS}
    receivers = re.compile(r"(?:^|\.)storage_backend$")
    assert complain_of_calls(storage, sources, STORAGE_CALLS, receivers=receivers) == []


def test_the_linker_is_made_with_the_arguments_that_it_takes() -> None:
    calls = [
        node
        for node in ast.walk(ast.parse(read(FACTORY)))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "linker_cls"
    ]
    (made, *_) = calls
    assert [ast.unparse(one) for one in made.args] == ["server_args", "params"]
    assert {one.arg for one in made.keywords} == {"components", "extra_config", "forward_stream"}
    assert "init_cache_linker" in {
        call.name for call in find_calls(read(f"{CACHE}/registry.py"), re.compile("^cache$"))
    }


def test_the_engines_tree_drives_the_linker_as_before() -> None:
    called = {call.name for call in find_calls(read(TREE), re.compile(r"(?:^|\.)linker$"))}
    assert [f"{name}: {TREE} does not call it any more" for name in TREE_CALLS if name not in called] == []
    scheduler = {call.name for call in find_calls(read("srt/managers/scheduler.py"), re.compile(r"tree_cache$"))}
    assert {"finish_external_linker_loads", "check_hicache_events", "ready_to_load_host_cache"} <= scheduler


def test_each_update_of_weights_is_heard_of_before_it_changes_anything() -> None:
    methods = list_methods(find_class(UPDATER, "SchedulerWeightUpdaterManager"))
    silent = [
        name
        for name, method in methods.items()
        if (name in tested.UPDATER or name.startswith("update_weights"))
        and f"self.{SELECT}(" not in ast.unparse(method)
    ]
    assert silent == []
    assert {name for name in methods if name.startswith("update_weights")} <= tested.UPDATER.keys()


@pytest.mark.parametrize("name", [*pools.POOLS, pools.STATE_POOL, pools.STATES])
def test_each_pool_that_is_served_is_there(name: str) -> None:
    module, _, kind = name.partition("_pool.")
    assert find_class(f"{module.removeprefix('sglang.').replace('.', '/')}_pool.py", kind) is not None, name


def test_parameters_and_arguments_that_a_start_reads_are_there() -> None:
    params = find_class(f"{CACHE}/cache_init_params.py", "CacheInitParams")
    assert set(READ_PARAMS) - {*list_fields(params), *list_methods(params)} == set()
    files = sorted((sglang_folder() / "srt/arg_groups/fields").glob("*.py"))
    kinds = [one for file in files for one in ast.parse(file.read_text()).body if isinstance(one, ast.ClassDef)]
    assert set(READ_ARGUMENTS) - {name for kind in kinds for name in list_fields(kind)} == set()


def test_metrics_of_a_scheduler_are_read_from_the_files_of_its_process() -> None:
    common = read("srt/utils/common.py")
    assert 'os.environ["PROMETHEUS_MULTIPROC_DIR"] = ' in common
    assert "multiprocess.MultiProcessCollector(registry)" in common
    assert "set_prometheus_multiproc_dir()" in read("srt/entrypoints/engine.py")
    assert "add_prometheus_middleware(" in read("srt/entrypoints/http_server.py")


def test_models_have_a_pool_for_windows_or_none_as_planned() -> None:
    """`kvoffload plan` knows for which of them SGLang makes one."""
    source = ast.parse(read("srt/configs/model_config.py"))
    listed = [
        ast.unparse(node)
        for node in ast.walk(source)
        if (isinstance(node, ast.FunctionDef) and node.name in ("is_hybrid_swa_model", "get_hybrid_layer_ids"))
        or (isinstance(node, ast.Assign) and ast.unparse(node.targets[0]).endswith("_ARCHS"))
    ]
    named = {name for text in listed for name in re.findall(r"'(\w+)'", text)}
    assert len(named) > len(WINDOW_POOLS)
    assert set(WINDOW_POOLS.values()) - named == set()
    assert set(ONE_POOL.values()) & named == set()


# ---- the check itself ----


def test_a_hook_that_changes_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    changed = read(WRAPPER).replace("def cancel_queued_load(self, rid: str)", "def cancel_queued_load(self, request)")
    changed = changed.replace("def pop_completed_offload(self)", "def take_offload(self)")
    kind = next(
        one for one in ast.parse(changed).body if isinstance(one, ast.ClassDef) and one.name == "UnifiedCacheLinker"
    )
    monkeypatch.setattr("tests.sglang.test_contract.find_class", lambda *_: kind)
    assert list(complain_of_signatures(WRAPPER, "UnifiedCacheLinker", tested.LINKER)) == [
        "UnifiedCacheLinker.cancel_queued_load: (self, request), tested was (self, rid)",
        "UnifiedCacheLinker.pop_completed_offload: absent, tested was (self)",
        "UnifiedCacheLinker.take_offload: a new hook, which must be ours too",
    ]


def test_a_call_that_changes_is_named() -> None:
    source = read(WRAPPER).replace("self.cache_linker.reset()", "self.cache_linker.reset(keeps=True)")
    source = source.replace("self.cache_linker.close()", "pass")
    complaints = complain_of_calls(
        make_linker(), {WRAPPER: source}, LINKER_CALLS, receivers=re.compile(r"(?:^|\.)cache_linker$")
    )
    assert complaints[0] == f"close: {WRAPPER} does not call it any more"
    assert re.fullmatch(rf"reset: {WRAPPER}:\d+ calls it with what ours does not take \(.*\)", complaints[1])
