"""What do a request to the cache server and the server's failures cost, against an echo of the same bytes?"""

from __future__ import annotations

from collections.abc import Iterator

from kvoffload.bench.base import Progress, Result


class RpcBenchmark:
    """A real server, an echo server and clients, each a process of its own."""

    name = "rpc"
    question = __doc__ or ""

    def run(self, progress: Progress) -> Iterator[Result]:
        """Look-ups, acquires alone and with other clients, many clients, an idle server, and one that fails."""
        # They bring ZeroMQ, which a command line need not wait for.
        from kvoffload.bench.outage import measure_outages
        from kvoffload.bench.requests import measure_requests

        yield from measure_requests(self.name, progress)
        yield from measure_outages(self.name, progress)
