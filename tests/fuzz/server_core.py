"""Everything that peers may do to a server's core: frames on connections, greetings, ends, ticks."""

from tests.kit.server.core_bytes import make_seeds
from tests.kit.server.core_bytes import serve_all as run

__all__ = ["make_seeds", "run"]
