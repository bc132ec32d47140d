"""Adds spans to the traces of requests, with OpenTelemetry and through the exporter that the engine has set up."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

logger = logging.getLogger(__name__)

NAME = "kvoffload"
INSTALL = "pip install opentelemetry-sdk opentelemetry-exporter-otlp"


class Traces:
    """Owned by the scheduler's thread. Without a tracer it notes nothing; with one, only requests that have a trace."""

    def __init__(self, tracer: Tracer | None = None) -> None:
        self._tracer = tracer

    def has(self, headers: Mapping[str, str] | None) -> bool:
        """Whether a request with these headers is traced."""
        return self._tracer is not None and bool(headers)

    def note(
        self, headers: Mapping[str, str] | None, name: str, seconds: float, attributes: Mapping[str, float | str]
    ) -> None:
        """Adds a span that ends now to the trace of a request. The engine's exporter sends it from a bounded queue, on
        a thread of its own."""
        if self._tracer is None or not headers:
            return
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        end_ns = time.time_ns()
        span = self._tracer.start_span(
            f"{NAME} {name}",
            context=TraceContextTextMapPropagator().extract(headers),
            start_time=end_ns - int(seconds * 1e9),
            attributes={f"{NAME}.{key}": value for key, value in attributes.items()},
        )
        span.end(end_ns)


def open_traces(endpoint: str | None) -> Traces:
    """Opens the engine's traces. `endpoint` is the address to which the engine sends its spans; None: nowhere."""
    if not endpoint:
        return Traces()
    try:
        from opentelemetry import trace
    except ImportError:
        logger.warning("the engine traces requests, and OpenTelemetry is missing: `%s`", INSTALL)
        return Traces()
    return Traces(trace.get_tracer(NAME))
