"""A look at the weights costs the engine nothing but the look."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

import torch

from kvoffload.connector import weight_watch
from kvoffload.connector.model_weights import ModelWeights
from kvoffload.connector.step_plan import WeightDigests
from kvoffload.connector.weight_watch import WeightWatch


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


def test_what_is_hidden_leaves_a_name_and_no_proof(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        digests = take(weights(1, 2, hidden="w9"))
    assert digests == WeightDigests(name=take(weights(1, 2)).name)
    assert "w9 is packed where nobody can see it" in caplog.text


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
    assert f"cannot be looked at ({str(fault) or 'ValueError'})" in lines[0]


def test_a_model_that_is_not_found_is_told() -> None:
    assert take(ModelWeights(complaint="the engine names no layers")) == WeightDigests()


def test_no_weight_is_kept_alive() -> None:
    import weakref

    held: list[torch.Tensor] = [torch.ones(4)]
    watch = WeightWatch(lambda: ModelWeights(tensors=tuple(("w", one) for one in held)))
    watch.take()
    seen = weakref.ref(held[0])
    held.clear()
    assert seen() is None
