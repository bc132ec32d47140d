"""The class that vLLM constructs: what the engine is told, and what it asks of a worker."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tests.kit.connector.workers_of_facades import (
    CONTEXT,
    load_plan,
    make_worker,
    open_worker,
    run_step,
    run_until_loaded,
    run_until_saved,
    save_job,
    warm_engine,
)

pytest.importorskip("vllm", reason="vLLM is not installed")

import numpy as np
import torch
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.v1.attention.backends.triton_attn import TritonAttentionImpl

from kvoffload.connector.common.step_plan import StepPlan, WantedDigests, WorkerReport
from kvoffload.connector.facade import KVOffloadConnector
from kvoffload.connector.start_up import EngineStart
from kvoffload.errors import BlockAlignmentError, ConfigError, UnsupportedError
from tests.kit.connector.engine_configs import (
    full,
    make_config,
    make_tensors,
    make_vllm_config,
    per_token_head,
    recurrent,
    window,
)
from tests.kit.connector.scripted import ScriptedEngine
from tests.kit.connector.workers import Move, name_of

# ---- what the engine is told ----


def test_vllm_can_load_it_for_hybrid_models() -> None:
    assert issubclass(KVOffloadConnector, SupportsHMA)
    config = make_vllm_config()
    config.kv_transfer_config.kv_connector_module_path = "kvoffload.connector.facade"
    assert KVConnectorFactory.get_connector_class(config.kv_transfer_config) is KVOffloadConnector


def test_saves_are_best_effort_and_loads_are_asynchronous() -> None:
    engine = warm_engine()
    assert engine.connector.requires_kv_delivery is False
    assert not KVOffloadConnector.requires_piecewise_for_cudagraph({})
    assert engine.connector.get_num_new_matched_tokens(engine.arrive("b", range(30)), 0) == (28, True)


@pytest.mark.parametrize("state", ["never scheduled", "running with saves", "loading"])
def test_the_end_of_a_request_never_delays_its_blocks(state: str) -> None:
    engine = warm_engine()
    request = engine.arrive("b", range(30) if state == "loading" else range(100, 130))
    if state != "never scheduled":
        engine.admit(request)
        engine.step()
    assert engine.connector.request_finished_all_groups(request, ([],)) == (False, None)
    assert engine.connector.request_finished(request, []) == (False, None)  # and once more is no fault
    assert engine.connector.faults == {}


def test_an_idle_engine_is_kept_stepping_until_every_answer_has_come() -> None:
    engine = warm_engine()
    assert not engine.connector.has_pending_push_work()
    engine.admit(engine.arrive("b", range(30)))
    assert engine.connector.has_pending_push_work()
    assert not engine.connector.has_pending_block_frees()  # a load frees nothing
    engine.report(engine.step())
    assert not engine.connector.has_pending_push_work()


def test_only_settings_that_exist_are_taken() -> None:
    config = make_config((["a"], full()))
    with pytest.raises(ConfigError, match="memroy"):
        KVOffloadConnector(make_vllm_config(extra={"memroy": "1GiB"}), KVConnectorRole.WORKER, config)


# ---- the worker ----


def test_a_plan_is_submitted_once_whichever_hooks_are_called() -> None:
    connector, _, shared = make_worker()
    plan = StepPlan(saves=(save_job(shared, Move(0, 1, 0)),))
    assert run_until_saved(connector, plan).saved == {1: 1}
    assert run_step(connector, StepPlan()).kv_connector_worker_meta is None
    output = run_until_loaded(connector, load_plan(shared, Move(0, 2, 0)))
    assert output.finished_recving == {"a"}
    assert not output.failed_recving
    assert not output.finished_sending
    assert not output.invalid_block_ids
    connector.shutdown()


def test_saves_wait_for_the_draft_models_forward() -> None:
    """If it decodes speculatively, vLLM asks for results first and calls `wait_for_save` after the draft model has
    run."""
    connector, tensors, shared = make_worker()
    connector.bind_connector_metadata(StepPlan(saves=(save_job(shared, Move(0, 1, 0)),)))
    connector.start_load_kv(CONTEXT)
    connector.get_transfer_results(set())
    tensors["a"].fill_(5)  # what the draft model writes
    connector.wait_for_save()
    connector.clear_connector_metadata()
    assert run_until_saved(connector, StepPlan()).saved == {1: 1}
    tensors["a"].fill_(0)
    run_until_loaded(connector, load_plan(shared, Move(0, 1, 0)))
    assert (tensors["a"][1] == 5).all()
    connector.shutdown()


def test_what_a_step_did_not_come_to_goes_with_the_next() -> None:
    connector, _, shared = make_worker()
    connector.bind_connector_metadata(StepPlan(saves=(save_job(shared, Move(0, 1, 0)),), doomed=("a",)))
    output = run_until_loaded(connector, StepPlan())
    assert (output.finished_recving, output.failed_recving) == ({"a"}, {"a"})
    connector.shutdown()


def test_a_failed_load_is_reported_by_its_request_and_never_by_blocks() -> None:
    connector, _, shared = make_worker()
    output = run_until_loaded(connector, load_plan(shared, Move(0, 0, 0)))
    assert (output.finished_recving, output.failed_recving) == ({"a"}, {"a"})
    assert connector.get_block_ids_with_load_errors() == set()
    connector.shutdown()


def test_the_number_of_a_step_comes_back_with_its_end_and_no_other() -> None:
    connector, _, _ = make_worker()
    reports = [run_step(connector, StepPlan(step=step)).kv_connector_worker_meta for step in (3, 0, 4)]
    assert reports == [WorkerReport(step=3), None, WorkerReport(step=4)]
    connector.shutdown()


def test_where_a_rank_may_copy_is_told_even_if_nothing_has_ended() -> None:
    connector, _, shared = make_worker()
    first = shared.place
    shared.client.serve_anew()
    output = run_step(connector, StepPlan())
    assert output.kv_connector_worker_meta == WorkerReport(places={0: (first, shared.place)})
    assert run_step(connector, StepPlan(retired=(first.memory_id,))).kv_connector_worker_meta == WorkerReport(
        places={0: (shared.place,)}
    )
    connector.shutdown()
    assert shared.opened[0].is_closed


def test_a_fault_while_collecting_results_is_an_empty_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    connector, _, _ = make_worker()
    with monkeypatch.context() as patch:
        patch.setattr(connector.worker_side, "take_results", lambda **named: {}[0])
        assert connector.get_transfer_results(set()) == KVConnectorTransferResults()
    assert connector.faults == {"get_transfer_results": 1}
    connector.shutdown()


def test_a_load_that_brings_digests_is_checked() -> None:
    connector, _, shared = make_worker()
    report = run_until_saved(connector, StepPlan(saves=(save_job(shared, Move(0, 1, 0)),)))
    shared.keep_digests((Move(0, 1, 0),), report.digests[1][0], shard=0)
    wanted = WantedDigests(name_of(0), np.array([[shared.digests[0, 0]]], np.uint64))
    assert not run_until_loaded(connector, load_plan(shared, Move(0, 2, 0), wanted=wanted)).failed_recving
    shared.record(Move(0, 1, 0))[0] ^= 1
    assert run_until_loaded(connector, load_plan(shared, Move(0, 2, 0), wanted=wanted)).failed_recving == {"a"}
    connector.shutdown()


def test_each_registration_is_measured() -> None:
    connector, tensors, _ = make_worker()
    connector.register_kv_caches(tensors)
    stats = connector.get_kv_connector_stats()
    assert stats is not None
    ((counts, _),) = stats.data["kvoffload_registration_seconds"].values()
    assert sum(counts) == 2
    connector.shutdown()


def test_an_engine_that_makes_its_cache_anew_registers_again() -> None:
    connector, _, _ = make_worker()
    before = connector.get_handshake_metadata()
    connector.register_kv_caches(make_tensors(make_config((["a"], full(4)), num_blocks=8)))
    assert connector.get_handshake_metadata() == before
    connector.shutdown()


def test_a_workers_private_server_begins_to_start_with_its_connector(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[EngineStart] = []

    def begin(start: EngineStart) -> None:
        begun.append(start)

    monkeypatch.setattr(EngineStart, "begin_for_worker", begin)
    open_worker(make_vllm_config(), make_config((["a"], full(4))))
    assert len(begun) == 1
    KVOffloadConnector(make_vllm_config(), KVConnectorRole.SCHEDULER, make_config((["a"], full(4))))
    assert len(begun) == 1


def test_blocks_that_are_no_whole_hash_blocks_are_refused_at_registration() -> None:
    config = make_config((["r"], recurrent(4)), (["a"], full(4)))
    config.hash_block_size = 3
    connector = KVOffloadConnector(make_vllm_config(), KVConnectorRole.WORKER, config)
    with pytest.raises(BlockAlignmentError, match=r"block size 4 .* hash block size 3.*--enable-prefix-caching"):
        connector.register_kv_caches(make_tensors(config))


def test_layers_that_share_scaled_pages_cannot_wipe_restored_scales() -> None:
    """Each layer makes views of its own at its first forward, the sharing ones over their owner's pages."""

    class Impl:
        _k_scale_cache: torch.Tensor | None = None
        _v_scale_cache: torch.Tensor | None = None
        _ensure_scale_caches = TritonAttentionImpl._ensure_scale_caches  # private: what each first forward runs

        def run_first(self, pages: torch.Tensor) -> None:
            self._ensure_scale_caches(pages)

    layers = {
        "a": SimpleNamespace(impl=Impl()),
        "late": SimpleNamespace(impl=Impl(), kv_sharing_target_layer_name="a"),
    }
    config = make_config((["a"], per_token_head()), num_blocks=4)
    tensors = make_tensors(config)
    tensors["late"] = tensors["a"]
    connector, _ = open_worker(make_vllm_config(layers=layers), config)
    connector.register_kv_caches(tensors)
    tensors["a"].fill_(3)  # a restored cache
    for layer in layers.values():
        layer.impl.run_first(tensors["a"])
    assert (tensors["a"] == 3).all()
    connector.shutdown()


def test_both_sides_agree_over_the_handshake() -> None:
    groups = ((["r"], recurrent()), (["a"], full()), (["c"], window()))
    config = make_config(*groups, num_blocks=8)
    worker, _ = open_worker(make_vllm_config(), config)
    worker.register_kv_caches(make_tensors(config))
    facts = worker.get_handshake_metadata()
    assert facts is not None
    engine = ScriptedEngine(*groups)
    engine.connector.set_xfer_handshake_metadata_pp_aware({(0, 0): facts})
    assert [group.index for group in engine.parts.groups.facts] == [0, 1, 2]
    worker.shutdown()


def test_beside_a_connector_whose_ranks_speak_first_it_says_who_must_be_first() -> None:
    class Others(KVConnectorHandshakeMetadata):
        pass

    engine = warm_engine()
    with pytest.raises(UnsupportedError, match="another connector") as caught:
        engine.connector.set_xfer_handshake_metadata_pp_aware({(0, 0): Others()})
    assert "first among MultiConnector's connectors" in str(caught.value)
