"""The server hears once of each prompt, when it is known what became of it."""

from __future__ import annotations

from kvoffload.client import PromptNote
from kvoffload.protocol import Miss
from kvoffload.sglang.asked_prompts import MAX_ASKED, TELL_AFTER_S, AskedPrompts

NAMES = b"n" * 96


def note(prompts: AskedPrompts, rid: str, *, found: int = 0, now_s: float = 0.0) -> None:
    prompts.note(rid, NAMES, pages=3, found=found, miss=Miss.NEVER_SEEN, now_s=now_s)


def test_of_what_a_request_was_told_the_last_counts() -> None:
    told: list[PromptNote] = []
    prompts = AskedPrompts(told.append, page_size=16)
    note(prompts, "r")
    note(prompts, "r", found=2)
    prompts.end("r")
    prompts.end("r")
    (one,) = told
    assert (one.chain, one.tokens, one.local, one.boundary, one.limit) == (NAMES, 48, 0, 32, 48)


def test_what_nobody_asks_for_any_more_is_told_and_what_failed_is_no_hit() -> None:
    told: list[PromptNote] = []
    prompts = AskedPrompts(told.append, page_size=16)
    note(prompts, "first", found=1)
    note(prompts, "second", found=1, now_s=TELL_AFTER_S / 2)
    note(prompts, "third", found=1, now_s=TELL_AFTER_S / 2)
    prompts.end_old(TELL_AFTER_S)
    assert [one.boundary for one in told] == [16]
    prompts.end("third", is_loaded=False)
    assert [(one.boundary, one.miss) for one in told[1:]] == [(0, Miss.REFUSED)]
    prompts.end_old(2 * TELL_AFTER_S)
    assert len(told) == 3


def test_a_request_that_waits_is_told_of_when_it_has_stopped_asking() -> None:
    told: list[PromptNote] = []
    prompts = AskedPrompts(told.append, page_size=16)
    note(prompts, "waits", found=1)
    note(prompts, "computed")
    prompts.note_again("waits", TELL_AFTER_S / 2)
    prompts.end_old(TELL_AFTER_S)
    assert [one.boundary for one in told] == [0]
    prompts.note_again("computed", TELL_AFTER_S)
    prompts.end_old(2 * TELL_AFTER_S)
    assert [one.boundary for one in told] == [0, 16]


def test_no_more_are_remembered_than_there_is_room_for() -> None:
    told: list[PromptNote] = []
    prompts = AskedPrompts(told.append, page_size=16)
    for number in range(MAX_ASKED + 5):
        note(prompts, str(number))
    assert len(told) == 5
