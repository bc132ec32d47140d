"""Which servers had the memory of a path's domains, so that their successor takes no other's.

Another server of the same user may have memory of a domain of the same name, and an engine that uses both may offer
it.
"""

from __future__ import annotations

import json
import logging
import os

logger = logging.getLogger(__name__)

MAX_SERVERS = 16
"""Number of servers that are remembered for each domain. Older ones have had so many successors that their memory is
forgotten."""
MAX_BYTES = 1 << 20


class MemoryRecord:
    """The record, in a file that only the server's user can write, as one line of JSON: boot ids by domain."""

    def __init__(self, file: int) -> None:
        """Reads what former servers have recorded. The caller keeps the descriptor, and keeps it open for as long as
        this is used."""
        self._file = file
        line, _, _ = os.pread(file, MAX_BYTES, 0).partition(b"\n")
        self._servers = _read(line)
        self.is_new = not line
        """Whether no former server has recorded anything, as is so for the first one."""

    def admits(self, domain: str, boot_id: int) -> bool:
        """Whether memory of this server may be the domain's. If nothing was recorded, any memory may."""
        known = self._servers.get(domain)
        return known is None or boot_id in known

    def add(self, domain: str, boot_id: int) -> None:
        """Records that this server serves the domain's memory from here on. OSError: it cannot be recorded."""
        known = self._servers.setdefault(domain, [])
        if boot_id not in known:
            known.append(boot_id)
        del known[:-MAX_SERVERS]
        # The line first, and only then the end of the file: a server that is killed in between leaves a whole line.
        line = json.dumps(self._servers).encode() + b"\n"
        os.pwrite(self._file, line, 0)
        os.ftruncate(self._file, len(line))


def _read(line: bytes) -> dict[str, list[int]]:
    if not line:
        return {}
    try:
        found = json.loads(line)
        return {str(domain): [int(boot_id) for boot_id in boot_ids] for domain, boot_ids in found.items()}
    except (ValueError, TypeError, AttributeError, RecursionError):
        logger.warning("what former servers recorded of their memory cannot be read: it is not asked")
        return {}
