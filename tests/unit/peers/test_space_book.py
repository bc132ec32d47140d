from __future__ import annotations

from kvoffload.peers import SpaceBook
from tests.unit.cache.cache_model import HYBRID, PLAIN


def test_the_first_word_about_an_identity_stays() -> None:
    book = SpaceBook()
    book.learn(3, b"F" * 32, HYBRID)
    book.learn(4, b"F" * 32, PLAIN)
    space = book.find(b"F" * 32)
    assert space is not None
    assert (space.number, space.geometry) == (3, HYBRID)
    assert book.find(b"G" * 32) is None


def test_a_group_is_found_by_number_and_size() -> None:
    book = SpaceBook()
    book.learn(3, b"F" * 32, HYBRID)
    space = book.find(b"F" * 32)
    assert space is not None
    assert space.find_group(0, HYBRID.groups[0].record_bytes) is HYBRID.groups[0]
    assert space.find_group(0, 1) is None
    assert space.find_group(len(HYBRID.groups), HYBRID.groups[0].record_bytes) is None
    assert space.find_group(-1, HYBRID.groups[-1].record_bytes) is None


def test_an_identity_in_use_is_not_forgotten() -> None:
    book = SpaceBook()
    book.learn(3, b"F" * 32, PLAIN)
    with book.use(b"F" * 32) as is_known:
        assert is_known
        with book.use(b"F" * 32):
            assert not book.forget(b"F" * 32)
        assert not book.forget(b"F" * 32)
    with book.use(b"G" * 32) as is_known:
        assert not is_known
        assert book.forget(b"G" * 32)
    assert book.forget(b"F" * 32)
    assert book.find(b"F" * 32) is None
