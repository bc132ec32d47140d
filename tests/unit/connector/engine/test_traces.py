"""A traced request's spans are of its own trace; nothing is noted of any other."""

from __future__ import annotations

import builtins
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")
pytest.importorskip("opentelemetry.sdk", reason="OpenTelemetry's SDK is not installed")

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from kvoffload.connector import scheduler_parts
from kvoffload.connector.engine.traces import NAME, Traces, open_traces
from tests.kit.connector.measured import measured_engine

TRACE, PARENT = 0x4BF92F3577B34DA6A3CE929D0E0E4736, 0x00F067AA0BA902B7
HEADERS = {"traceparent": f"00-{TRACE:032x}-{PARENT:016x}-01"}


class Collector:
    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.traces = Traces(provider.get_tracer(NAME))

    def spans(self) -> tuple[ReadableSpan, ...]:
        return self._exporter.get_finished_spans()


def test_a_span_has_its_time_and_its_parent() -> None:
    collector = Collector()
    collector.traces.note(HEADERS, "load", 0.25, {"blocks": 3, "bytes": 4096})
    (span,) = collector.spans()
    assert span.name == "kvoffload load"
    assert span.context is not None
    assert span.parent is not None
    assert (span.context.trace_id, span.parent.span_id) == (TRACE, PARENT)
    assert span.start_time is not None
    assert span.end_time == span.start_time + 250_000_000
    assert dict(span.attributes or {}) == {"kvoffload.blocks": 3, "kvoffload.bytes": 4096}


@pytest.mark.parametrize("headers", [None, {}])
def test_a_request_that_is_not_traced_has_no_span(headers: dict[str, str] | None) -> None:
    collector = Collector()
    collector.traces.note(headers, "load", 0.25, {})
    assert collector.spans() == ()


def test_a_trace_that_is_not_sampled_has_no_span() -> None:
    collector = Collector()
    collector.traces.note({"traceparent": HEADERS["traceparent"][:-2] + "00"}, "load", 0.25, {})
    assert collector.spans() == ()


def test_headers_that_are_nonsense_are_a_trace_of_their_own() -> None:
    collector = Collector()
    collector.traces.note({"traceparent": "nonsense"}, "load", 0.25, {})
    (span,) = collector.spans()
    assert span.parent is None


def test_an_engine_that_traces_nothing_needs_no_opentelemetry(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name.startswith("opentelemetry"):
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    open_traces(None).note(HEADERS, "load", 0.1, {})
    open_traces("http://127.0.0.1:4317").note(HEADERS, "load", 0.1, {})


def test_a_hit_is_found_and_loaded_in_its_requests_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    collector = Collector()
    monkeypatch.setattr(scheduler_parts, "open_traces", lambda endpoint: collector.traces)
    engine = measured_engine()
    request = engine.arrive("second", range(30))
    request.trace_headers = HEADERS
    engine.admit(request)
    engine.report(engine.step())
    found, loaded = collector.spans()
    assert (found.name, loaded.name) == ("kvoffload find", "kvoffload load")
    told = dict(found.attributes or {})
    assert (told["kvoffload.asked"], told["kvoffload.promised"], told["kvoffload.miss"]) == (30, 28, "too_short")
    sources = {name: told[f"kvoffload.tokens.{name}"] for name in ("engine", "memory", "computed")}
    assert sources == {"engine": 0, "memory": 28, "computed": 2}
    assert told["kvoffload.saved_seconds"] == 0, "nothing is known of the engine's speed yet"
    assert dict(loaded.attributes or {})["kvoffload.bytes"] > 0
    assert all(span.context is not None and span.context.trace_id == TRACE for span in (found, loaded))
