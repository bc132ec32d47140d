"""The second door: SGLang keeps its own host cache (HiCache), and our server is what lies behind it.

The oracle and the control are those of the linker: the engine's own hit, bit for bit, and zeros in every record.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.sglang.engine import PAGE, SGLangEngine, Told, build_model, make_prompt
from tests.sglang.shared_records import Observer, observed, zeroed
from tests.vllm.cache_server import SharedServer

pytestmark = pytest.mark.sglang

PAGES = 6
HIT = PAGES * PAGE


@dataclass(frozen=True)
class Stored:
    engine: SGLangEngine
    server: SharedServer
    observer: Observer
    model: Path

    def ask(self, prompt: list[int], *, salt: str | None = None) -> Told:
        (told,) = self.engine.generate(prompt, salt=salt)
        return told

    def save(self, prompt: list[int], *, salt: str | None = None) -> tuple[Told, Told]:
        """The answer when all is computed, and that by the engine's own hit, which differs for latents on a processor.
        Afterwards its caches are empty, and ours has the prompt."""
        before = self.observer.count()
        cold = self.ask(prompt, salt=salt)
        assert (cold.own, cold.restored) == (0, 0)
        own = self.ask(prompt, salt=salt)
        assert (own.own, own.restored) == (HIT, 0)
        self.observer.await_pages(before + PAGES)
        self.engine.flush()
        return cold, own


@pytest.fixture(scope="module", params=["mha", "mla"])
def stored(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stored]:
    folder = tmp_path_factory.mktemp(request.param)
    model = build_model(request.param, folder / "model")
    with SharedServer(folder) as server:
        server.start()
        settings = {"server": str(server.socket), "verify": "always", "acquire_deadline": "500ms"}
        with SGLangEngine(model, folder / "log", storage=settings) as engine, observed(server) as observer:
            yield Stored(engine, server, observer, model)


def test_a_prompt_of_the_storage_equals_the_engines_own_hit_bit_for_bit(stored: Stored) -> None:
    _, own = stored.save(make_prompt(81))
    restored = stored.ask(make_prompt(81))
    assert (restored.own, restored.restored) == (0, HIT)
    assert restored.answer == own.answer


def test_prompts_of_one_batch_come_each(stored: Stored) -> None:
    prompts = [make_prompt(seed, 300 + 40 * (seed - 80)) for seed in (83, 84)]
    before = stored.observer.count()
    stored.engine.generate(*prompts)
    own = stored.engine.generate(*prompts)
    stored.observer.await_pages(before + sum(one.own for one in own) // PAGE)
    stored.engine.flush()
    restored = stored.engine.generate(*prompts)
    assert [one.restored for one in restored] == [one.own for one in own] == [416, 448]
    assert [one.answer for one in restored] == [one.answer for one in own]


def test_a_salt_keeps_prompts_apart(stored: Stored) -> None:
    _, own = stored.save(make_prompt(85), salt="one")
    assert stored.ask(make_prompt(85), salt="two").restored == 0
    restored = stored.ask(make_prompt(85), salt="one")
    assert (restored.restored, restored.answer) == (HIT, own.answer)


def test_records_that_are_not_what_was_saved_are_computed(stored: Stored) -> None:
    cold, _ = stored.save(make_prompt(86))
    with zeroed(stored.server):
        spoiled = stored.ask(make_prompt(86))
    assert (spoiled.own, spoiled.restored) == (0, 0)
    assert spoiled.answer.tokens == cold.answer.tokens
    assert "records differ from the saved bytes" in stored.engine.read_log()


def test_a_server_that_does_nothing_or_is_killed_takes_nothing_but_hits(stored: Stored) -> None:
    prompt = make_prompt(87)
    cold, own = stored.save(prompt)
    stored.server.stop()
    try:
        missed = stored.ask(prompt)
    finally:
        stored.server.go_on()
    assert missed.restored == 0
    assert missed.answer.tokens == cold.answer.tokens
    stored.engine.flush()
    stored.server.kill()
    missed = stored.ask(prompt)
    assert missed.restored == 0
    assert missed.answer.tokens == cold.answer.tokens
    stored.engine.flush()
    stored.server.succeed()
    stored.observer.await_pages(PAGES)
    for _ in range(20):
        told = stored.ask(prompt)
        if told.restored == HIT:
            break
        stored.engine.flush()
    assert (told.restored, told.answer) == (HIT, own.answer)
