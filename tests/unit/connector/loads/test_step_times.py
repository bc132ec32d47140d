"""The time of a step, whatever else is under way, kept apart from the time of steps that only decode."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from kvoffload.connector.loads.judge import MIN_RATED_TOKENS
from kvoffload.connector.loads.step_times import MAX_STEPS_UNDER_WAY, MIN_TOKENS_BESIDE, StepTimes

PROMPT = 10_000


class Heard:
    """Hears samples in the judge's place."""

    def __init__(self) -> None:
        self.samples: list[tuple[str, int, int, float]] = []
        self.computing = 0

    def note_prefill(self, tokens: int, seconds: float, *, decoding: int) -> None:
        self.samples.append(("prefill", tokens, decoding, seconds))

    def note_decoding(self, requests: int, seconds: float) -> None:
        self.samples.append(("decoding", 0, requests, seconds))


class Scene:
    """Requests with names of digits compute their prompt; all others decode."""

    def __init__(self, *, drafts: int = 0) -> None:
        self.now_s = 0.0
        self.heard = Heard()
        self.times = StepTimes(self.heard, decoded_tokens=1 + drafts, clock=lambda: self.now_s)  # type: ignore[arg-type]

    def begin(self, scheduled: Mapping[str, int]) -> int:
        output: Any = SimpleNamespace(
            num_scheduled_tokens=scheduled, total_num_scheduled_tokens=sum(scheduled.values())
        )
        requests: Any = {
            name: SimpleNamespace(
                request=SimpleNamespace(
                    num_prompt_tokens=PROMPT, num_computed_tokens=0 if name.isdigit() else PROMPT + 3
                )
            )
            for name in scheduled
        }
        return self.times.begin(output, requests)

    def end(self, number: int, *, at_s: float) -> None:
        self.now_s = at_s
        self.times.end(number)


@pytest.mark.parametrize(
    ("scheduled", "drafts", "measured"),
    [
        ({"1": 512}, 0, ("prefill", 512, 0)),
        ({"1": 512, "2": 100, "a": 1, "b": 1}, 0, ("prefill", 612, 2)),
        ({"1": 512, "a": 4, "b": 3}, 3, ("prefill", 512, 2)),
        ({"1": MIN_RATED_TOKENS}, 0, ("prefill", MIN_RATED_TOKENS, 0)),
        ({"1": MIN_RATED_TOKENS - 1}, 0, None),
        ({"1": MIN_TOKENS_BESIDE, "a": 1}, 0, ("prefill", MIN_TOKENS_BESIDE, 1)),
        ({"1": MIN_TOKENS_BESIDE - 1, "a": 1}, 0, None),
        ({}, 0, None),
        ({"a": 1, "b": 1}, 0, None),
        # 3 drafts of each of 64 requests are no prefill.
        ({f"r{number}": 4 for number in map(chr, range(97, 97 + 64))}, 3, None),
    ],
)
def test_a_step_with_a_prompts_tokens_is_measured(
    scheduled: dict[str, int], drafts: int, measured: tuple[str, int, int] | None
) -> None:
    scene = Scene(drafts=drafts)
    number = scene.begin(scheduled)
    assert bool(number) == scene.times.are_wanted == (measured is not None)
    scene.end(number, at_s=0.5)
    assert scene.heard.samples == ([] if measured is None else [(*measured, 0.5)])


def test_after_each_prefill_one_step_that_only_decodes_is_measured() -> None:
    scene = Scene(drafts=3)
    for number in (scene.begin({"1": 100}), scene.begin({"a": 4, "b": 4})):
        assert number
        scene.end(number, at_s=scene.now_s + 0.25)
    assert scene.begin({"a": 4, "b": 4}) == 0
    assert scene.heard.samples == [("prefill", 100, 0, 0.25), ("decoding", 0, 2, 0.25)]


def test_with_two_steps_under_way_each_takes_its_own_time() -> None:
    scene = Scene()
    first, plain, third = scene.begin({"1": 100}), scene.begin({"a": 1}), None
    scene.end(first, at_s=1.0)
    third = scene.begin({"1": 200})
    scene.end(plain, at_s=1.25)
    scene.end(third, at_s=3.25)
    assert [sample[3] for sample in scene.heard.samples] == [1.0, 0.25, 2.0]


def test_a_step_that_is_not_measured_ends_before_the_next_begins() -> None:
    scene = Scene()
    assert scene.begin({"a": 1}) == 0
    number = scene.begin({"1": 100})
    scene.end(0, at_s=5.0)
    scene.end(number, at_s=5.5)
    assert scene.heard.samples == [("prefill", 100, 0, 0.5)]


def test_time_in_which_nothing_ran_is_no_steps() -> None:
    scene = Scene()
    scene.end(scene.begin({"1": 100}), at_s=1.0)
    scene.now_s = 9.0
    scene.end(scene.begin({"1": 100}), at_s=9.5)
    assert [sample[3] for sample in scene.heard.samples] == [1.0, 0.5]


def test_empty_steps_of_which_nothing_is_heard_change_nothing() -> None:
    scene = Scene()
    for _ in range(100):
        assert scene.begin({}) == 0
    scene.end(scene.begin({"1": 100}), at_s=0.5)
    assert scene.heard.samples == [("prefill", 100, 0, 0.5)]


def test_a_step_that_never_ends_is_forgotten_with_the_next_one() -> None:
    scene = Scene()
    lost = scene.begin({"1": 100})
    scene.end(scene.begin({"1": 200}), at_s=0.5)
    assert not scene.times.are_wanted
    scene.end(lost, at_s=7.0)
    assert [sample[1] for sample in scene.heard.samples] == [200]


def test_what_is_under_way_is_bounded() -> None:
    scene = Scene()
    numbers = [scene.begin({"1": 100}) for _ in range(10 * MAX_STEPS_UNDER_WAY)]
    scene.end(numbers[-MAX_STEPS_UNDER_WAY - 1], at_s=1.0)
    assert scene.heard.samples == []
    scene.end(numbers[-MAX_STEPS_UNDER_WAY], at_s=2.0)
    assert scene.heard.samples == [("prefill", 100, 0, 1.0)]
    scene.end(numbers[-1], at_s=3.0)
    assert not scene.times.are_wanted
