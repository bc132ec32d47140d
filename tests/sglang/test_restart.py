"""A shared server outlives its engines, and serves several at once: what one has saved, others find."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.sglang.engine import PAGE, SGLangEngine, build_model, make_prompt
from tests.sglang.shared_records import observed
from tests.vllm.cache_server import SharedServer

pytestmark = pytest.mark.sglang

HIT = 6 * PAGE


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_model("mha", tmp_path_factory.mktemp("restart") / "model")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[SharedServer]:
    with SharedServer(tmp_path) as server:
        server.start()
        yield server


def test_an_engine_that_was_started_again_hits_at_its_first_request(
    model: Path, server: SharedServer, tmp_path: Path
) -> None:
    prompt, settings = make_prompt(21), {"server": str(server.socket)}
    with SGLangEngine(model, tmp_path / "first.log", linker=settings) as engine, observed(server) as observer:
        engine.generate(prompt)
        (own,) = engine.generate(prompt)
        assert own.own == HIT
        observer.await_pages(6)
    # Killed, with whatever it held.
    with SGLangEngine(model, tmp_path / "second.log", linker=settings) as engine:
        (restored,) = engine.generate(prompt)
    assert restored.restored == HIT
    assert restored.answer == own.answer


def test_two_engines_on_one_server_find_what_the_other_has_saved(
    model: Path, server: SharedServer, tmp_path: Path
) -> None:
    settings = {"server": str(server.socket)}
    # Both start at once: their starts are most of what this takes.
    one = SGLangEngine(model, tmp_path / "one.log", linker=settings)
    other = SGLangEngine(model, tmp_path / "other.log", linker=settings)
    with one, other, observed(server) as observer:
        for saves, finds, seed in ((one, other, 22), (other, one, 23)):
            prompt, before = make_prompt(seed), observer.count()
            saves.generate(prompt)
            (own,) = saves.generate(prompt)
            observer.await_pages(before + 6)
            (restored,) = finds.generate(prompt)
            assert (own.own, restored.restored) == (HIT, HIT)
            assert restored.answer == own.answer


def test_a_private_server_comes_with_the_engine(model: Path, tmp_path: Path) -> None:
    with SGLangEngine(model, tmp_path / "log", linker={"memory": "64MiB"}) as engine:
        engine.generate(make_prompt(24))
        (own,) = engine.generate(make_prompt(24))
        engine.flush()
        (restored,) = engine.generate(make_prompt(24))
        assert (own.own, restored.restored) == (HIT, HIT)
        assert restored.answer == own.answer
