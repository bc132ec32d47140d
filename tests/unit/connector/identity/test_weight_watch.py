"""A look at the weights costs the engine nothing but the look."""

from __future__ import annotations

import weakref
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

import torch

from kvoffload.connector.common.step_plan import WeightDigests
from kvoffload.connector.identity import weight_watch
from kvoffload.connector.identity.weight_watch import LOOKED_AT, PAUSE_S, WeightWatch
from kvoffload.connector.identity.weights import ModelWeights


def weights(*values: float, **more: Any) -> ModelWeights:
    return ModelWeights(tensors=tuple((f"w{at}", torch.tensor([value])) for at, value in enumerate(values)), **more)


def take(found: ModelWeights) -> WeightDigests:
    return WeightWatch(lambda: found).take()


def test_equal_weights_have_equal_digests() -> None:
    first = take(weights(1, 2))
    assert first == take(weights(1, 2))
    assert first.name
    assert first.name == first.proof
    assert not {*first} & {*take(weights(1, 3))}


def test_experts_of_one_replica_are_part_of_the_proof_and_not_of_the_name() -> None:
    one, other = (take(weights(1, value, apart=frozenset({"w1"}))) for value in (2, 3))
    assert one.name == other.name
    assert one.proof != other.proof
    assert one.name != take(weights(9, 2, apart=frozenset({"w1"}))).name


def test_engines_that_share_are_told_by_the_same_digest(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        names = [take(weights(1, value, apart=frozenset({"w1"}))).name for value in (2, 3)]
    told = [record.getMessage().split()[1] for record in caplog.records]
    assert told == [f"{name.hex()[: weight_watch.SHOWN_DIGITS]}:" for name in names]
    assert told[0] == told[1]


def test_what_is_hidden_leaves_a_name_and_no_proof(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        digests = take(weights(1, 2, hidden="w9"))
    assert digests == WeightDigests(name=take(weights(1, 2)).name)
    assert "w9 is packed and cannot be read" in caplog.text


@pytest.mark.parametrize("fault", [RuntimeError("out of memory"), ValueError(), AttributeError("no such thing")])
@pytest.mark.parametrize("where", ["find", "sample"])
def test_a_look_that_fails_is_told_once_and_is_no_proof(
    fault: Exception, where: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*given: object) -> Any:
        raise fault

    watch = WeightWatch(fail if where == "find" else lambda: weights(1))
    if where == "sample":
        monkeypatch.setattr(weight_watch, "sample_tensors", fail)
    with caplog.at_level("INFO"):
        assert [watch.take() for _ in range(3)] == [WeightDigests()] * 3
    lines = [record.message for record in caplog.records if record.name == weight_watch.__name__]
    assert len(lines) == 1
    assert f"cannot be read ({str(fault) or 'ValueError'})" in lines[0]


def test_a_model_that_is_not_found_is_told() -> None:
    assert take(ModelWeights(complaint="the engine names no layers")) == WeightDigests()


def test_no_weight_is_kept_alive() -> None:
    held: list[torch.Tensor] = [torch.ones(4)]
    watch = WeightWatch(lambda: ModelWeights(tensors=tuple(("w", one) for one in held)))
    watch.take()
    seen = weakref.ref(held[0])
    held.clear()
    assert seen() is None


# ---- between two steps ----


class Model:
    """Parameters, and a clock."""

    def __init__(self, parameters: int) -> None:
        self.parameters = {f"w{at}": torch.nn.Parameter(torch.full((4,), float(at))) for at in range(parameters)}
        self.apart: frozenset[str] = frozenset()
        self.looks = 0
        self.now_s = 0.0
        self.watch = WeightWatch(self.find, lambda: self.now_s)

    def find(self) -> ModelWeights:
        self.looks += 1
        return ModelWeights(tensors=tuple(self.parameters.items()), apart=self.apart)

    def update(self, *names: str) -> None:
        for name in names or self.parameters:
            self.parameters[name].data.add_(1)

    def has_changed(self, after_s: float = PAUSE_S) -> bool:
        self.now_s += after_s
        return self.watch.has_changed()


@pytest.mark.parametrize("parameters", [1, LOOKED_AT, 10 * LOOKED_AT])
def test_weights_that_change_in_a_pause_are_seen_once(parameters: int) -> None:
    model = Model(parameters)
    assert [model.has_changed() for _ in range(3)] == [False] * 3
    model.update()
    assert [model.has_changed() for _ in range(3)] == [True, False, False]
    assert model.looks == 1


def test_nobody_looks_while_steps_follow_each_other() -> None:
    model = Model(3)
    model.has_changed()
    model.update()
    assert [model.has_changed(after_s=PAUSE_S / 2) for _ in range(5)] == [False] * 5
    assert model.has_changed()


def test_what_was_looked_at_as_a_whole_is_what_later_looks_are_compared_with() -> None:
    """After a reset all ranks look: an update that was told is none that was not."""
    model = Model(3)
    model.has_changed()
    model.update()
    model.watch.take()
    assert [model.has_changed() for _ in range(2)] == [False] * 2
    model.update()
    assert model.has_changed()


def test_parameters_that_are_replaced_are_looked_for_again() -> None:
    model = Model(3)
    model.has_changed()
    model.parameters["w1"] = torch.nn.Parameter(model.parameters["w1"].detach().clone())
    assert not model.has_changed()
    assert model.looks == 2
    model.parameters["w1"] = torch.nn.Parameter(model.parameters["w1"].detach() + 1)
    assert model.has_changed()


def test_experts_that_move_while_the_engine_runs_are_not_looked_at() -> None:
    model = Model(3)
    model.apart = frozenset({"w1"})
    model.has_changed()
    model.update("w1")
    assert not model.has_changed()
    model.update("w2")
    assert model.has_changed()


def test_a_look_that_fails_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model(3)
    model.has_changed()
    with monkeypatch.context() as patch:
        patch.setattr(weight_watch, "sample_tensors", lambda tensors: 1 / 0)
        model.update()
        assert not model.has_changed()
    assert not model.has_changed(), "there is nothing to compare with"
    model.update()
    assert model.has_changed()
