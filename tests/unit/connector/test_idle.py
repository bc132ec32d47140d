"""An engine of which nothing can be kept starts, is told why once, and runs as it would without a connector."""

from __future__ import annotations

from inspect import getmembers, isfunction
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole, KVConnectorTransferResults

from kvoffload.connector.facade import KVOffloadConnector
from kvoffload.connector.idle import IdleConnector
from tests.kit.connector.engine_configs import full, make_config, make_tensors, make_vllm_config

SCHEDULER, WORKER = KVConnectorRole.SCHEDULER, KVConnectorRole.WORKER


def make_connector(role: KVConnectorRole) -> Any:
    config = make_vllm_config()
    config.parallel_config.prefill_context_parallel_size = 2
    return KVOffloadConnector(config, role, make_config((["a"], full())))


def test_both_roles_are_idle_and_one_line_says_why(caplog: pytest.LogCaptureFixture) -> None:
    assert all(type(make_connector(role)) is IdleConnector for role in (SCHEDULER, WORKER))
    (line,) = [record.message for record in caplog.records if record.name.startswith("kvoffload")]
    assert line == (
        "kvoffload keeps nothing of this engine's cache, and the engine runs without it: it does not serve prefill "
        "context parallel engines yet; use tensor or decode context parallelism"
    )


def test_an_engine_that_can_be_served_has_the_real_connector() -> None:
    config = make_config((["a"], full()))
    assert type(KVOffloadConnector(make_vllm_config(), SCHEDULER, config)) is KVOffloadConnector


def test_every_hook_of_the_real_connector_is_answered_with_nothing() -> None:
    scheduler, worker = make_connector(SCHEDULER), make_connector(WORKER)
    request = SimpleNamespace(request_id="r")
    assert not scheduler.requires_kv_delivery
    assert scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
    scheduler.on_new_request(request)
    scheduler.update_state_after_alloc(request, None, 0)
    plan = scheduler.build_connector_meta(None)
    worker.register_kv_caches(make_tensors(make_config((["a"], full()))))
    assert worker.get_handshake_metadata() is None
    worker.bind_connector_metadata(plan)
    worker.start_load_kv(None)
    worker.wait_for_layer_load("a")
    worker.save_kv_layer("a", None, None)
    worker.wait_for_save()
    worker.unregister_kv_caches()
    worker.restore_kv_caches()
    assert worker.get_transfer_results(set()) == KVConnectorTransferResults(
        finished_sending=set(), finished_recving=set(), failed_recving=set()
    )
    assert worker.build_connector_worker_meta() is None
    scheduler.update_connector_output(None)
    assert scheduler.request_finished_all_groups(request, ([1],)) == (False, None)
    assert not scheduler.has_pending_push_work()
    assert scheduler.reset_cache() is not False
    assert list(scheduler.take_events()) == []
    for connector in (scheduler, worker):
        connector.shutdown()


def test_it_has_each_method_that_vllm_calls_on_the_real_connector() -> None:
    public = {name for name, _ in getmembers(KVOffloadConnector, isfunction) if not name.startswith("_")}
    assert {name for name in public if not hasattr(IdleConnector, name)} == {"note_fault"}
