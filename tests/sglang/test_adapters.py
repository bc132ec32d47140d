"""Pages of a LoRA adapter are found under what it holds: a name and a path may stand for other weights tomorrow."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.sglang.engine import PAGE, SGLangEngine, build_model, make_prompt
from tests.sglang.shared_records import observed
from tests.vllm.cache_server import SharedServer

pytestmark = pytest.mark.sglang

HIT = 6 * PAGE


def test_an_adapters_pages_are_its_contents(tmp_path: Path) -> None:
    model = build_model("mha", tmp_path / "model")
    build_model("adapter", tmp_path / "one", seed=3)
    build_model("adapter", tmp_path / "two", seed=4)
    prompt = make_prompt(91)
    with SharedServer(tmp_path) as server:
        server.start()

        def start(log: str) -> SGLangEngine:
            return SGLangEngine(
                model,
                tmp_path / log,
                linker={"server": str(server.socket)},
                lora_paths={"one": str(tmp_path / "one"), "two": str(tmp_path / "two")},
                lora_backend="torch_native",
                max_loras_per_batch=2,
            )

        with start("first.log") as engine:
            own = {}
            for adapter in ("", "one", "two"):
                (cold,) = engine.generate(prompt, adapter=adapter)
                (own[adapter],) = engine.generate(prompt, adapter=adapter)
                assert (cold.own, own[adapter].own) == (0, HIT)
            assert len({told.answer for told in own.values()}) == 3
            engine.flush()
            for adapter, told in own.items():
                (restored,) = engine.generate(prompt, adapter=adapter)
                assert (restored.restored, restored.answer) == (HIT, told.answer), adapter
        with observed(server) as observer:
            assert observer.count() > 0
        build_model("adapter", tmp_path / "one", seed=5)
        with start("second.log") as engine:
            (other,) = engine.generate(prompt, adapter="one")
            assert other.restored == 0
            assert other.answer != own["one"].answer
