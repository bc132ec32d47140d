"""Parts of a promotion."""

from __future__ import annotations

from kvoffload.hash_rows import as_rows
from kvoffload.server.tiering.promotion_parts import Keep, Piece, Promotion
from kvoffload.server.tiering.settings import TierSpace, as_names
from tests.kit.cache.cache_model import HYBRID, fingerprint, make_chain

SPACE = TierSpace(number=1, fingerprint=fingerprint("model"), geometry=HYBRID)


def test_a_piece_has_the_size_of_all_its_shards() -> None:
    rows = as_rows(make_chain(1, 3))
    piece = Piece(SPACE, 0, rows, rows, as_names(rows), 0)
    assert piece.size_bytes == 3 * HYBRID.groups[0].record_bytes * HYBRID.groups[0].shards


def test_pieces_and_requests_are_who_they_are() -> None:
    rows = as_rows(make_chain(1, 3))
    pieces = {Piece(SPACE, 0, rows, rows, as_names(rows), 0) for _ in range(2)}
    assert len(pieces) == 2
    assert len({Promotion(lambda _: None, 16, 1.0, Keep(1, 1.0), 0.0) for _ in range(2)}) == 2


def test_what_comes_up_is_kept_until_the_last_part_has_ended() -> None:
    keep = Keep(2, 9.0)
    keep.end_part(1.0)
    assert keep.end_s == 9.0
    keep.end_part(2.0)
    assert keep.end_s == 2.0
