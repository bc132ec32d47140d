"""Proofs from the ranks' answers, and when ranks are asked."""

from __future__ import annotations

import pytest

from kvoffload.connector.identity.weight_proof import PROOF_WAIT_S, Verdict, WeightProof

OLD, NEW = b"o" * 32, b"n" * 32


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def make_proof(*proofs: bytes, clock: Clock | None = None, can_look: bool = True) -> WeightProof:
    proof = WeightProof(clock or Clock())
    proof.begin(dict(enumerate(proofs or (OLD,))), can_look=can_look)
    return proof


def sleep(proof: WeightProof) -> None:
    proof.reset()
    proof.wake()


def ask(proof: WeightProof) -> int:
    assert proof.is_waited_for()
    number = proof.take_question(has_forward=False)
    assert number
    return number


def test_an_engine_that_goes_on_asks_nobody() -> None:
    proof = make_proof()
    assert not proof.is_open
    assert not proof.is_waited_for()
    assert proof.take_question(has_forward=True) == 0
    proof.wake()  # without a reset: nothing has other names
    assert not proof.is_open
    assert proof.answer({0: (1, NEW)}) is None


@pytest.mark.parametrize(("answer", "verdict"), [(OLD, Verdict.SAME), (NEW, Verdict.OTHER), (b"", Verdict.UNKNOWN)])
def test_after_a_sleep_the_first_request_waits_for_the_answer(answer: bytes, verdict: Verdict) -> None:
    proof = make_proof()
    sleep(proof)
    assert proof.take_question(has_forward=True) == 0, "nobody has come who would be served"
    number = ask(proof)
    assert proof.is_waited_for()
    assert proof.take_question(has_forward=True) == 0, "they are asked once"
    assert proof.answer({0: (number, answer)}) == (verdict, True)
    assert not proof.is_open
    assert not proof.is_waited_for()


@pytest.mark.parametrize(("answer", "verdict"), [(OLD, Verdict.SAME), (NEW, Verdict.OTHER), (b"", Verdict.UNKNOWN)])
def test_after_a_reset_nobody_waits_and_a_step_that_computes_asks(answer: bytes, verdict: Verdict) -> None:
    """The engine may be about to sleep: weights may be looked at in steps that use them, and in no others."""
    proof = make_proof()
    proof.reset()
    assert not proof.is_waited_for()
    assert proof.take_question(has_forward=False) == 0
    number = proof.take_question(has_forward=True)
    assert proof.answer({0: (number, answer)}) == (verdict, False)
    assert not proof.is_open


def test_all_ranks_have_to_answer_and_agree_with_what_they_said() -> None:
    proof = make_proof(OLD, NEW)
    sleep(proof)
    number = ask(proof)
    assert proof.answer({0: (number, OLD)}) is None
    assert proof.answer({1: (number, NEW)}) == (Verdict.SAME, True)
    sleep(proof)
    number = ask(proof)
    assert proof.answer({0: (number, NEW), 1: (number, OLD)}) == (Verdict.OTHER, True)


@pytest.mark.parametrize("proofs", [(b"",), (OLD, b""), (b"", OLD)])
def test_where_a_rank_cannot_prove_anything_nobody_waits(proofs: tuple[bytes, ...]) -> None:
    """Ranks look at what they see, which a later look is compared with."""
    proof = make_proof(*proofs)
    sleep(proof)
    assert not proof.is_waited_for()
    assert proof.take_question(has_forward=False) == 0
    number = proof.take_question(has_forward=True)
    assert proof.answer({rank: (number, one) for rank, one in enumerate(proofs)}) == (Verdict.UNKNOWN, False)


def test_where_ranks_cannot_look_nobody_is_asked() -> None:
    proof = make_proof(b"", can_look=False)
    sleep(proof)
    assert not proof.is_open
    assert not proof.is_waited_for()
    assert proof.take_question(has_forward=True) == 0


def test_weights_are_compared_with_those_of_the_last_answer() -> None:
    proof = make_proof()
    sleep(proof)
    assert proof.answer({0: (ask(proof), NEW)}) == (Verdict.OTHER, True)
    sleep(proof)
    assert proof.answer({0: (ask(proof), NEW)}) == (Verdict.SAME, True)
    proof.reset()
    assert proof.answer({0: (proof.take_question(has_forward=True), OLD)}) == (Verdict.OTHER, False)
    sleep(proof)
    assert proof.answer({0: (ask(proof), OLD)}) == (Verdict.SAME, True)


def test_an_answer_to_an_older_question_is_none() -> None:
    proof = make_proof()
    sleep(proof)
    number = ask(proof)
    proof.reset()
    assert proof.answer({0: (number, OLD)}) is None
    proof.wake()
    later = proof.take_question(has_forward=True)
    assert proof.answer({0: (number, OLD)}) is None
    assert proof.answer({0: (later, OLD)}) is not None


def test_what_names_were_used_with_is_not_guessed() -> None:
    """A step was computed after the reset, and its answer was lost: its weights are not those of before."""
    proof = make_proof()
    proof.reset()
    assert proof.take_question(has_forward=True)
    sleep(proof)
    assert not proof.is_waited_for()
    assert proof.answer({0: (proof.take_question(has_forward=True), OLD)}) == (Verdict.UNKNOWN, False)
    sleep(proof)
    assert proof.answer({0: (ask(proof), OLD)}) == (Verdict.SAME, True)


def test_a_reset_before_the_sleep_that_nothing_was_computed_after_changes_nothing() -> None:
    proof = make_proof()
    proof.reset()
    sleep(proof)
    assert proof.answer({0: (ask(proof), OLD)}) == (Verdict.SAME, True)


def test_requests_wait_within_a_bound_and_then_nothing_is_proved() -> None:
    clock = Clock()
    proof = make_proof(clock=clock)
    sleep(proof)
    number = ask(proof)
    clock.now_s = PROOF_WAIT_S
    assert proof.is_waited_for()
    clock.now_s += 0.001
    assert not proof.is_waited_for()
    assert proof.answer({0: (number, OLD)}) is None
    assert proof.answer({0: (proof.take_question(has_forward=True), OLD)}) == (Verdict.UNKNOWN, False)
    sleep(proof)
    assert proof.answer({0: (ask(proof), OLD)}) == (Verdict.SAME, True)
