"""vLLM and SGLang on one server and one pool: the same model, the same prompt, pages of one size.

Each finds what it has saved itself, with the bits of its own hit, and nothing of the other: their pages have another
form, and the names of their blocks are made in another way.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvoffload.client.inspector import Inspector, Row
from kvoffload.sglang.tested import VERSION
from tests.sglang.engine import VLLM_PYTHON, EngineProcess, SGLangEngine, build_model, make_prompt
from tests.sglang.shared_records import Observer, observed, zeroed
from tests.vllm.cache_server import SharedServer

pytestmark = pytest.mark.sglang

PAGE = 32
"""The smallest that vLLM takes on a CPU."""
PAGES = 3
HIT = PAGES * PAGE
NEW_TOKENS = 12


class VLLMEngine(EngineProcess):
    """A real vLLM engine with our connector."""

    def __init__(self, model: Path, log: Path, *, server: Path) -> None:
        command = [str(VLLM_PYTHON), "-m", "tests.sglang.vllm_process", str(model), str(server), str(PAGE)]
        super().__init__(command, log, environment=os.environ)

    def generate(self, prompt: list[int]) -> tuple[int, object]:
        """How many of its tokens were cached, by the engine or by us; and the answer."""
        reply = self.ask({"do": "generate", "prompt": prompt, "new_tokens": NEW_TOKENS})
        return reply.pop("cached"), reply

    def flush(self) -> None:
        assert self.ask({"do": "flush"}) == {"flushed": True}


@dataclass(frozen=True)
class Pair:
    sglang: SGLangEngine
    vllm: VLLMEngine
    server: SharedServer
    observer: Observer


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    if not VLLM_PYTHON.exists():
        pytest.skip("there is no .venv with vLLM (`make setup` makes it)")
    folder = tmp_path_factory.mktemp("pair")
    model = build_model("mha", folder / "model")
    with SharedServer(folder) as server:
        server.start()
        # Both start at once: their starts are most of what this takes.
        vllm = VLLMEngine(model, folder / "vllm.log", server=server.socket)
        settings = {"server": str(server.socket)}
        sglang = SGLangEngine(model, folder / "sglang.log", linker=settings, page_size=PAGE)
        with vllm, sglang, observed(server) as observer:
            yield Pair(sglang, vllm, server, observer)


def test_the_server_tells_which_engines_have_joined(pair: Pair) -> None:
    kinds: dict[str, Row] = {}

    def have_joined() -> bool:
        told = Inspector(pair.observer.client.look_into).survey_engines().list_kinds()
        kinds.update({row["engine"].partition(" ")[0]: row for row in told})
        return kinds.keys() == {"vllm", "sglang"}

    pair.observer.await_that(have_joined, "the two engines are not among those that have joined")
    assert kinds["sglang"]["engine"] == f"sglang {VERSION}"
    assert kinds["sglang"]["sessions"] == kinds["vllm"]["sessions"] == 1


def test_each_finds_its_own_and_nothing_of_the_other(pair: Pair) -> None:
    prompt = make_prompt(71)
    pair.sglang.generate(prompt)
    (own,) = pair.sglang.generate(prompt)
    assert own.own == HIT
    pair.observer.await_pages(PAGES)
    # All of it is cached, for the other engine.
    assert pair.vllm.generate(prompt)[0] == 0
    vllm_cached, vllm_own = pair.vllm.generate(prompt)
    assert vllm_cached == HIT
    pair.observer.await_pages(2 * PAGES)
    pair.sglang.flush()
    pair.vllm.flush()
    (restored,) = pair.sglang.generate(prompt)
    assert (restored.restored, restored.answer) == (HIT, own.answer)
    assert pair.vllm.generate(prompt) == (HIT, vllm_own)


def test_what_vllm_saved_first_is_nothing_for_sglang(pair: Pair) -> None:
    prompt = make_prompt(72)
    before = pair.observer.count()
    pair.vllm.generate(prompt)
    pair.observer.await_pages(before + PAGES)
    (cold,) = pair.sglang.generate(prompt)
    assert (cold.own, cold.restored) == (0, 0)
    (own,) = pair.sglang.generate(prompt)
    pair.observer.await_pages(before + 2 * PAGES)
    pair.sglang.flush()
    (restored,) = pair.sglang.generate(prompt)
    assert (restored.restored, restored.answer) == (HIT, own.answer)


def test_zeros_in_the_pool_change_the_answers_of_both(pair: Pair) -> None:
    """Both engines restore blocks from the one pool."""
    prompt = make_prompt(73)
    before = pair.observer.count()
    pair.sglang.generate(prompt)
    (own,) = pair.sglang.generate(prompt)
    pair.vllm.generate(prompt)
    vllm_own = pair.vllm.generate(prompt)
    pair.observer.await_pages(before + 2 * PAGES)
    pair.sglang.flush()
    pair.vllm.flush()
    with zeroed(pair.server):
        (spoiled,) = pair.sglang.generate(prompt)
        vllm_cached, vllm_spoiled = pair.vllm.generate(prompt)
    assert (spoiled.restored, vllm_cached) == (HIT, HIT)
    assert spoiled.answer != own.answer
    assert vllm_spoiled != vllm_own[1]
    pair.sglang.flush()
    pair.vllm.flush()
