"""What does a request to the cache server cost, against an echo of the same bytes?"""

from __future__ import annotations

from collections.abc import Iterator

from kvoffload.bench.base import Progress, Result


class RpcBenchmark:
    """A real server, an echo server and clients, each a process of its own."""

    name = "rpc"
    question = __doc__ or ""

    def run(self, progress: Progress) -> Iterator[Result]:
        """Look-ups, acquires alone and with other clients, many clients, and an idle server."""
        # It brings ZeroMQ, which a command line need not wait for.
        from kvoffload.bench.requests import measure_requests

        yield from measure_requests(self.name, progress)
