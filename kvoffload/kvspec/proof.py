"""Nothing forgotten (P3): every byte of every KV allocation has exactly one owner, or the engine does not start.

The proof enumerates no blocks in normal cases. Families of equal stride and count whose bases lie within one period
form a band: one period of a band stands for all of them. Bands that do not touch are then laid end to end. Only bands
that interleave with others are expanded block by block, up to MAX_PIECES.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple, NoReturn

from kvoffload.errors import GeometryError, HoleError, OverlapError
from kvoffload.kvspec.completeness import AllocationReport, CompletenessReport
from kvoffload.kvspec.geometry import KVGeometry, iter_claimed_layers
from kvoffload.kvspec.placement import Allocation
from kvoffload.kvspec.tiling import NOBODY, Claim, ClaimKind, Coverage, Piece, cover

MAX_PIECES = 1 << 21
"""Pieces that interleaved bands may be expanded to: some hundreds of MB and seconds, once at start."""


_KINDS = (ClaimKind.PAGE, ClaimKind.EXCLUSION, ClaimKind.PADDING)


class _Span(NamedTuple):
    """Claims whose extents meet, and the addresses between the first and the last byte of them."""

    claims: list[Claim]
    start: int
    end: int
    is_band: bool


class _Totals(NamedTuple):
    page: int
    excluded: int
    padding: int


def prove_complete(geometry: KVGeometry) -> CompletenessReport:
    """The report, or HoleError or OverlapError for the first bad byte of the first bad allocation."""
    claims = _collect(geometry)
    return CompletenessReport(
        num_blocks=geometry.num_blocks,
        allocations=tuple(
            _prove_allocation(allocation, claims.get(allocation.name, [])) for allocation in geometry.allocations
        ),
        aliases=tuple((layer.name, layer.alias_of) for layer in geometry.layers.values() if layer.alias_of),
        elsewhere=tuple(
            (layer.name, layer.excluded)
            for layer in geometry.layers.values()
            if layer.excluded and not geometry.placements_of[layer.name]
        ),
        overlays=geometry.overlays,
    )


def _collect(geometry: KVGeometry) -> dict[str, list[Claim]]:
    names = [group.name for group in geometry.groups]
    overlay_of = {name: index for index, overlay in enumerate(geometry.overlays) for name in overlay}
    claims: dict[str, list[Claim]] = defaultdict(list)
    for layer, placement in iter_claimed_layers(geometry):
        group = geometry.group_of[layer.name]
        kind = ClaimKind.EXCLUSION if layer.excluded else ClaimKind.PAGE
        label = f"excluded layer {layer.name} ({layer.excluded})" if layer.excluded else placement.label
        owned = [(kind, label, run) for run in placement.runs]
        owned += [(ClaimKind.PADDING, f"padding of layer {layer.name}", run) for run in placement.padding]
        claims[placement.allocation] += [
            Claim(
                label=text,
                kind=what,
                base=run.base,
                stride=run.stride,
                length=run.length,
                count=geometry.count_blocks(layer.name),
                group=group,
                overlay=overlay_of.get(names[group], NOBODY),
            )
            for what, text, run in owned
        ]
    ranges = [(claim, ClaimKind.PADDING, claim.group) for claim in geometry.paddings]
    for claim, what, name in (*ranges, *((claim, ClaimKind.EXCLUSION, "") for claim in geometry.exclusions)):
        claims[claim.allocation].append(
            Claim(
                label=claim.label,
                kind=what,
                base=claim.base,
                stride=claim.stride,
                length=claim.length,
                count=claim.count,
                group=names.index(name) if name else NOBODY,
                overlay=overlay_of.get(name, NOBODY),
            )
        )
    return claims


def _prove_allocation(allocation: Allocation, claims: list[Claim]) -> AllocationReport:
    size = allocation.size_bytes
    covered = 0
    page = excluded = padding = 0
    for span in _find_spans(claims, size):
        if span.start > covered:
            _raise_hole(allocation, claims, covered, span.start)
        totals = _prove_band(allocation, claims, span) if span.is_band else _prove_mix(allocation, claims, span)
        page, excluded, padding = page + totals.page, excluded + totals.excluded, padding + totals.padding
        covered = max(covered, min(span.end, size))
    if covered < size:
        _raise_hole(allocation, claims, covered, size)
    assert page + excluded + padding == size
    return AllocationReport(
        name=allocation.name,
        size_bytes=size,
        page_bytes=page,
        excluded_bytes=excluded,
        padding_bytes=padding,
        layers=_sum_by_label(claim for claim in claims if claim.kind is ClaimKind.PAGE),
        exclusions=_sum_by_label(claim for claim in claims if claim.kind is ClaimKind.EXCLUSION),
    )


def _find_spans(claims: Sequence[Claim], size: int) -> list[_Span]:
    """Bands in order of address; bands that meet are one span, to be expanded."""
    families: dict[tuple[int, int], list[Claim]] = defaultdict(list)
    for claim in sorted(claims, key=lambda claim: claim.base):
        # The stride of a single interval says nothing.
        families[(claim.stride, claim.count) if claim.count > 1 else (0, 1)].append(claim)
    bands: list[_Span] = []
    for (stride, count), family in families.items():
        members: list[Claim] = []
        for claim in family:
            if members and (count == 1 or claim.base >= members[0].base + stride):
                bands += _as_bands(members, size)
                members = []
            members.append(claim)
        bands += _as_bands(members, size)
    spans: list[_Span] = []
    for band in sorted(bands, key=lambda band: (band.start, band.end)):
        if spans and band.start < spans[-1].end:
            met = spans.pop()
            band = _Span(met.claims + band.claims, met.start, max(met.end, band.end), is_band=False)  # noqa: PLW2901
        spans.append(band)
    return spans


def _as_bands(members: list[Claim], size: int) -> list[_Span]:
    """The band of these claims; none if nothing of it is inside the allocation."""
    start, first = members[0].base, members[0]
    if start + (first.count - 1) * first.stride >= size:
        # Only padding may end outside (the geometry sees to that): its last repetition is cut off altogether.
        members = [replace(claim, count=claim.count - 1) for claim in members if claim.count > 1]
        return _as_bands(members, size) if members else []
    reach = max(claim.base + claim.length for claim in members) - start
    # A family that reaches into its own next period is no band: its period does not stand for the others.
    fits = first.count == 1 or reach <= first.stride
    return [_Span(members, start, max(claim.end for claim in members), is_band=fits)]


def _prove_band(allocation: Allocation, claims: list[Claim], band: _Span) -> _Totals:
    first = band.claims[0]
    high = band.start + first.stride if first.count > 1 else min(band.end, allocation.size_bytes)
    period = cover(band.claims, low=band.start, high=high, repetitions=1)
    _refuse_faults(allocation, claims, period, band.claims)
    # The last repetition may be cut off by the end of the allocation (padding only, the geometry sees to that).
    room = allocation.size_bytes - (first.count - 1) * first.stride
    return _Totals(
        *((first.count - 1) * period.bytes_of(kind, limit=high) + period.bytes_of(kind, limit=room) for kind in _KINDS)
    )


def _prove_mix(allocation: Allocation, claims: list[Claim], span: _Span) -> _Totals:
    pieces = sum(claim.count for claim in span.claims)
    high = min(span.end, allocation.size_bytes)
    if pieces > MAX_PIECES:
        _refuse_unprovable(allocation, span, pieces)
    whole = cover(span.claims, low=span.start, high=high, repetitions=max(claim.count for claim in span.claims))
    _refuse_faults(allocation, claims, whole, span.claims)
    return _Totals(*(whole.bytes_of(kind, limit=high) for kind in _KINDS))


def _refuse_faults(allocation: Allocation, claims: list[Claim], coverage: Coverage, members: list[Claim]) -> None:
    conflict, hole = coverage.first_conflict(members), coverage.first_hole()
    if conflict is not None and (hole is None or max(conflict[0].start, conflict[1].start) < hole[0]):
        _raise_overlap(allocation, *conflict)
    if hole is not None:
        _raise_hole(allocation, claims, *hole)


def _refuse_unprovable(allocation: Allocation, span: _Span, pieces: int) -> NoReturn:
    # A collision among the first blocks is a collision, and says more than that there are too many blocks.
    start = cover(span.claims, low=span.start, high=min(span.end, allocation.size_bytes), repetitions=4)
    conflict = start.first_conflict(span.claims)
    if conflict is not None:
        _raise_overlap(allocation, *conflict)
    raise GeometryError(
        f"allocation {allocation.name}, bytes {span.start} to {span.end}: {pieces} pieces with different strides "
        f"interleave ({span.claims[0].label}, {span.claims[-1].label}), at most {MAX_PIECES} can be checked",
        remedy="use one block stride for all layers that lie between each other",
        allocation=allocation.name,
    )


def _raise_overlap(allocation: Allocation, one: Piece, other: Piece) -> NoReturn:
    start, end = max(one.start, other.start), min(one.end, other.end)
    same_group = one.claim.group == other.claim.group
    overlaid = one.claim.overlay == other.claim.overlay != NOBODY and not same_group
    why = ""
    if overlaid:
        why = ": their groups overlay each other, but block by block"
    raise OverlapError(
        f"allocation {allocation.name}, bytes {start} to {end}: claimed by {_name(one)} and by {_name(other)}{why}",
        remedy=(
            "re-stride the group whose blocks are not together (restride_block_major)"
            if overlaid
            else "correct an offset or a stride, or declare that they share (alias_of, overlays)"
        ),
        allocation=allocation.name,
        start=start,
        end=end,
        claimants=(one.claim.label, other.claim.label),
    )


def _raise_hole(allocation: Allocation, claims: list[Claim], start: int, end: int) -> NoReturn:
    before = max(
        (piece for claim in claims if (piece := _last_before(claim, start))), key=lambda p: p.end, default=None
    )
    after = min((piece for claim in claims if (piece := _first_after(claim, end))), key=lambda p: p.start, default=None)
    neighbours = (
        f"after {_name(before)}" if before else "at the start of the allocation",
        f"before {_name(after)}" if after else "at its end",
    )
    raise HoleError(
        f"allocation {allocation.name}, bytes {start} to {end} belong to nothing: {' and '.join(neighbours)}",
        remedy="declare the layer, the padding (slot_bytes, Padding) or an Exclusion that these bytes are",
        allocation=allocation.name,
        start=start,
        end=end,
        claimants=(before.claim.label if before else "", after.claim.label if after else ""),
    )


def _last_before(claim: Claim, address: int) -> Piece | None:
    """The claim's last interval that ends at or before an address."""
    room = address - claim.base - claim.length
    if room < 0:
        return None
    block = min(room // claim.stride, claim.count - 1) if claim.count > 1 else 0
    start = claim.base + block * claim.stride
    return Piece(claim, block, start, start + claim.length)


def _first_after(claim: Claim, address: int) -> Piece | None:
    """The claim's first interval that starts at or after an address."""
    block = max(0, -((claim.base - address) // claim.stride)) if claim.count > 1 else 0
    start = claim.base + block * claim.stride
    return Piece(claim, block, start, start + claim.length) if block < claim.count and start >= address else None


def _name(piece: Piece) -> str:
    return f"{piece.claim.label} (block {piece.block})" if piece.claim.count > 1 else piece.claim.label


def _sum_by_label(claims: Iterable[Claim]) -> tuple[tuple[str, int], ...]:
    totals: dict[str, int] = defaultdict(int)
    for claim in claims:
        totals[claim.label] += claim.length * claim.count
    return tuple(totals.items())
