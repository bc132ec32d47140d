"""Updates of weights are noted before they change anything, wherever in the engine they come from."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

from kvoffload.sglang.weight_updates import WeightUpdates, watch_updates


def make_updater() -> Any:
    class Updater:
        """As SchedulerWeightUpdaterManager is."""

        __slots__ = ("_session", "seen", "updates")

        def __init__(self) -> None:
            self._session: Any = None
            self.updates: WeightUpdates | None = None
            self.seen: list[tuple[str, int]] = []

        def _select_runners(self, selector: str = "all") -> list[str]:
            assert self.updates is not None
            self.seen.append((selector, self.updates.count))
            return [selector]

    return Updater


def ask_later(updates: WeightUpdates) -> bool:
    answers: list[bool] = []
    thread = threading.Thread(target=lambda: answers.append(updates.is_of_later_thread))
    thread.start()
    thread.join()
    return answers[0]


def test_an_update_is_noted_before_it_begins() -> None:
    kind = make_updater()
    updater = kind()
    updater.updates = updates = watch_updates(kind)
    assert watch_updates(kind) is updates
    assert updater._select_runners() == ["all"]
    assert updater._select_runners("draft") == ["draft"]
    assert updater.seen == [("all", 1), ("draft", 2)]


def test_a_session_is_open_until_what_it_loads_is_told() -> None:
    updates, updater = WeightUpdates(), SimpleNamespace(_session=None)
    assert not updates.is_open
    updates.note(updater)
    assert not updates.is_open
    updater._session = SimpleNamespace(loaded_weights=False)
    assert updates.is_open
    updates.note()
    assert updates.is_open
    updater._session.loaded_weights = True
    assert not updates.is_open


def test_threads_that_were_there_at_an_update_are_told_from_later_ones() -> None:
    updates = WeightUpdates()
    updates.note()
    assert not updates.is_of_later_thread
    assert ask_later(updates)
    gate, answers = threading.Event(), list[bool]()

    def wait() -> None:
        gate.wait()
        answers.append(updates.is_of_later_thread)

    thread = threading.Thread(target=wait)
    thread.start()
    updates.note()
    gate.set()
    thread.join()
    assert answers == [False]
