"""Models with windows: their two pools come back together, and where a window is not kept there is no hit.

The oracle and the control are those of `test_equality`; the engine's attention is corrected for these models
(`stand_ins/corrections.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.sglang.engine import PAGE, ZEROING, SGLangEngine, Told, build_model, make_prompt
from tests.vllm.cache_server import SharedServer

pytestmark = pytest.mark.sglang

CHUNK = 512
"""Tokens that the engine computes at once."""
FLOAT32_ROUNDING = 1e-3
"""Log probabilities of the same tokens differ by less, if these are computed in pieces of other lengths."""
WINDOWED = {"attention_backend": "intel_amx", "dtype": "float32"}
"""SGLang refuses the other name for this model, and takes the other kernel under this one."""


@dataclass(frozen=True)
class Windowed:
    """An engine on a server, and the file that says which pool's loads are made zeros."""

    engine: SGLangEngine
    zeroed: Path

    def ask(self, prompt: list[int], *, salt: str | None = None) -> Told:
        (told,) = self.engine.generate(prompt, salt=salt)
        return told

    def save(self, prompt: list[int]) -> Told:
        """The answer by the engine's own hit; afterwards its cache is empty, and ours has the prompt."""
        self.ask(prompt)
        own = self.ask(prompt)
        self.engine.flush()
        return own


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Windowed]:
    folder = tmp_path_factory.mktemp("windows")
    model = build_model("swa", folder / "model")
    with SharedServer(folder) as server:
        server.start()
        settings = {"server": str(server.socket), "zeroed_file": str(folder / "zeroed")}
        with SGLangEngine(model, folder / "log", linker=settings, kind=ZEROING, **WINDOWED) as engine:
            yield Windowed(engine, folder / "zeroed")


def test_both_pools_come_back_as_the_engine_had_them(windowed: Windowed) -> None:
    prompt = make_prompt(41, 150)
    own = windowed.save(prompt)
    assert own.own == 9 * PAGE
    restored = windowed.ask(prompt)
    assert (restored.own, restored.restored) == (0, 9 * PAGE)
    assert restored.answer == own.answer


@pytest.mark.parametrize("pool", ["kv", "swa"])
def test_zeros_in_the_pages_of_either_pool_change_the_answer(windowed: Windowed, pool: str) -> None:
    prompt = make_prompt(42 + len(pool), 150)
    own = windowed.save(prompt)
    windowed.zeroed.write_text(pool)
    try:
        spoiled = windowed.ask(prompt)
    finally:
        windowed.zeroed.unlink()
        windowed.engine.flush()
    assert spoiled.restored == 9 * PAGE
    assert spoiled.answer != own.answer
    restored = windowed.ask(prompt)
    assert restored.answer == own.answer


def test_prompts_that_are_computed_together_come_back(windowed: Windowed) -> None:
    prompts = [make_prompt(50 + number, 420 + 40 * number) for number in range(3)]
    windowed.engine.generate(*prompts)
    own = windowed.engine.generate(*prompts)
    windowed.engine.flush()
    restored = windowed.engine.generate(*prompts)
    assert [one.restored for one in restored] == [one.own for one in own] == [416, 448, 496]
    assert [one.answer for one in restored] == [one.answer for one in own]


def test_a_prompt_that_parts_from_a_long_one_hits_where_a_window_was_kept(windowed: Windowed) -> None:
    """Of a long prompt windows are kept at the ends of its chunks, and nowhere else."""
    long = make_prompt(60, 1100)
    parting = long[:700] + make_prompt(61, 60)
    windowed.ask(long, salt="own")
    own = windowed.ask(parting, salt="own")
    windowed.engine.flush()
    windowed.ask(long, salt="restored")
    windowed.engine.flush()
    restored = windowed.ask(parting, salt="restored")
    assert (own.own, restored.own, restored.restored) == (CHUNK, 0, CHUNK)
    assert restored.answer == own.answer
    windowed.engine.flush()
    assert windowed.ask(long[:300] + make_prompt(62, 60), salt="restored").restored == 0


def test_pages_that_are_computed_again_keep_the_bytes_of_the_first_computation(windowed: Windowed) -> None:
    """The second prompt is restored up to the end of a chunk within the part that both have, so that the rest of that
    part is computed again, in another shape than the first time."""
    long = make_prompt(64, 1300)
    parting = long[:650] + make_prompt(65, 60)
    first = windowed.save(long)
    assert windowed.ask(parting).restored == CHUNK
    own = windowed.ask(parting)
    windowed.engine.flush()
    restored = windowed.ask(parting)
    assert (own.own, restored.own, restored.restored) == (704, 0, 704)
    assert restored.answer.tokens == own.answer.tokens
    assert restored.answer.logprobs == pytest.approx(own.answer.logprobs, abs=FLOAT32_ROUNDING)
    windowed.engine.flush()
    assert windowed.ask(parting).answer == restored.answer
    windowed.engine.flush()
    again = windowed.ask(long)
    assert (again.restored, again.answer) == (first.own, first.answer)
    windowed.engine.flush()


def test_what_gave_way_to_other_prompts_comes_back(windowed: Windowed) -> None:
    """More prompts than the engine's pools hold: of the first ones it has parts of a window, or nothing."""
    prompts = [make_prompt(70 + number, 480) for number in range(6)]
    cold = [windowed.ask(prompt) for prompt in prompts]
    back = [windowed.ask(prompt) for prompt in prompts]
    assert all(one.own + one.restored >= 464 for one in back)
    assert any(one.restored for one in back)
    assert [one.answer.tokens for one in back] == [one.answer.tokens for one in cold]


def test_two_ranks_restore_windows(tmp_path: Path) -> None:
    model = build_model("swa", tmp_path / "model")
    with SharedServer(tmp_path) as server:
        server.start()
        settings = {"server": str(server.socket)}
        with SGLangEngine(model, tmp_path / "log", linker=settings, tp_size=2, **WINDOWED) as engine:
            prompt = make_prompt(63, 150)
            engine.generate(prompt)
            (own,) = engine.generate(prompt)
            engine.flush()
            (restored,) = engine.generate(prompt)
            assert (own.own, restored.restored) == (9 * PAGE, 9 * PAGE)
            assert restored.answer == own.answer
