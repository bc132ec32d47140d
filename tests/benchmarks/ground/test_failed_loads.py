"""Why no load is inside a step: what vLLM does where one fails. If it is mended there, these tests fail by name."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import RequestStatus

from benchmarks.ground.engine import VirtualEngine
from benchmarks.ground.engine_config import EngineSettings
from benchmarks.ground.models import GPT_OSS_120B, LLAMA_8B
from benchmarks.ground.trial import open_ideal
from benchmarks.ground.work import Ask, make_tokens

pytestmark = pytest.mark.vllm

SAVED_TOKENS = 512


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def begin_hit(engine: VirtualEngine) -> None:
    """A request comes, "hit", whose first tokens were saved."""
    prefix = make_tokens(1, SAVED_TOKENS)
    engine.serve([Ask("saved", [*prefix, 1], [1])])
    assert engine.forget()
    engine.machine.clock.pass_time(1.0)  # until all is saved
    engine.arrive(Ask("hit", prefix + make_tokens(2, 20), [1] * 9), engine.machine.clock.now_s)


def make_output(token: int, failed: Iterable[int] = ()) -> ModelRunnerOutput:
    return ModelRunnerOutput(
        ["hit"],
        {"hit": 0},
        sampled_token_ids=[[token]],
        kv_connector_output=KVConnectorOutput(invalid_block_ids=set(failed)),
    )


def end(engine: VirtualEngine) -> None:
    engine.scheduler.finish_requests("hit", RequestStatus.FINISHED_ABORTED)


def test_a_token_that_followed_on_lost_bytes_is_told() -> None:
    with open_ideal(LLAMA_8B, EngineSettings(is_async=True), in_step=True) as engine:
        begin_hit(engine)
        scheduler = engine.scheduler
        first = scheduler.schedule()
        assert first.has_sync_kv_loads
        assert first.num_scheduled_tokens == {"hit": 20}
        loaded = scheduler.kv_cache_manager.get_block_ids("hit")[0][: SAVED_TOKENS // 16]
        second = scheduler.schedule()
        assert not scheduler.update_from_output(first, make_output(100, loaded)).get(0)
        told = scheduler.update_from_output(second, make_output(101))[0].outputs
        assert [one.new_token_ids for one in told] == [[101]]
        end(engine)


def test_an_engine_with_several_groups_ends() -> None:
    with open_ideal(GPT_OSS_120B, EngineSettings(is_async=False), in_step=True) as engine:
        begin_hit(engine)
        first = engine.scheduler.schedule()
        assert first.has_sync_kv_loads
        loaded = engine.scheduler.kv_cache_manager.get_block_ids("hit")[0][:1]
        with pytest.raises(RuntimeError, match="multiple KV cache groups"):
            engine.scheduler.update_from_output(first, make_output(100, loaded))
        end(engine)
