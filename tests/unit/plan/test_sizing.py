"""How many tokens fit, and when a load pays."""

from __future__ import annotations

import pytest

from kvoffload.plan.model_shape import ShapeSettings, read_shape
from kvoffload.plan.sizing import Conversation, Place, Sizing, hold, size_model
from tests.kit.plan.configs import GPT_OSS, LLAMA_8B, NEMOTRON_H


def sizing_of(config: dict[str, object]) -> Sizing:
    return size_model(read_shape(config, ShapeSettings()))


LLAMA, OSS, HYBRID = sizing_of(LLAMA_8B), sizing_of(GPT_OSS), sizing_of(NEMOTRON_H)


def test_a_hit_loads_all_tokens_one_window_and_one_state() -> None:
    assert LLAMA.hit_bytes(1000) == 131_072_000
    assert OSS.hit_bytes(1000) == 36_864 * (1000 + 128)
    assert OSS.hit_bytes(100) == 36_864 * 200
    states = sum(group.state_bytes for group in HYBRID.groups)
    assert HYBRID.hit_bytes(10) == 8192 * 10 + states


def test_a_conversation_keeps_a_window_and_a_state_wherever_it_may_go_on() -> None:
    talk = Conversation(tokens=1000, turns=2)
    assert LLAMA.conversation_bytes(talk) == 131_072_000
    assert OSS.conversation_bytes(talk) == 36_864 * (1000 + 4 * 128)
    assert OSS.conversation_bytes(Conversation(tokens=1000, turns=50)) == 36_864 * 2000, "no more than all of them"
    states = sum(group.state_bytes for group in HYBRID.groups)
    assert HYBRID.conversation_bytes(talk) == 8_192_000 + 4 * states


def test_from_where_on_a_load_pays() -> None:
    rates = {"bytes_per_s": 10e9, "prefill_tokens_per_s": 1000.0, "fixed_s": 0.01}
    tokens = LLAMA.break_even_tokens(**rates)
    assert tokens is not None
    for length, pays in ((tokens, True), (tokens - 1, False)):
        assert (0.01 + LLAMA.hit_bytes(length) / 10e9 < length / 1000) is pays
    assert LLAMA.break_even_tokens(**(rates | {"prefill_tokens_per_s": 100_000.0})) is None
    assert HYBRID.break_even_tokens(**rates) is not None


def test_places_hold_what_fits() -> None:
    places = [
        Place(name="memory", size_bytes=1 << 40, bytes_per_s=25e9),
        Place(name="disk", size_bytes=1, bytes_per_s=3e9),
    ]
    memory, disk = hold(LLAMA, places, Conversation(tokens=8000), prefill=0, fixed_s=0.5)
    assert memory.tokens == (1 << 40) // 131_072
    assert memory.conversations == (1 << 40) // (131_072 * 8000)
    assert memory.load_s == pytest.approx(0.5 + 131_072_000 / 25e9)
    assert memory.break_even_tokens is None
    assert (disk.tokens, disk.conversations) == (0, 0)
    [known] = hold(LLAMA, places[:1], Conversation(), prefill=1000, fixed_s=0.5)
    assert known.break_even_tokens is not None


def test_alike_layers_are_one_group() -> None:
    assert [(group.what, group.layers) for group in OSS.groups] == [("sliding window", 18), ("attention", 18)]
    assert [(group.what, group.layers) for group in HYBRID.groups] == [("Mamba 2", 3), ("attention", 2)]
