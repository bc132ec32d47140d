"""A lost server or record means a shorter hit or none, the right answer, and an engine that lives."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.sglang.engine import PAGE, SGLangEngine, Told, build_model, make_prompt
from tests.sglang.shared_records import observed, zero_records
from tests.vllm.cache_server import SharedServer

pytestmark = pytest.mark.sglang

HIT = 6 * PAGE


class Verifying:
    """An engine that checks every load, and its server."""

    def __init__(self, engine: SGLangEngine, server: SharedServer) -> None:
        self.engine, self.server = engine, server

    def ask(self, prompt: list[int]) -> Told:
        (told,) = self.engine.generate(prompt)
        return told

    def save(self, prompt: list[int]) -> Told:
        self.ask(prompt)
        own = self.ask(prompt)
        assert own.own == HIT
        self.engine.flush()
        return own


@pytest.fixture(scope="module")
def verifying(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Verifying]:
    folder = tmp_path_factory.mktemp("faults")
    model = build_model("mha", folder / "model")
    with SharedServer(folder) as server:
        server.start()
        settings = {"server": str(server.socket), "verify": "always", "acquire_deadline": "500ms"}
        with SGLangEngine(model, folder / "log", linker=settings) as engine:
            yield Verifying(engine, server)


def test_records_that_are_not_what_was_saved_are_computed_and_saved_anew(verifying: Verifying) -> None:
    prompt = make_prompt(11)
    own = verifying.save(prompt)
    zero_records(verifying.server)
    spoiled = verifying.ask(prompt)
    assert (spoiled.own, spoiled.restored) == (0, 0)
    assert spoiled.answer.tokens == own.answer.tokens
    verifying.engine.flush()
    again = verifying.ask(prompt)
    assert again.restored == HIT
    assert again.answer == own.answer
    assert "records differ from the saved bytes" in verifying.engine.read_log()


def test_a_server_that_does_nothing_delays_no_request_for_long(verifying: Verifying) -> None:
    prompt = make_prompt(12)
    own = verifying.save(prompt)
    verifying.server.stop()
    try:
        missed = verifying.ask(prompt)
        assert missed.restored == 0
        assert missed.answer.tokens == own.answer.tokens
        verifying.ask(make_prompt(13))
        verifying.engine.flush()
    finally:
        verifying.server.go_on()


def test_a_server_that_is_killed_takes_nothing_but_hits_and_its_successor_has_them(verifying: Verifying) -> None:
    prompt = make_prompt(14)
    own = verifying.save(prompt)
    verifying.server.kill()
    missed = verifying.ask(prompt)
    assert missed.answer.tokens == own.answer.tokens
    verifying.engine.flush()
    verifying.server.succeed()
    with observed(verifying.server) as observer:
        observer.await_pages(6)
    restored = await_hit(verifying, prompt)
    assert restored.answer == own.answer


def await_hit(verifying: Verifying, prompt: list[int]) -> Told:
    """The engine joins the new server by itself, and says nothing of when."""
    told = verifying.ask(prompt)
    for _ in range(20):
        if told.restored == HIT:
            break
        verifying.engine.flush()
        told = verifying.ask(prompt)
    assert told.restored == HIT
    return told
