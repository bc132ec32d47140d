"""The installed vLLM has the hooks that we have, in their shapes, and calls them where and as we think.

Read by introspection and from source. What a release changes is named here on the day it is tried.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.contract import (
    BASE,
    complain_of_calls,
    complain_of_notes,
    complain_of_shapes,
    find_calls,
    find_version,
    read_sources,
)

pytestmark = pytest.mark.vllm

SINCE = {
    "get_external_cache_hit_sources": (0, 32),
    "get_loaded_kv_cache_group_ids": (0, 32),
    "supports_sleep_mode": (0, 33),
    "unregister_kv_caches": (0, 33),
    "restore_kv_caches": (0, 33),
}
"""Hooks that the oldest vLLM that we run on does not have."""
OWN = frozenset({"faults", "note_fault"})
INHERITED = {
    "bind_kv_cache_manager": "hands its pool to bind_gpu_block_pool",
    "clear_connector_metadata": "as the base has it",
    "finish_forward": "nothing of ours ends with a forward",
    "get_block_ids_with_load_errors": "failed loads are told by request",
    "get_finished": "get_transfer_results says it",
    "get_finished_count": "all ranks report",
    "get_kv_connector_kv_cache_events": "take_events says it",
    "get_mem_pool_context": "the engine's own memory is good",
    "get_required_kvcache_layout": "any layout",
    "handle_preemptions": "saves pin their blocks",
    "has_connector_metadata": "as the base has it",
    "register_finished_partial_tail": "whole blocks only",
    "requires_piecewise_for_cudagraph": "nothing happens between layers",
    "reset_capture_state": "nothing changes while graphs are captured",
    "role": "as the base has it",
    "set_host_xfer_buffer_ops": "we copy by ourselves",
    "set_xfer_handshake_metadata": "the one that knows pipelines is ours",
    "supports_divergent_local_hybrid_hits": "a hit begins where all groups have come to",
}
"""Hooks that stay as they are in the base, and why that is right."""

SCHEDULER = "v1/core/sched/scheduler.py"
RUNNERS = ("v1/worker/gpu/kv_connector.py", "v1/worker/kv_connector_model_runner_mixin.py")
LAYERS = "model_executor/layers/attention/kv_transfer_utils.py"
METRICS = "distributed/kv_transfer/kv_connector/v1/metrics.py"
CALLED_IN = {
    "bind_gpu_block_pool": (BASE,),
    "bind_kv_cache_manager": (SCHEDULER,),
    "build_connector_meta": (SCHEDULER,),
    "get_external_cache_hit_sources": (SCHEDULER,),
    "get_loaded_kv_cache_group_ids": (SCHEDULER,),
    "get_num_new_matched_tokens": (SCHEDULER,),
    "has_pending_block_frees": (SCHEDULER,),
    "has_pending_push_work": (SCHEDULER,),
    "on_new_request": (SCHEDULER,),
    "request_finished": (SCHEDULER,),
    "request_finished_all_groups": (SCHEDULER,),
    "requires_kv_delivery": (SCHEDULER,),
    "reset_cache": (SCHEDULER,),
    "shutdown": (SCHEDULER,),
    "take_events": (SCHEDULER,),
    "update_connector_output": (SCHEDULER,),
    "update_state_after_alloc": (SCHEDULER,),
    "get_kv_connector_stats": (SCHEDULER, *RUNNERS),
    "bind_connector_metadata": RUNNERS,
    "build_connector_worker_meta": RUNNERS,
    "get_transfer_results": RUNNERS,
    "start_load_kv": RUNNERS,
    "wait_for_save": RUNNERS,
    "register_kv_caches": ("v1/worker/gpu/kv_connector.py", "v1/worker/gpu_model_runner.py"),
    "get_handshake_metadata": ("v1/worker/gpu_worker.py",),
    "set_xfer_handshake_metadata_pp_aware": ("v1/engine/core.py",),
    "save_kv_layer": (LAYERS,),
    "wait_for_layer_load": (LAYERS,),
    "build_kv_connector_stats": (METRICS,),
    "build_prom_metrics": (METRICS,),
    "supports_sleep_mode": ("config/vllm.py",),
    "unregister_kv_caches": ("v1/worker/gpu_worker.py",),
    "restore_kv_caches": ("v1/worker/gpu_worker.py",),
}


def vllm_folder() -> Path:
    import vllm

    return Path(vllm.__file__).parent


def hooks_to_come() -> set[str]:
    """Of ours, those that the installed vLLM does not have yet."""
    import vllm

    return {name for name, version in SINCE.items() if version > find_version(vllm)}


def test_the_connectors_hooks_have_the_shapes_of_the_installed_vllm() -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, SupportsHMA

    from kvoffload.connector.facade import KVOffloadConnector

    complaints = complain_of_shapes(
        KVOffloadConnector,
        (KVConnectorBase_V1, SupportsHMA),
        own=OWN | hooks_to_come(),
        inherited=INHERITED.keys(),
        is_made_by_vllm=True,
    )
    assert complaints == []


def test_every_hook_is_called_where_and_as_we_think() -> None:
    import vllm

    from kvoffload.connector.facade import KVOffloadConnector

    assert {name for name in vars(KVOffloadConnector) if not name.startswith("_")} - CALLED_IN.keys() == OWN
    expected = {name: paths for name, paths in CALLED_IN.items() if name not in hooks_to_come()}
    sources = read_sources(Path(vllm.__file__).parent, {path for paths in expected.values() for path in paths})
    assert complain_of_calls(KVOffloadConnector, sources, expected) == []


@pytest.mark.parametrize("kind", ["step plan", "worker's report", "worker's facts", "statistics", "metrics"])
def test_what_the_connector_hands_over_has_the_shapes_of_the_installed_vllm(kind: str) -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1 import base, metrics

    from kvoffload.connector.common import step_plan
    from kvoffload.connector.engine import stats as engine_stats

    ours, theirs, inherited = {
        "step plan": (step_plan.StepPlan, base.KVConnectorMetadata, ()),
        "worker's report": (step_plan.WorkerReport, base.KVConnectorWorkerMetadata, ()),
        "worker's facts": (step_plan.WorkerFacts, base.KVConnectorHandshakeMetadata, ()),
        "statistics": (engine_stats.ConnectorStats, metrics.KVConnectorStats, ("to_dict",)),
        "metrics": (engine_stats.ConnectorProm, metrics.KVConnectorPromMetrics, ()),
    }[kind]
    assert issubclass(ours, theirs)
    complaints = complain_of_shapes(ours, (theirs,), inherited=set(inherited))
    assert [line for line in complaints if not line.endswith("no hook of vLLM's")] == []


def test_every_model_is_noted_where_we_look_for_it() -> None:
    """A worker's connector is given no model. vLLM notes each module that it makes, without keeping it alive."""
    import torch
    from vllm.model_executor.model_loader.reload import layerwise

    from kvoffload.connector.engine.vllm_compat import loaded_modules

    path = "model_executor/model_loader/utils.py"
    (source,) = read_sources(vllm_folder(), {path}).values()
    noted_by = "record_metadata_for_reloading"
    assert complain_of_notes(source, maker="initialize_model", noted_by=noted_by) == []
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    layerwise.record_metadata_for_reloading(model)
    modules = [id(one) for one in loaded_modules()]
    assert {id(model), id(model[0])} <= {*modules}
    del model
    assert not {*modules[-2:]} & {id(one) for one in loaded_modules()}


# ---- the check itself ----


class Base(ABC):
    """A base class as a vLLM might have it."""

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: object) -> bool:
        return True

    @property
    def requires_kv_delivery(self) -> bool:
        return True

    def restore_kv_caches(self) -> None:
        return

    @abstractmethod
    def start_load_kv(self, forward_context: object, **kwargs: Any) -> None: ...

    def update_state(self, request: object, blocks: object, tokens: int = 0) -> None:
        return


class Fitting(Base):
    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: object) -> bool:
        return True

    @property
    def requires_kv_delivery(self) -> bool:
        return False

    def restore_kv_caches(self, more: int = 0) -> None: ...

    def start_load_kv(self, forward_context: object, **kwargs: Any) -> None: ...

    def update_state(self, request: object, blocks: object, tokens: int = 1) -> None: ...


class OldSleep(Fitting):
    """The hooks of sleep as we had them when 0.33 came."""

    @property
    def supports_sleep_mode(self) -> bool:  # type: ignore[override]
        return True

    def restore_kv_caches(self, kv_caches: object) -> None: ...  # type: ignore[override]


class Renamed(Fitting):
    def start_load_kv(self, context: object, **kwargs: Any) -> None: ...


class Narrow(Fitting):
    def start_load_kv(self, forward_context: object) -> None: ...  # type: ignore[override]


class Short(Fitting):
    def update_state(self, request: object, blocks: object) -> None: ...  # type: ignore[override]


class Turned(Fitting):
    def update_state(self, blocks: object, request: object, tokens: int = 0) -> None: ...


class Needy(Fitting):
    def update_state(self, request: object, blocks: object, tokens: int) -> None: ...  # type: ignore[override]


class Called(Fitting):
    def requires_kv_delivery(self) -> bool:  # type: ignore[override]
        return False


class Bare(Fitting):
    """A static method takes no class."""

    @staticmethod
    def supports_sleep_mode(kv_transfer_config: object) -> bool:  # type: ignore[override]
        return True


class Gone(Fitting):
    def wait_for_layer(self) -> None: ...


ALL = {"supports_sleep_mode", "requires_kv_delivery", "restore_kv_caches", "start_load_kv", "update_state"}


def complain(ours: type, base: type = Base) -> list[str]:
    return complain_of_shapes(ours, (base,), inherited=ALL)


def test_what_fits_is_not_complained_of() -> None:
    assert complain(Fitting) == []
    assert complain_of_shapes(Fitting, (Base,)) == []


@pytest.mark.parametrize(
    ("ours", "complaints"),
    [
        (
            OldSleep,
            [
                "restore_kv_caches: ours wants kv_caches, which nobody gives",
                "supports_sleep_mode: a classmethod, ours is a property",
            ],
        ),
        (
            Renamed,
            [
                "start_load_kv: argument forward_context is not at its place in ours",
                "start_load_kv: ours wants context, which nobody gives",
            ],
        ),
        (Narrow, ["start_load_kv: ours takes no **kwargs"]),
        (Short, ["update_state: argument tokens is not at its place in ours"]),
        (
            Turned,
            [
                "update_state: argument request is not at its place in ours",
                "update_state: argument blocks is not at its place in ours",
            ],
        ),
        (Needy, ["update_state: argument tokens has a default, ours has none"]),
        (Called, ["requires_kv_delivery: a property, ours is a method"]),
        (Bare, ["supports_sleep_mode: a classmethod, ours is a staticmethod"]),
        (Gone, ["wait_for_layer: no hook of vLLM's"]),
    ],
)
def test_a_hook_of_another_shape_is_named(ours: type, complaints: list[str]) -> None:
    assert complain(ours) == complaints


def test_a_constructor_that_vllm_calls_in_another_way_is_named() -> None:
    class Newer(Base):
        def __init__(self, config: object, role: object) -> None: ...

    class Ours(Fitting, Newer):
        def __init__(self, config: object) -> None: ...

    complaints = complain_of_shapes(Ours, (Newer,), inherited=ALL, is_made_by_vllm=True)
    assert complaints == ["__init__: argument role is not at its place in ours"]


def test_a_new_abstract_hook_is_named() -> None:
    class Newer(Base):
        @abstractmethod
        def finish(self) -> None: ...

    class Ours(Newer):
        def start_load_kv(self, forward_context: object, **kwargs: Any) -> None: ...

    assert complain(Ours, Newer) == [
        "finish: abstract, and not ours",
        "finish: a hook that nobody has decided about",
    ]


def test_a_new_hook_with_a_body_is_named() -> None:
    class Newer(Base):
        def finish(self) -> None: ...

    class Ours(Newer):
        def start_load_kv(self, forward_context: object, **kwargs: Any) -> None: ...

    assert complain(Ours, Newer) == ["finish: a hook that nobody has decided about"]


WORKER = """
def wake_up(self):
    get_kv_transfer_group().restore_kv_caches()

def step(self, scheduler):
    if scheduler.connector is not None and scheduler.connector.requires_kv_delivery:
        self.ec_connector.start_load_kv()
        self.connector.start_load_kv(context, reason="step")
    self.connector.update_state(*given)
"""


def test_calls_of_connectors_are_found_and_those_of_others_are_not() -> None:
    assert [(call.name, call.positional, call.named) for call in find_calls(WORKER)] == [
        ("restore_kv_caches", 0, ()),
        ("requires_kv_delivery", -1, ()),
        ("start_load_kv", 1, ("reason",)),
        ("update_state", -1, ()),
    ]


def test_a_call_that_vanished_is_named() -> None:
    expected = {"restore_kv_caches": ["worker.py"], "update_state": ["worker.py", "gone.py"]}
    assert complain_of_calls(Fitting, {"worker.py": WORKER}, expected) == [
        "update_state: gone.py does not call it any more"
    ]
    without = WORKER.replace("get_kv_transfer_group().restore_kv_caches()", "pass")
    assert "restore_kv_caches: worker.py does not call it any more" in complain_of_calls(
        Fitting, {"worker.py": without}, expected
    )


def test_a_call_with_what_ours_does_not_take_is_named() -> None:
    """The call is named whatever parameters the base has."""
    (complaint,) = complain_of_calls(OldSleep, {"worker.py": WORKER}, {})
    assert complaint.startswith("restore_kv_caches: worker.py:3 calls it with what ours does not take")
    assert "kv_caches" in complaint
    (complaint,) = complain_of_calls(OldSleep, {"config.py": "connector_cls.supports_sleep_mode(config)"}, {})
    assert complaint == "supports_sleep_mode: config.py:1 calls it, ours is a property"


LOADER = """
def initialize_model(config):
    if new:
        with context(config):
            model = model_class(config=config)
            note(model)
            return model
    with context(config):
        model = model_class(**kwargs)
        note(model)
    return model
"""


@pytest.mark.parametrize(
    ("source", "complaints"),
    [
        (LOADER, []),
        (
            LOADER.replace("note(model)\n            return", "return"),
            ["initialize_model: 5 makes a model that note does not hear of"],
        ),
        (
            LOADER.replace("        note(model)\n    return", "        note(other)\n    return"),
            ["initialize_model: 9 makes a model that note does not hear of"],
        ),
        (LOADER.replace("model_class", "make"), ["initialize_model: makes no model_class"]),
        ("", ["initialize_model: there is none"]),
    ],
    ids=["noted", "not at all", "another", "made otherwise", "gone"],
)
def test_a_model_that_nobody_notes_is_named(source: str, complaints: list[str]) -> None:
    assert complain_of_notes(source, maker="initialize_model", noted_by="note") == complaints
