"""Updates of weights are noted before they change anything, wherever in the engine they come from."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from kvoffload.sglang.weight_updates import WeightUpdates, watch_updates
from tests.kit.sglang.updater import make_updater_class


def ask_later(updates: WeightUpdates) -> bool:
    answers: list[bool] = []
    thread = threading.Thread(target=lambda: answers.append(updates.is_of_later_thread))
    thread.start()
    thread.join()
    return answers[0]


def test_an_update_is_noted_before_it_begins() -> None:
    seen: list[tuple[str, int]] = []
    kind = make_updater_class(lambda selector: seen.append((selector, updates.count)))
    updates = watch_updates(kind)
    assert watch_updates(kind) is updates
    updater = kind()
    assert updater.update_weights_from_tensor(None) == ["target"]
    updater.begin_weight_update(None)
    updater.end_weight_update(None)
    assert seen == [("target", 1), ("all", 2), ("all", 3)]


@pytest.mark.parametrize(
    ("action", "changes"), [("checksum", 0), ("compare", 0), ("snapshot", 0), ("reset_tensors", 1)]
)
def test_a_check_of_weights_is_no_update_unless_it_makes_them_random(action: str, changes: int) -> None:
    kind = make_updater_class()
    updates, updater = watch_updates(kind), kind()
    assert updater.check_weights(SimpleNamespace(action=action)) == ["all"]
    assert updates.count == changes
    with pytest.raises(ValueError, match="unknown"):
        updater.check_weights(SimpleNamespace(action="unknown"))
    updater.update_weights_from_tensor(None)
    assert updates.count == changes + 1


def test_a_session_is_open_until_what_it_loads_is_told() -> None:
    kind = make_updater_class()
    updates, updater = watch_updates(kind), kind()
    assert not updates.is_open
    updater.begin_weight_update(None)
    assert updates.is_open
    updates.note()
    assert updates.is_open
    updater.update_weights_from_tensor(None)
    assert not updates.is_open
    updater.end_weight_update(None)
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
