"""One direction of a link: reads go before writes, and neither waits for what comes later."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(eq=False)
class Wire:
    """A link that sends bytes at this rate and in order. All calls use one clock: times do not fall."""

    bytes_per_s: float
    read_bytes: int = 0
    written_bytes: int = 0
    _reads_end_s: float = 0.0
    _all_end_s: float = 0.0

    def expect_read(self, now_s: float, size_bytes: int) -> float:
        """When a read that is asked for now has come."""
        return max(now_s, self._reads_end_s) + size_bytes / self.bytes_per_s

    def read(self, now_s: float, size_bytes: int) -> float:
        end_s = self.expect_read(now_s, size_bytes)
        self._reads_end_s = end_s
        # Writes wait as much longer.
        self._all_end_s = max(now_s, self._all_end_s) + size_bytes / self.bytes_per_s
        self.read_bytes += size_bytes
        return end_s

    def behind_s(self, now_s: float) -> float:
        """How long a write would wait."""
        return max(self._all_end_s - now_s, 0.0)

    def write(self, now_s: float, size_bytes: int) -> float:
        self._all_end_s = max(now_s, self._all_end_s) + size_bytes / self.bytes_per_s
        self.written_bytes += size_bytes
        return self._all_end_s
