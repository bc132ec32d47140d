"""An engine with the linker and one with HiCache, of the same model: what one has saved the other restores."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.sglang.engine import PAGE, SGLangEngine, build_model, make_prompt
from tests.sglang.shared_records import Observer, observed, zeroed
from tests.sglang.tiny_models import EMBEDDING, change_token
from tests.vllm.cache_server import SharedServer

pytestmark = pytest.mark.sglang

PAGES = 6
HIT = PAGES * PAGE


@dataclass(frozen=True)
class Doors:
    linker: SGLangEngine
    hicache: SGLangEngine
    server: SharedServer
    observer: Observer
    model: Path


@pytest.fixture(scope="module")
def doors(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Doors]:
    folder = tmp_path_factory.mktemp("doors")
    model = build_model("mha", folder / "model")
    with SharedServer(folder) as server:
        server.start()
        settings = {"server": str(server.socket)}
        # Both start at once: their starts are most of what this takes.
        linker = SGLangEngine(model, folder / "linker.log", linker=settings)
        hicache = SGLangEngine(model, folder / "hicache.log", storage=settings)
        with linker, hicache, observed(server) as observer:
            yield Doors(linker, hicache, server, observer, model)


def test_what_the_linker_saved_hicache_restores(doors: Doors) -> None:
    prompt, before = make_prompt(91), doors.observer.count()
    doors.linker.generate(prompt)
    (own,) = doors.linker.generate(prompt)
    doors.observer.await_pages(before + PAGES)
    (restored,) = doors.hicache.generate(prompt)
    assert (restored.own, restored.restored) == (0, HIT)
    assert restored.answer == own.answer
    assert doors.observer.count() == before + PAGES


def test_what_hicache_backed_up_the_linker_restores(doors: Doors) -> None:
    prompt, before = make_prompt(92), doors.observer.count()
    doors.hicache.generate(prompt)
    (own,) = doors.hicache.generate(prompt)
    assert own.own == HIT
    doors.observer.await_pages(before + PAGES)
    (restored,) = doors.linker.generate(prompt)
    assert (restored.own, restored.restored) == (0, HIT)
    assert restored.answer == own.answer


def test_zeros_in_the_records_change_the_answer_of_hicache(doors: Doors) -> None:
    prompt, before = make_prompt(93), doors.observer.count()
    doors.hicache.generate(prompt)
    (own,) = doors.hicache.generate(prompt)
    doors.observer.await_pages(before + PAGES)
    doors.hicache.flush()
    with zeroed(doors.server):
        (spoiled,) = doors.hicache.generate(prompt)
    assert spoiled.restored == HIT
    assert spoiled.answer != own.answer
    doors.hicache.flush()
    (restored,) = doors.hicache.generate(prompt)
    assert (restored.restored, restored.answer) == (HIT, own.answer)


def test_after_an_update_of_one_row_hicache_restores_pages_of_the_new_weights_alone(
    doors: Doors, tmp_path: Path
) -> None:
    """SGLang tells a storage neither of the update nor that its caches are empty."""
    prompt, before = make_prompt(94), doors.observer.count()
    doors.hicache.generate(prompt)
    (own,) = doors.hicache.generate(prompt)
    doors.observer.await_pages(before + PAGES)
    changed = change_token(doors.model, tmp_path / "changed", prompt[20])
    doors.hicache.update_weights(changed)
    (other,) = doors.hicache.generate(prompt)
    assert (other.own, other.restored) == (0, 0)
    assert other.answer != own.answer
    (own,) = doors.hicache.generate(prompt)
    doors.observer.await_pages(before + 2 * PAGES)
    doors.hicache.flush()
    (restored,) = doors.hicache.generate(prompt)
    assert (restored.own, restored.restored, restored.answer) == (0, HIT, own.answer)


def test_until_a_flush_hicache_neither_saves_nor_restores_after_an_update(doors: Doors, tmp_path: Path) -> None:
    other = change_token(doors.model, tmp_path / "other", 30)
    doors.hicache.update_parameter(other, EMBEDDING, flushes=False)
    before = doors.observer.count()
    doors.hicache.generate(make_prompt(95))
    assert "was not flushed" in doors.hicache.read_log()
    doors.hicache.flush()
    assert doors.observer.count() == before
    doors.hicache.generate(make_prompt(95))
    doors.observer.await_pages(before + PAGES)
