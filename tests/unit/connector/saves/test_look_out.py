"""In which steps a request is looked at, as tables."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from kvoffload.connector.common.request_settings import RequestSettings
from kvoffload.connector.common.tracked_request import NEVER, SaveProgress, TrackedRequest
from kvoffload.connector.saves.look_out import MAX_LOOKS, LookOut

BLOCK = 4


def track(request_id: str = "a", *, num_tokens: int = 10) -> TrackedRequest:
    return TrackedRequest(
        SimpleNamespace(request_id=request_id, num_tokens=num_tokens),  # type: ignore[arg-type]
        SimpleNamespace(),  # type: ignore[arg-type]
        RequestSettings(),
        SaveProgress(next=[0], due=BLOCK, decoded_due=BLOCK),
    )


def look(out: LookOut, *scheduled: str) -> list[str]:
    return [tracked.request.request_id for tracked in out.begin_step(scheduled)]


def note(out: LookOut, tracked: TrackedRequest, tokens: int) -> None:
    """Does as `Saves` does after a look at a request: all full blocks have been handled."""
    if tokens >= tracked.progress.due:
        tracked.progress.due = tracked.progress.decoded_due = (tokens // BLOCK + 1) * BLOCK
    out.note(tracked, tokens)


def begin_decoding(out: LookOut, tracked: TrackedRequest) -> None:
    """Its prompt is computed in one step."""
    out.admit(tracked)
    assert look(out, tracked.request.request_id) == [tracked.request.request_id]
    note(out, tracked, tracked.request.num_tokens)


def test_who_computes_its_prompt_is_looked_at_in_every_step() -> None:
    out, tracked = LookOut(), track(num_tokens=100)
    out.admit(tracked)
    for tokens in (10, 11, 50, 99):
        assert look(out, "a") == ["a"]
        note(out, tracked, tokens)
    assert look(out) == [], "it was left out of this step"
    assert look(out, "a") == ["a"]
    note(out, tracked, 100)
    assert look(out, "a") == [], "it decodes"


def test_who_has_something_to_be_looked_at_again_is_so_in_the_next_step() -> None:
    out, tracked = LookOut(), track(num_tokens=10)
    begin_decoding(out, tracked)
    for _ in range(8):
        if look(out, "a"):
            break
    tracked.progress.due = 0  # there was no room
    out.note(tracked, 18)
    assert look(out, "a") == ["a"]


@pytest.mark.parametrize("decoded", [1, 2, 5])
@pytest.mark.parametrize("round_steps", [1, 3, 8])
def test_who_decodes_is_looked_at_once_in_a_round_and_no_later_than_a_round_after_its_block_is_full(
    round_steps: int, decoded: int
) -> None:
    random = Random(17)
    out, tracked = LookOut(decoded_tokens=decoded, round_steps=round_steps), track()
    begin_decoding(out, tracked)
    looked_at, waits, full_since = [], [], None
    for step in range(2, 400):
        tracked.request.num_tokens += random.randint(1, decoded)
        if full_since is None and tracked.request.num_tokens >= tracked.progress.due:
            full_since = step
        if look(out, "a"):
            looked_at.append(step)
            if full_since is not None:
                waits.append(step - full_since)
                full_since = None
            note(out, tracked, tracked.request.num_tokens)
    assert len(waits) > 5
    assert max(waits) < round_steps
    assert all(step % round_steps == 0 for step in looked_at)


def test_all_that_decode_are_looked_at_together() -> None:
    out = LookOut(round_steps=4)
    requests = [track(name, num_tokens=tokens) for name, tokens in (("a", 10), ("b", 11), ("c", 9))]
    for tracked in requests:
        out.admit(tracked)
    assert len(look(out, "a", "b", "c")) == 3
    for tracked in requests:
        note(out, tracked, tracked.request.num_tokens)
    assert [sorted(look(out, "a", "b", "c")) for _ in range(3)] == [[], [], ["a", "b", "c"]]


def test_more_decoded_tokens_are_looked_at_earlier() -> None:
    def first_look(decoded: int) -> int:
        out, tracked = LookOut(decoded_tokens=decoded, round_steps=1), track(num_tokens=10)
        tracked.progress.decoded_due = 34
        out.admit(tracked)
        look(out, "a")
        out.note(tracked, 10)
        return next(step for step in range(1, 100) if look(out, "a"))

    assert [first_look(decoded) for decoded in (1, 2, 5, 24, 100)] == [24, 12, 5, 1, 1]


def test_who_could_not_be_looked_at_is_due_in_the_next_step() -> None:
    out, tracked = LookOut(round_steps=2), track(num_tokens=11)
    begin_decoding(out, tracked)
    assert look(out, "a") == ["a"]
    out.wait(tracked)
    assert look(out, "a") == ["a"]
    assert tracked.has_run


def test_of_those_that_wait_each_step_takes_some_in_turn() -> None:
    """A hundred requests that have more to save than there is room for."""
    out = LookOut(round_steps=1)
    names = [str(number) for number in range(100)]
    requests = {name: track(name, num_tokens=10) for name in names}
    for tracked in requests.values():
        out.admit(tracked)
    assert look(out, *names) == names
    for tracked in requests.values():
        tracked.progress.due = 0
        out.note(tracked, 10)
    seen: list[str] = []
    for _ in range(7):
        found = look(out, *names)
        assert len(found) == MAX_LOOKS
        seen += found
        for name in found:
            out.note(requests[name], 10)
    assert seen == (names * 3)[: 7 * MAX_LOOKS]
    assert out.rest_steps == 0


def test_who_waits_and_is_left_out_of_a_step_goes_on_waiting() -> None:
    out, tracked, other = LookOut(round_steps=1), track("a"), track("b")
    for one in (tracked, other):
        out.admit(one)
    look(out, "a", "b")
    out.wait(tracked)
    out.wait(other)
    assert look(out, "b") == ["b"]
    assert look(out, "a", "b") == ["a"]
    out.wait(tracked)
    out.forget("a")
    assert look(out, "a", "b") == []


def test_who_waits_and_loses_its_blocks_begins_anew() -> None:
    out, tracked = LookOut(round_steps=1), track()
    begin_decoding(out, tracked)
    out.wait(tracked)
    out.admit(tracked)
    assert not tracked.has_run
    assert look(out, "a") == ["a"]
    assert tracked.has_run


def test_who_is_never_due_is_not_looked_at() -> None:
    out, tracked = LookOut(round_steps=1), track()
    out.admit(tracked)
    look(out, "a")
    tracked.progress.due = tracked.progress.decoded_due = NEVER
    out.note(tracked, 10)
    assert [look(out, "a") for _ in range(5)] == [[]] * 5
    assert out.entries == 0


@pytest.mark.parametrize("left_out", [1, 2, 9])
def test_who_is_left_out_when_it_is_due_is_looked_at_a_round_later(left_out: int) -> None:
    out, tracked = LookOut(round_steps=4), track()
    begin_decoding(out, tracked)
    assert [look(out) for _ in range(2, 4 * left_out + 1)] == [[]] * (4 * left_out - 1)
    assert [look(out, "a") for _ in range(4)] == [[], [], [], ["a"]]


def test_who_was_preempted_is_looked_at_in_every_step_again() -> None:
    out, tracked = LookOut(round_steps=4), track()
    begin_decoding(out, tracked)
    tracked.request.num_tokens = 12
    assert look(out) == []
    tracked.progress.due = BLOCK
    out.admit(tracked)
    for tokens in (4, 8, 11):
        assert look(out, "a") == ["a"], "once, although it was due later as well"
        note(out, tracked, tokens)


def test_who_has_ended_is_not_looked_at() -> None:
    out, one, other = LookOut(round_steps=1), track("one"), track("other")
    out.admit(one)
    begin_decoding(out, other)
    for name in ("one", "other"):
        out.forget(name)
    assert [look(out, "one", "other") for _ in range(5)] == [[]] * 5
    assert out.entries == 0


def test_it_has_run_when_it_was_part_of_a_step_since_it_got_its_blocks() -> None:
    out, tracked = LookOut(), track()
    out.admit(tracked)
    look(out)
    assert not tracked.has_run, "its blocks are being loaded"
    look(out, "a")
    assert tracked.has_run
    note(out, tracked, 10)
    out.admit(tracked)
    assert not tracked.has_run, "it was preempted, and has other blocks now"
    look(out, "a")
    assert tracked.has_run


def test_what_it_holds_does_not_grow_with_steps() -> None:
    out, tracked = LookOut(round_steps=2), track()
    begin_decoding(out, tracked)
    for _ in range(100):
        tracked.request.num_tokens += 1
        if look(out, "a"):
            note(out, tracked, tracked.request.num_tokens)
        assert out.entries == 1


@pytest.mark.parametrize("begins", [LookOut.admit, begin_decoding])
def test_who_is_put_off_is_looked_at_in_the_next_round(begins: Callable[[LookOut, TrackedRequest], None]) -> None:
    out, tracked = LookOut(round_steps=4), track()
    begins(out, tracked)
    out.put_off(tracked)
    seen = [look(out, "a") for _ in range(5)]
    assert seen.count(["a"]) == 1


def test_between_rounds_a_rest_is_as_good_as_its_steps() -> None:
    outs = [LookOut(round_steps=8), LookOut(round_steps=8)]
    for out in outs:
        begin_decoding(out, track())
        assert out.rest_steps == 6
    for _ in range(6):
        assert look(outs[0], "a") == []
    outs[1].skip(6)
    assert [look(out, "a") for out in outs] == [["a"], ["a"]]
    outs[1].admit(track("b"))
    assert outs[1].rest_steps == 0
