"""An audit's verdict: what agrees, what does not, and what tells nothing."""

from __future__ import annotations

import pytest

from kvoffload.audit.audited_engine import AuditedEngine
from kvoffload.audit.auditor import ROUNDS, Auditor, AuditPrompt, Verdict
from kvoffload.warm.json_client import JsonClient
from tests.kit.audit.caching_engine import MODEL, ONE_BIT, CachingEngine, caching_engine

PROMPTS = 4
PROMPT_TOKENS = 65


def audit(played: CachingEngine, *, own_hits: int = 2) -> Verdict:
    """Audits a played engine with a few prompts."""
    prompts = [AuditPrompt(at + 1, [at] * PROMPT_TOKENS, seed=at) for at in range(PROMPTS)]
    with caching_engine(played):
        client = JsonClient(played.address, wait=lambda seconds: None)
        engine = AuditedEngine(client, model=MODEL, answer_tokens=8, wait=lambda seconds: None)
        return Auditor(engine, own_hits=own_hits).run(prompts)


@pytest.mark.parametrize("tells_cached", [True, False])
def test_equal_answers_agree(tells_cached: bool) -> None:
    played = CachingEngine(tells_cached=tells_cached)
    verdict = audit(played)
    assert (verdict.prompts, verdict.restored, verdict.agreed, verdict.disagreed) == (PROMPTS, PROMPTS, PROMPTS, 0)
    assert (verdict.is_exact, verdict.largest, verdict.unlike, verdict.fault) == (True, 0, None, "")
    # Cold answers differ from own hits.
    assert verdict.bound == pytest.approx(0.01)
    assert len(played.asked) == PROMPTS * 4


@pytest.mark.parametrize(
    ("damage", "largest"), [("token", 0), ("other", 1), ("end", 0), ("bit", ONE_BIT), ("far", 0.5)]
)
def test_where_own_hits_are_equal_any_difference_is_found(damage: str, largest: float) -> None:
    verdict = audit(CachingEngine(damage={2: damage, 3: damage}))
    assert (verdict.restored, verdict.agreed, verdict.disagreed) == (PROMPTS, PROMPTS - 2, 2)
    assert verdict.largest == pytest.approx(largest, abs=0.5 if damage == "other" else ONE_BIT / 4)
    found = verdict.unlike
    assert found is not None
    assert (found.prompt.number, found.prompt.seed, found.position) == (2, 1, 3)
    assert found.own != found.restored
    assert (found.restored is None) == (damage == "end")


@pytest.mark.parametrize("damage", ["far", "other", "end"])
def test_a_noisy_engine_is_judged_by_its_own_noise(damage: str) -> None:
    verdict = audit(CachingEngine(noise=0.001))
    assert (verdict.is_exact, verdict.agreed) == (False, PROMPTS)
    assert 0 < verdict.largest <= verdict.bound
    assert audit(CachingEngine(noise=0.001, damage={1: "bit"})).agreed == PROMPTS
    spoiled = audit(CachingEngine(noise=0.001, damage={4: damage}))
    assert (spoiled.agreed, spoiled.disagreed) == (PROMPTS - 1, 1)
    assert spoiled.unlike is not None
    assert (spoiled.unlike.prompt.number, spoiled.unlike.position) == (4, 3)


def test_hits_of_other_lengths_may_differ_as_cold_answers_do() -> None:
    """They are computed in other steps, which round otherwise."""
    verdict = audit(CachingEngine(restored_block=48, damage={1: "bit"}))
    assert (verdict.agreed, verdict.otherwise, verdict.is_exact) == (PROMPTS, PROMPTS, True)
    assert audit(CachingEngine(restored_block=48, damage={1: "far"})).disagreed == 1


def test_prompts_that_are_not_restored_never_agree() -> None:
    verdict = audit(CachingEngine(lost={1, 3}))
    assert (verdict.restored, verdict.agreed, dict(verdict.why_not)) == (PROMPTS - 2, PROMPTS - 2, {"not restored": 2})
    nothing = audit(CachingEngine(lost={1, 2, 3, 4}))
    assert (nothing.restored, nothing.agreed, nothing.disagreed) == (0, 0, 0)
    # How far the engine's own answers are apart is known nevertheless.
    assert nothing.bound == pytest.approx(0.01)


def test_blocks_that_are_saved_late_are_asked_for_again() -> None:
    played = CachingEngine(late=PROMPTS)
    assert audit(played).agreed == PROMPTS
    assert len(played.asked) == PROMPTS * 5
    assert audit(CachingEngine(late=PROMPTS * ROUNDS)).restored == 0


def test_an_engine_that_says_of_nothing_how_much_was_restored_is_not_audited() -> None:
    verdict = audit(CachingEngine(tells_cached=False, counts_hits=False))
    assert verdict.restored == 0
    assert "--enable-prompt-tokens-details" in verdict.fault


def test_an_engine_that_only_claims_to_empty_its_cache_is_not_audited() -> None:
    verdict = audit(CachingEngine(empties=False))
    assert verdict.restored == 0
    assert dict(verdict.why_not) == {"in the engine's own cache, although that was emptied": PROMPTS}


def test_a_prompt_is_judged_by_each_of_its_restored_answers() -> None:
    """Of these the engine's cache holds more than is restored, so that they are asked for in each round."""
    played = CachingEngine(restored_block=48, damage={1: "far"})
    assert audit(played).disagreed == 1
    assert len(played.asked) == PROMPTS * (3 + ROUNDS)


def test_without_a_path_that_empties_nothing_is_asked() -> None:
    played = CachingEngine(emptying="/none")
    verdict = audit(played)
    assert "VLLM_SERVER_DEV_MODE=1" in verdict.fault
    assert played.asked == []


def test_a_prompt_that_was_known_before_is_not_audited() -> None:
    played = CachingEngine()
    assert audit(played).agreed == PROMPTS
    again = audit(played)
    assert (again.restored, dict(again.why_not)) == (0, {"known to the engine before": PROMPTS})


def test_what_was_answered_before_a_fault_is_judged() -> None:
    verdict = audit(CachingEngine(fails_after=PROMPTS * 3 + 2, damage={1: "bit"}))
    assert (verdict.restored, verdict.disagreed) == (2, 1)
    assert "answers 500" in verdict.fault
    assert "of another form" in audit(CachingEngine(answers_with=[])).fault
