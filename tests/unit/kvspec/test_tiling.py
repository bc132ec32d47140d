"""Coverage of addresses by strided claims."""

from __future__ import annotations

import pytest

from kvoffload.kvspec.tiling import NOBODY, Claim, ClaimKind, Piece, cover, may_share

PAGE, EXCLUSION, PADDING = ClaimKind.PAGE, ClaimKind.EXCLUSION, ClaimKind.PADDING


def claim(
    base: int,
    length: int,
    *,
    label: str = "c",
    kind: ClaimKind = PAGE,
    stride: int = 10,
    count: int = 3,
    group: int = 0,
    overlay: int = NOBODY,
) -> Claim:
    return Claim(
        label=label, kind=kind, base=base, stride=stride, length=length, count=count, group=group, overlay=overlay
    )


def test_only_the_asked_repetitions_are_expanded() -> None:
    claims = [claim(0, 10, count=10**12)]
    one = cover(claims, low=0, high=10, repetitions=1)
    assert one.first_hole() is None
    assert cover(claims, low=0, high=40, repetitions=3).first_hole() == (30, 40)


def test_a_hole_runs_to_the_next_claim() -> None:
    coverage = cover([claim(2, 3), claim(7, 3)], low=0, high=30, repetitions=3)
    assert coverage.first_hole() == (0, 2)
    assert cover([claim(0, 5), claim(7, 3)], low=0, high=10, repetitions=1).first_hole() == (5, 7)


def test_a_conflict_is_the_one_at_the_lowest_address() -> None:
    claims = [claim(0, 6, label="a"), claim(8, 3, label="b"), claim(5, 3, label="c")]
    coverage = cover(claims, low=0, high=30, repetitions=3)
    pieces = coverage.first_conflict(claims)
    assert pieces is not None
    assert {piece.claim.label for piece in pieces} == {"a", "c"}
    assert {(piece.start, piece.end) for piece in pieces} == {(0, 6), (5, 8)}


def test_the_lower_kind_wins_a_shared_byte() -> None:
    claims = [
        claim(0, 4, kind=PAGE, group=0, overlay=7),
        claim(4, 6, kind=PADDING, group=0, overlay=7),
        claim(0, 6, kind=EXCLUSION, group=1, overlay=7),
        claim(6, 4, kind=PADDING, group=1, overlay=7),
    ]
    coverage = cover(claims, low=0, high=10, repetitions=1)
    assert coverage.first_conflict(claims) is None
    assert [coverage.bytes_of(kind, limit=10) for kind in (PAGE, EXCLUSION, PADDING)] == [4, 2, 4]
    assert [coverage.bytes_of(kind, limit=5) for kind in (PAGE, EXCLUSION, PADDING)] == [4, 1, 0]


@pytest.mark.parametrize(
    ("one", "other", "blocks", "allowed"),
    [
        ({"group": 0, "overlay": 1}, {"group": 1, "overlay": 1}, (2, 2), True),
        ({"group": 0, "overlay": 1}, {"group": 1, "overlay": 1}, (2, 3), False),
        ({"group": 0, "overlay": 1}, {"group": 1, "overlay": 1, "kind": PADDING}, (2, 3), True),
        ({"group": 0, "overlay": 1}, {"group": 1, "overlay": 1, "kind": EXCLUSION}, (2, 3), False),
        ({"group": 0, "overlay": 1}, {"group": 0, "overlay": 1}, (2, 2), False),
        ({"group": 0, "overlay": 1}, {"group": 1, "overlay": 2}, (2, 2), False),
        ({"group": 0}, {"group": 1}, (2, 2), False),
        ({"group": 0, "overlay": 1}, {"group": NOBODY, "kind": PADDING}, (2, 2), False),
        ({"group": NOBODY, "kind": PADDING}, {"group": NOBODY, "kind": PADDING}, (2, 2), False),
    ],
)
def test_who_may_share_a_byte(
    one: dict[str, int], other: dict[str, int], blocks: tuple[int, int], allowed: bool
) -> None:
    a, b = claim(0, 4, **one), claim(0, 4, **other)  # type: ignore[arg-type]
    first, second = Piece(a, blocks[0], 0, 4), Piece(b, blocks[1], 0, 4)
    assert may_share(first, second) is may_share(second, first) is allowed


def test_the_end_of_a_claim_is_that_of_its_last_interval() -> None:
    assert claim(3, 4).end == 27
