"""Models with recurrent layers: a state comes back with the pages that it was gathered from.

The oracle and the control are those of `test_equality`. Kernels of these layers have stand-ins (`stand_ins`): those of
SGLang for processors are not among what is installed here.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.sglang.engine import ZEROING, SGLangEngine, build_model, make_prompt
from tests.sglang.planned import plan_records, registered_records
from tests.sglang.shared_records import observed
from tests.vllm.cache_server import SharedServer

pytestmark = pytest.mark.sglang

RECURRENT = {
    "dtype": "float32",
    # SGLang needs this page size if states are kept at the ends of prompts.
    "page_size": 1,
    "disable_overlap_schedule": True,
    "mamba_radix_cache_strategy": "no_buffer",
    "max_mamba_cache_size": 40,
}
PROMPT = 100


@pytest.fixture(scope="module")
def zeroed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file that names the pool whose loads are made zeros."""
    return tmp_path_factory.mktemp("states") / "zeroed"


@pytest.fixture(scope="module")
def server(zeroed: Path) -> Iterator[SharedServer]:
    with SharedServer(zeroed.parent) as server:
        server.start()
        yield server


@pytest.fixture(scope="module", params=["gdn", "mamba2", "sparse_states"])
def engine(request: pytest.FixtureRequest, zeroed: Path, server: SharedServer) -> Iterator[SGLangEngine]:
    folder = zeroed.parent / request.param
    model = build_model(request.param, folder / "model")
    settings = {"server": str(server.socket), "zeroed_file": str(zeroed)}
    with SGLangEngine(model, folder / "log", linker=settings, kind=ZEROING, **RECURRENT) as engine:
        yield engine


def test_a_prompt_goes_on_from_the_state_that_was_kept_at_its_end(engine: SGLangEngine, zeroed: Path) -> None:
    """Under another salt nothing is known, so that what is compared has the same history."""
    prompt = make_prompt(81, PROMPT)
    longer = prompt + make_prompt(82, 30)
    engine.generate(prompt, salt="own")
    (own,) = engine.generate(longer, salt="own")
    assert (own.own, own.restored) == (PROMPT, 0)
    engine.generate(prompt, salt="restored")
    engine.flush()
    (restored,) = engine.generate(longer, salt="restored")
    assert (restored.own, restored.restored) == (0, PROMPT)
    assert restored.answer == own.answer
    for pool in ("kv", "mamba"):
        engine.flush()
        zeroed.write_text(pool)
        (spoiled,) = engine.generate(longer, salt="restored")
        zeroed.unlink()
        assert spoiled.restored == PROMPT
        assert spoiled.answer != own.answer, pool


def test_its_records_have_the_size_that_was_planned(
    request: pytest.FixtureRequest, engine: SGLangEngine, zeroed: Path, server: SharedServer
) -> None:
    model = zeroed.parent / request.node.callspec.params["engine"] / "model"
    with observed(server) as observer:
        assert registered_records(observer) == plan_records(model, page_tokens=1, kv_dtype="float32")


def test_prompts_that_are_computed_together_go_on_from_their_states(engine: SGLangEngine) -> None:
    prompts = [make_prompt(90 + number, PROMPT + 7 * number) for number in range(3)]
    longer = [prompt + make_prompt(83, 20) for prompt in prompts]
    engine.flush()
    engine.generate(*prompts, salt="own")
    own = engine.generate(*longer, salt="own")
    engine.generate(*prompts, salt="restored")
    engine.flush()
    restored = engine.generate(*longer, salt="restored")
    assert [one.own for one in own] == [one.restored for one in restored] == [len(prompt) for prompt in prompts]
    assert [one.answer for one in restored] == [one.answer for one in own]


def test_where_no_state_was_kept_there_is_no_hit(engine: SGLangEngine, server: SharedServer) -> None:
    prompt = make_prompt(95, PROMPT)
    engine.flush()
    with observed(server) as observer:
        before = observer.count()
        engine.generate(prompt, salt="parts")
        observer.await_pages(before + PROMPT)
    engine.flush()
    (parting,) = engine.generate(prompt[:60] + make_prompt(96, 20), salt="parts")
    assert (parting.own, parting.restored) == (0, 0)
