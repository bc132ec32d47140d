"""Where hits end for engines that draft from hidden states: where vLLM's own coordinator ends them."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from tests.kit.connector.engine_configs import full, window
from tests.kit.connector.scripted import Group, ScriptedEngine

DENSE: tuple[Group, ...] = ((["a"], full(4)),)
SLIDING: tuple[Group, ...] = ((["a"], full(4)), (["w"], window(4, tokens=6)))
KINDS = pytest.mark.parametrize(
    ("groups", "drafting"),
    [(DENSE, None), (DENSE, 0), (SLIDING, None), (SLIDING, 0), (SLIDING, 1)],
    ids=["dense", "dense-mtp", "sliding", "sliding-mtp", "sliding-mtp-window"],
)
"""With MTP vLLM knows which group has the layer that drafts, and drops a block of that one only."""


def make_engine(
    groups: tuple[Group, ...], drafting: int | None = None, *, drops_last_block: bool = True
) -> ScriptedEngine:
    return ScriptedEngine(*groups, retention_interval=0, drops_last_block=drops_last_block, drafting_group=drafting)


def own_and_restored(engine: ScriptedEngine, prompt: range | list[int]) -> tuple[int, int]:
    """Tokens of the engine's own hit, with those loaded after it, and of a hit when it has forgotten all."""
    found = []
    for name in ("own", "restored"):
        request = engine.arrive(name, prompt, skip_save=True)
        admission = engine.admit(request)
        assert admission is not None
        found.append(admission.local + admission.external)
        plan = engine.step()
        engine.report(plan)
        if name == "own":
            assert admission.external == 0, "what the engine drops is not to be loaded"
        engine.finish(request)
        engine.report(engine.step())
        engine.forget()
    return found[0], found[1]


@KINDS
@pytest.mark.parametrize("tokens", [5, 8, 9, 28, 29, 31, 32, 33])
def test_a_repetition_hits_where_the_engine_itself_would(
    groups: tuple[Group, ...], drafting: int | None, tokens: int
) -> None:
    engine = make_engine(groups, drafting)
    engine.serve("first", range(tokens))
    own, restored = own_and_restored(engine, range(tokens))
    assert own == restored
    assert own == (max(tokens // 4 * 4 - 4, 0) if len(groups) > 1 else max((tokens - 1) // 4 * 4 - 4, 0))
    engine.assert_at_rest()


@KINDS
def test_a_continuation_hits_where_the_engine_itself_would(groups: tuple[Group, ...], drafting: int | None) -> None:
    engine = make_engine(groups, drafting)
    engine.serve("first", range(30))
    assert own_and_restored(engine, range(60)) == (24, 24)


def test_another_continuation_computes_the_last_block_before_it_again() -> None:
    """Its drafts there were of another token."""
    engine = make_engine(DENSE)
    engine.serve("first", range(30))
    prompt = [*range(16), *range(100, 120)]
    assert own_and_restored(engine, prompt) == (12, 12)


def test_engines_that_do_not_drop_a_block_load_it() -> None:
    engine = make_engine(DENSE, drops_last_block=False)
    engine.serve("first", range(30))
    assert own_and_restored(engine, range(30)) == (28, 28)
