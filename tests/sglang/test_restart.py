"""A shared server outlives its engines, and serves several at once: what one has saved, others find."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.sglang.engine import PAGE, SGLangEngine, build_model, make_prompt
from tests.sglang.shared_records import Observer, observed
from tests.vllm.cache_server import SharedServer

pytestmark = pytest.mark.sglang

HIT = 6 * PAGE


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_model("mha", tmp_path_factory.mktemp("restart") / "model")


@dataclass(frozen=True)
class Pair:
    one: SGLangEngine
    other: SGLangEngine
    server: SharedServer
    observer: Observer


@pytest.fixture(scope="module")
def pair(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("pair")
    with SharedServer(folder) as server:
        server.start()
        settings = {"server": str(server.socket)}
        # Both start at once: their starts are most of what this takes.
        one = SGLangEngine(model, folder / "one.log", linker=settings)
        other = SGLangEngine(model, folder / "other.log", linker=settings)
        with one, other, observed(server) as observer:
            yield Pair(one, other, server, observer)


def test_two_engines_on_one_server_find_what_the_other_has_saved(pair: Pair) -> None:
    for saves, finds, seed in ((pair.one, pair.other, 22), (pair.other, pair.one, 23)):
        prompt, before = make_prompt(seed), pair.observer.count()
        saves.generate(prompt)
        (own,) = saves.generate(prompt)
        pair.observer.await_pages(before + 6)
        (restored,) = finds.generate(prompt)
        assert (own.own, restored.restored) == (HIT, HIT)
        assert restored.answer == own.answer


def test_an_engine_that_was_started_again_hits_at_its_first_request(pair: Pair, model: Path, tmp_path: Path) -> None:
    prompt, before = make_prompt(21), pair.observer.count()
    pair.one.generate(prompt)
    (own,) = pair.one.generate(prompt)
    assert own.own == HIT
    pair.observer.await_pages(before + 6)
    # Killed, with whatever it held.
    pair.one.close()
    with SGLangEngine(model, tmp_path / "again.log", linker={"server": str(pair.server.socket)}) as engine:
        (restored,) = engine.generate(prompt)
    assert restored.restored == HIT
    assert restored.answer == own.answer


def test_a_private_server_comes_with_the_engine(model: Path, tmp_path: Path) -> None:
    with SGLangEngine(model, tmp_path / "log", linker={"memory": "64MiB"}) as engine:
        engine.generate(make_prompt(24))
        (own,) = engine.generate(make_prompt(24))
        engine.flush()
        (restored,) = engine.generate(make_prompt(24))
        assert (own.own, restored.restored) == (HIT, HIT)
        assert restored.answer == own.answer
