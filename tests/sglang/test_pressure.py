"""More prompts than an engine has room for, prompts that come in pieces, requests that are taken back."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.sglang.engine import PAGE, SGLangEngine, Told, build_model, make_prompt
from tests.sglang.shared_records import Observer, observed
from tests.vllm.cache_server import SharedServer

pytestmark = pytest.mark.sglang

POOL_TOKENS = 2048
CHUNK = 128
LENGTH = 400
PAGES = (LENGTH - 1) // PAGE


@dataclass(frozen=True)
class Pressed:
    engine: SGLangEngine
    observer: Observer

    def ask(self, *prompts: list[int]) -> list[Told]:
        return self.engine.generate(*prompts, new_tokens=4)


@pytest.fixture(scope="module")
def pressed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pressed]:
    folder = tmp_path_factory.mktemp("pressure")
    model = build_model("mha", folder / "model")
    with SharedServer(folder) as server:
        server.start()
        settings = {"server": str(server.socket)}
        arguments = {"max_total_tokens": POOL_TOKENS, "chunked_prefill_size": CHUNK}
        with (
            SGLangEngine(model, folder / "log", linker=settings, **arguments) as engine,
            observed(server) as observer,
        ):
            yield Pressed(engine, observer)


def test_what_the_engine_has_evicted_is_restored(pressed: Pressed) -> None:
    """Twice as many tokens as its pool has, one prompt after another."""
    prompts = [make_prompt(seed, LENGTH) for seed in range(101, 108)]
    own = []
    for prompt in prompts:
        pressed.ask(prompt)
        own += pressed.ask(prompt)
    assert [one.own for one in own] == [PAGES * PAGE] * len(prompts)
    pressed.observer.await_pages(len(prompts) * PAGES)
    again = [pressed.ask(prompt)[0] for prompt in prompts]
    assert [one.own + one.restored for one in again] == [PAGES * PAGE] * len(prompts)
    assert sum(one.restored for one in again) > len(prompts) * LENGTH - POOL_TOKENS
    assert [one.answer for one in again] == [one.answer for one in own]


def test_restored_prompts_beside_others_that_are_computed_in_pieces(pressed: Pressed) -> None:
    """Both runs compute the same in the same shapes: two prompts that hit, and two that come in pieces."""
    hits = [make_prompt(seed, LENGTH) for seed in (121, 122)]
    before = pressed.observer.count()
    for prompt in hits:
        pressed.ask(prompt)
    own = pressed.ask(*hits, make_prompt(123, LENGTH), make_prompt(124, LENGTH))
    assert [one.own for one in own] == [PAGES * PAGE] * 2 + [0] * 2
    pressed.observer.await_pages(before + 4 * PAGES)
    pressed.engine.flush()
    restored = pressed.ask(*hits, make_prompt(125, LENGTH), make_prompt(126, LENGTH))
    assert [one.restored for one in restored] == [PAGES * PAGE] * 2 + [0] * 2
    assert [one.answer for one in restored[:2]] == [one.answer for one in own[:2]]


def test_requests_that_are_taken_back_leave_nothing_held(pressed: Pressed) -> None:
    """Before, while and after their pages are loaded or offered; what is answered afterwards is right."""
    saved = [make_prompt(seed, LENGTH) for seed in (131, 132)]
    own = []
    for prompt in saved:
        pressed.ask(prompt)
        own += pressed.ask(prompt)
    ends = []
    for step, after_s in enumerate((0.0, 0.02, 0.1, 0.5)):
        pressed.engine.flush()
        new = [make_prompt(140 + 2 * step + at, LENGTH) for at in range(2)]
        reply = pressed.engine.ask({"do": "abort", "prompts": [*saved, *new], "after_s": after_s})
        ends += reply["finish"]
    assert ends.count("abort") > len(ends) // 2
    # The engine would not empty its cache while a page is held.
    pressed.engine.flush()
    pressed.observer.await_no_leases()
    restored = [pressed.ask(prompt)[0] for prompt in saved]
    assert [one.restored for one in restored] == [PAGES * PAGE] * 2
    assert [one.answer for one in restored] == [one.answer for one in own]
