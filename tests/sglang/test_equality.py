"""Restored KV equals the KV of the engine's own cache, bit for bit.

The oracle is the engine's own prefix hit of the same prompt: the same tokens are computed in the same shapes. The
control is zeros in every record, which change the answer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.sglang.engine import PAGE, SGLangEngine, Told, build_model, make_prompt
from tests.sglang.planned import plan_records, registered_records
from tests.sglang.shared_records import Observer, observed, zeroed
from tests.sglang.tiny_models import EMBEDDING, change_token
from tests.vllm.cache_server import SharedServer

pytestmark = pytest.mark.sglang

PROMPT_PAGES = 6
"""Whole pages of a prompt of 100 tokens; the last token has to be computed."""


@dataclass(frozen=True)
class Served:
    """An engine on a server, and an observer of it."""

    engine: SGLangEngine
    server: SharedServer
    observer: Observer
    kind: str
    model: Path

    def save(self, prompt: list[int], *, salt: str | None = None) -> Told:
        """The answer by the engine's own hit; afterwards its cache is empty, and ours has the prompt."""
        before = self.observer.count()
        cold = self.ask(prompt, salt=salt)
        assert (cold.own, cold.restored) == (0, 0)
        own = self.ask(prompt, salt=salt)
        assert (own.own, own.restored) == (PROMPT_PAGES * PAGE, 0)
        self.observer.await_pages(before + PROMPT_PAGES)
        self.engine.flush()
        return own

    def ask(self, prompt: list[int], *, salt: str | None = None) -> Told:
        (told,) = self.engine.generate(prompt, salt=salt)
        return told


@pytest.fixture(scope="module", params=["mha", "mla"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp(request.param)
    model = build_model(request.param, folder / "model")
    with SharedServer(folder) as server:
        server.start()
        settings = {"server": str(server.socket)}
        with SGLangEngine(model, folder / "log", linker=settings) as engine, observed(server) as observer:
            yield Served(engine, server, observer, request.param, model)


def test_a_restored_prompt_equals_the_engines_own_hit_bit_for_bit(served: Served) -> None:
    own = served.save(make_prompt(1))
    restored = served.ask(make_prompt(1))
    assert (restored.own, restored.restored) == (0, PROMPT_PAGES * PAGE)
    assert restored.answer == own.answer


def test_its_records_have_the_size_that_was_planned(served: Served) -> None:
    assert registered_records(served.observer) == plan_records(served.model, page_tokens=PAGE)


def test_zeros_in_the_records_change_the_answer(served: Served) -> None:
    own = served.save(make_prompt(2))
    with zeroed(served.server):
        spoiled = served.ask(make_prompt(2))
    assert spoiled.restored == PROMPT_PAGES * PAGE
    assert spoiled.answer != own.answer
    served.engine.flush()
    assert served.ask(make_prompt(2)).answer == own.answer


def test_prompts_of_one_batch_are_restored_each(served: Served) -> None:
    prompts = [make_prompt(seed, 300 + 40 * seed) for seed in (3, 4, 5)]
    served.engine.generate(*prompts)
    own = served.engine.generate(*prompts)
    served.engine.flush()
    restored = served.engine.generate(*prompts)
    assert [one.restored for one in restored] == [one.own for one in own] == [416, 448, 496]
    assert [one.answer for one in restored] == [one.answer for one in own]


def test_a_salt_keeps_prompts_apart(served: Served) -> None:
    own = served.save(make_prompt(6), salt="one")
    assert served.ask(make_prompt(6), salt="two").restored == 0
    restored = served.ask(make_prompt(6), salt="one")
    assert (restored.restored, restored.answer) == (PROMPT_PAGES * PAGE, own.answer)


def test_what_was_restored_is_not_saved_again(served: Served) -> None:
    served.save(make_prompt(7))
    before = served.observer.count()
    assert served.ask(make_prompt(7)).restored == PROMPT_PAGES * PAGE
    served.ask(make_prompt(7))
    assert served.observer.count() == before


def test_other_weights_find_nothing_and_the_same_ones_all(served: Served, tmp_path: Path) -> None:
    """The engine empties its cache after an update, and says no more than that."""
    own = served.save(make_prompt(8))
    served.engine.update_weights(build_model(served.kind, tmp_path / "other", seed=7))
    other = served.ask(make_prompt(8))
    assert other.restored == 0
    assert other.answer != own.answer
    served.engine.update_weights(served.model)
    restored = served.ask(make_prompt(8))
    assert (restored.restored, restored.answer) == (PROMPT_PAGES * PAGE, own.answer)


def test_an_update_of_one_row_finds_nothing_of_before(served: Served, tmp_path: Path) -> None:
    prompt = make_prompt(9)
    own = served.save(prompt)
    changed = change_token(served.model, tmp_path / "changed", prompt[20])
    served.engine.update_weights(changed)
    other = served.ask(prompt)
    assert (other.own, other.restored) == (0, 0)
    assert other.answer != own.answer
    other = served.ask(prompt)
    assert (other.own, other.restored) == (PROMPT_PAGES * PAGE, 0)
    served.engine.update_weights(served.model)
    assert served.ask(prompt).restored == PROMPT_PAGES * PAGE
    # It stays in the engine's own cache, as it was told; ours neither finds nor saves anything until that is empty.
    served.engine.update_parameter(changed, EMBEDDING, flushes=False)
    before = served.observer.count()
    assert served.ask([*prompt[:64], *make_prompt(10)]).restored == 0
    assert served.observer.count() == before
    served.engine.flush()
    restored = served.ask(prompt)
    assert (restored.restored, restored.answer) == (PROMPT_PAGES * PAGE, other.answer)
    served.engine.update_weights(served.model)
