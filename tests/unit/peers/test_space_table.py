from __future__ import annotations

from kvoffload.peers import SpaceTable
from tests.kit.cache.cache_model import HYBRID, PLAIN


def test_the_first_word_about_an_identity_stays() -> None:
    table = SpaceTable()
    table.learn(3, b"F" * 32, HYBRID)
    table.learn(4, b"F" * 32, PLAIN)
    space = table.find(b"F" * 32)
    assert space is not None
    assert (space.number, space.geometry) == (3, HYBRID)
    assert table.find(b"G" * 32) is None


def test_a_group_is_found_by_number_and_size() -> None:
    table = SpaceTable()
    table.learn(3, b"F" * 32, HYBRID)
    space = table.find(b"F" * 32)
    assert space is not None
    assert space.find_group(0, HYBRID.groups[0].record_bytes) is HYBRID.groups[0]
    assert space.find_group(0, 1) is None
    assert space.find_group(len(HYBRID.groups), HYBRID.groups[0].record_bytes) is None
    assert space.find_group(-1, HYBRID.groups[-1].record_bytes) is None


def test_an_identity_in_use_is_not_forgotten() -> None:
    table = SpaceTable()
    table.learn(3, b"F" * 32, PLAIN)
    with table.use(b"F" * 32) as is_known:
        assert is_known
        with table.use(b"F" * 32):
            assert not table.forget(b"F" * 32)
        assert not table.forget(b"F" * 32)
    with table.use(b"G" * 32) as is_known:
        assert not is_known
        assert table.forget(b"G" * 32)
    assert table.forget(b"F" * 32)
    assert table.find(b"F" * 32) is None
