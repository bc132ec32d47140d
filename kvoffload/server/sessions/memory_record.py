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
"""Of a domain: those before them have been followed by so many, and their memory is forgotten."""
MAX_BYTES = 1 << 20


class MemoryRecord:
    """Lies in a file that only the server's user can write, as one line of JSON: boot ids by domain."""

    def __init__(self, file: int) -> None:
        """The descriptor stays the caller's, and open for as long as this is used. What a former server has recorded is
        read from it."""
        self._file = file
        line, _, _ = os.pread(file, MAX_BYTES, 0).partition(b"\n")
        self._servers = _read(line)
        self.is_new = not line
        """Whether no former server has recorded anything, as before the first one."""

    def admits(self, domain: str, boot_id: int) -> bool:
        """Whether memory of this server may be the domain's. Where nothing was recorded, any may."""
        known = self._servers.get(domain)
        return known is None or boot_id in known

    def add(self, domain: str, boot_id: int) -> None:
        """This server serves the domain's memory from here on. OSError: it cannot be recorded."""
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
