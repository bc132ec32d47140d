"""An engine of two ranks: each has its own records under the same keys, and both bring the same pages."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.sglang.engine import PAGE, SGLangEngine, build_model, make_prompt
from tests.sglang.shared_records import observed, zero_records, zeroed
from tests.vllm.cache_server import SharedServer

pytestmark = pytest.mark.sglang

HIT = 6 * PAGE


def test_two_ranks_restore_what_each_has_saved(tmp_path: Path) -> None:
    model = build_model("mha", tmp_path / "model")
    with SharedServer(tmp_path) as server:
        server.start()
        settings = {"server": str(server.socket)}
        with (
            SGLangEngine(model, tmp_path / "log", linker=settings, tp_size=2) as engine,
            observed(server) as observer,
        ):
            (cold,) = engine.generate(make_prompt(31))
            (own,) = engine.generate(make_prompt(31))
            assert (cold.own, own.own) == (0, HIT)
            observer.await_pages(2 * 6)
            engine.flush()
            (restored,) = engine.generate(make_prompt(31))
            assert restored.restored == HIT
            assert restored.answer == own.answer
            engine.flush()
            with zeroed(server):
                (spoiled,) = engine.generate(make_prompt(31))
            assert spoiled.answer != own.answer


def test_a_load_that_fails_on_a_rank_ends_its_request_alone(tmp_path: Path) -> None:
    """Ranks agree only after the forward: the request ends with an error, and is right when it is sent again."""
    model = build_model("mha", tmp_path / "model")
    with SharedServer(tmp_path) as server:
        server.start()
        settings = {"server": str(server.socket), "verify": "always"}
        with (
            SGLangEngine(model, tmp_path / "log", linker=settings, tp_size=2) as engine,
            observed(server) as observer,
        ):
            engine.generate(make_prompt(32))
            (own,) = engine.generate(make_prompt(32))
            observer.await_pages(2 * 6)
            engine.flush()
            zero_records(server)
            failed = engine.ask({"do": "generate", "prompts": [make_prompt(32)], "salt": None, "new_tokens": 4})
            assert "load failed" in str(failed)
            (retried,) = engine.generate(make_prompt(32))
            assert (retried.own, retried.restored) == (0, 0)
            assert retried.answer.tokens == own.answer.tokens


def test_behind_hicache_two_ranks_restore_latents_that_the_first_has_backed_up(tmp_path: Path) -> None:
    """Each has weights of its own, and both have the same latents."""
    model = build_model("mla", tmp_path / "model")
    with SharedServer(tmp_path) as server:
        server.start()
        settings = {"server": str(server.socket)}
        with (
            SGLangEngine(model, tmp_path / "log", storage=settings, tp_size=2) as engine,
            observed(server) as observer,
        ):
            engine.generate(make_prompt(33))
            (own,) = engine.generate(make_prompt(33))
            observer.await_pages(6)
            engine.flush()
            (restored,) = engine.generate(make_prompt(33))
            assert (restored.own, restored.restored) == (0, HIT)
            assert restored.answer == own.answer
