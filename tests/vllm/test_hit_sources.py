"""vLLM's own metrics tell a hit in memory from one on disk, and the receipt and vLLM's answer agree with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.vllm import connector_probe as probe
from tests.vllm.disk_servers import await_written, disk_server
from tests.vllm.engine import Engine, EnginePool, make_prompt
from tests.vllm.equality import restorable
from tests.vllm.pool_probe import unhurried
from tests.vllm.restarted import start
from tests.vllm.tiny_models import DENSE, SLIDING, TinyModel

pytestmark = pytest.mark.vllm

LENGTH = 1000


def read_sources(engine: Engine) -> dict[str, int]:
    """Returns how many cached tokens came from each source so far, as vLLM counts them."""
    name = "vllm:prompt_tokens_cached_by_source"
    counted: list[Any] = [metric for metric in engine.llm.get_metrics() if metric.name == name]
    return {metric.labels["source"]: int(metric.value) for metric in counted if metric.value}


def ask(engine: Engine, prompt: list[int]) -> tuple[int, dict[str, int], dict[str, Any]]:
    """Returns the answer's cached tokens, by how much vLLM's counts have grown, and the request's receipt."""
    before = read_sources(engine)
    answer = engine.generate(prompt, receipt=True)
    engine.drain()
    grown = {name: count - before.get(name, 0) for name, count in read_sources(engine).items()}
    assert answer.num_cached_tokens is not None
    assert answer.kv_transfer_params is not None
    sources = {name: count for name, count in grown.items() if count}
    return answer.num_cached_tokens, sources, answer.kv_transfer_params["kvoffload_receipt"]


@pytest.mark.parametrize("model", [DENSE, SLIDING], ids=lambda model: model.name)
def test_a_hit_in_memory_and_one_on_disk_are_told_apart(engines: EnginePool, tmp_path: Path, model: TinyModel) -> None:
    pytest.importorskip("vllm.v1.metrics.cache_hit_source", reason="vLLM 0.31 does not count by source")
    engines.leave_process()
    (tmp_path / "disk").mkdir(mode=0o700)
    prompt, there = make_prompt(seed=71, length=LENGTH), restorable(model, LENGTH)
    with disk_server(tmp_path) as server:
        engine = start(engines, server, model, promote_deadline="30s", disable_log_stats=False)
        try:
            cached, sources, receipt = ask(engine, prompt)
            assert (cached, sources) == (0, {})
            assert receipt == {"tokens": {"engine": 0, "computed": LENGTH}, "saved_s": 0.0, "loaded_bytes": 0}
            await_written(engine)

            engine.reset_local()
            cached, sources, receipt = ask(engine, prompt)
            assert (cached, sources) == (there, {"host": there})
            assert receipt["tokens"] == {"engine": 0, "computed": LENGTH - there, "memory": there}
            loaded_bytes = receipt["loaded_bytes"]
            assert loaded_bytes > 0

            engine.reset_local()
            client: Any = probe.scheduler_connector(engine).scheduler_side.parts.cache  # type: ignore[union-attr]
            with unhurried(client):
                assert client.clear() > 0, "memory is empty, and the disk is not"
            cached, sources, receipt = ask(engine, prompt)
            assert (cached, sources) == (there, {"disk": there})
            assert receipt["tokens"] == {"engine": 0, "computed": LENGTH - there, "disk": there}
            assert receipt["loaded_bytes"] == loaded_bytes

            engine.reset_local()
            with unhurried(client):
                assert client.clear() > 0
            ask(engine, prompt[: LENGTH // 2])
            engine.reset_local()
            in_memory = restorable(model, LENGTH // 2)
            cached, sources, receipt = ask(engine, prompt)
            assert (cached, sources) == (there, {"host": in_memory, "disk": there - in_memory})

            cached, sources, receipt = ask(engine, prompt)
            assert (cached, sources) == (there, {"device": there})
            assert receipt["tokens"] == {"engine": there, "computed": LENGTH - there}
            assert probe.faults(engine) == {}
        finally:
            engine.close()
