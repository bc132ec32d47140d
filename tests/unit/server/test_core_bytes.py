"""The server's core survives whatever peers do. tests/fuzz runs the same under a fuzzer that looks for new branches."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.kit.server.core_bytes import make_seeds, serve_all


def test_every_seed_is_served() -> None:
    for seed in make_seeds():
        serve_all(seed)


SEEDS = list(make_seeds())


@given(st.lists(st.sampled_from(SEEDS), min_size=1, max_size=6), st.data())
def test_seeds_with_wrong_bytes_break_nothing(seeds: list[bytes], data: st.DataObject) -> None:
    steps = bytearray(b"".join(seeds))
    for _ in range(data.draw(st.integers(0, 4))):
        steps[data.draw(st.integers(0, len(steps) - 1))] = data.draw(st.integers(0, 255))
    serve_all(bytes(steps))
