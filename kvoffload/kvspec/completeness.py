"""The result of a completeness proof: every byte of every allocation, by owner. `str()` is the table that people
read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class AllocationReport:
    """`page_bytes + excluded_bytes + padding_bytes` is `size_bytes`; each byte counts once, under the first that fits.

    `layers` and `exclusions` are what each claims for itself, in order of address; under an overlay several claim the
    same bytes, and the sum is larger.
    """

    name: str
    size_bytes: int
    page_bytes: int
    excluded_bytes: int
    padding_bytes: int
    layers: tuple[tuple[str, int], ...]
    exclusions: tuple[tuple[str, int], ...]

    @property
    def shared_bytes(self) -> int:
        """How much the layers' and exclusions' own sums exceed the bytes that they cover together."""
        claimed = sum(size for _, size in (*self.layers, *self.exclusions))
        return claimed - self.page_bytes - self.excluded_bytes


@dataclass(frozen=True, kw_only=True)
class CompletenessReport:
    """Proof that nothing is forgotten. `elsewhere`: excluded layers that have no bytes in these allocations."""

    num_blocks: int
    allocations: tuple[AllocationReport, ...]
    aliases: tuple[tuple[str, str], ...] = ()
    elsewhere: tuple[tuple[str, str], ...] = ()
    overlays: tuple[tuple[str, ...], ...] = ()

    @property
    def claims(self) -> dict[str, int]:
        """Bytes by what they are, each counted once."""
        return {
            "page": sum(report.page_bytes for report in self.allocations),
            "padding": sum(report.padding_bytes for report in self.allocations),
            "exclusion": sum(report.excluded_bytes for report in self.allocations),
        }

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield f"{self.num_blocks} blocks, {len(self.allocations)} allocations, every byte accounted for"
        for report in self.allocations:
            yield _row(f"allocation {report.name}", report.size_bytes)
            for label, size in (*report.layers, *report.exclusions):
                yield _row(f"  {label}", size)
            if report.shared_bytes:
                yield _row("  shared by overlaid groups", -report.shared_bytes)
            if report.padding_bytes:
                yield _row("  padding", report.padding_bytes)
        for overlay in self.overlays:
            yield f"groups {', '.join(overlay)} overlay each other"
        for layer, target in self.aliases:
            yield f"layer {layer} uses the pages of {target}"
        for layer, reason in self.elsewhere:
            yield f"layer {layer} is excluded: {reason}"


def _row(label: str, size: int) -> str:
    return f"{label:<60} {size:>20,} B"
