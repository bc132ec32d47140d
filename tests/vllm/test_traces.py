"""A request that a caller traces is one trace, from vLLM's own span to the blocks that were loaded: sent by vLLM's
exporter, received as a collector does."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from tests.vllm import connector_probe as probe
from tests.vllm.engine import Engine, EnginePool, make_prompt, start_engine
from tests.vllm.equality import restorable
from tests.vllm.tiny_models import DENSE

pytestmark = pytest.mark.vllm

TOKENS = 700
WAIT_S = 60.0
TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
HEADERS = {"traceparent": f"00-{TRACE}-{PARENT}-01"}


class Collector(ThreadingHTTPServer):
    """Takes OTLP over HTTP on loopback."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Taker)
        self.spans: dict[str, list[Any]] = {}
        """Spans of TRACE by name."""

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1/traces"


class _Taker(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        request = ExportTraceServiceRequest()
        request.ParseFromString(self.rfile.read(int(self.headers["Content-Length"])))
        assert isinstance(self.server, Collector)
        for of_resource in request.resource_spans:
            for of_scope in of_resource.scope_spans:
                for span in of_scope.spans:
                    if span.trace_id.hex() == TRACE:
                        self.server.spans.setdefault(span.name, []).append(span)
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Keeps requests out of the log."""


@contextmanager
def collecting() -> Iterator[Collector]:
    collector = Collector()
    thread = threading.Thread(target=collector.serve_forever)
    thread.start()
    try:
        yield collector
    finally:
        collector.shutdown()
        thread.join()
        collector.server_close()


def generate_traced(engine: Engine, prompt: list[int], name: str) -> None:
    """`LLM.generate` takes no headers; a server does, and hands them over like this."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, detokenize=False)
    llm = engine.llm.llm_engine
    llm.add_request(name, {"prompt_token_ids": prompt}, sampling, trace_headers=HEADERS)
    while llm.has_unfinished_requests():
        llm.step()


def attributes_of(span: Any) -> dict[str, Any]:
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in span.attributes}


def test_one_trace_reaches_from_the_request_to_its_blocks(engines: EnginePool, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = pytest.importorskip("opentelemetry.trace", reason="OpenTelemetry is not installed")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "")  # vLLM sets it, for its children
    engines.leave_process()
    with collecting() as collector:
        engine = start_engine(
            DENSE,
            engines.model_folder(DENSE),
            kv_transfer_config=probe.transfer(),
            otlp_traces_endpoint=collector.endpoint,
            disable_log_stats=False,  # vLLM traces nothing else
        )
        try:
            probe.prepare(engine)
            prompt = make_prompt(seed=81, length=TOKENS)
            generate_traced(engine, prompt, "first")
            engine.drain()
            engine.reset_local()
            generate_traced(engine, prompt, "second")
            engine.drain()
            end_s = time.monotonic() + WAIT_S
            while len(collector.spans.get("kvoffload find", ())) < 2 or not collector.spans.get("kvoffload load"):
                assert time.monotonic() < end_s, collector.spans
                time.sleep(0.05)
        finally:
            engine.close()
            # vLLM's tracing stays for as long as this process; it must not keep sending to a closed collector.
            provider: Any = trace.get_tracer_provider()
            provider.shutdown()
        missed, hit = (attributes_of(span) for span in collector.spans["kvoffload find"])
        assert (missed["kvoffload.promised"], missed["kvoffload.miss"]) == (0, "never_seen")
        assert hit["kvoffload.promised"] == restorable(DENSE, TOKENS)
        (load,) = collector.spans["kvoffload load"]
        assert attributes_of(load)["kvoffload.blocks"] == restorable(DENSE, TOKENS) // DENSE.block_size
        assert load.parent_span_id.hex() == PARENT
        assert load.end_time_unix_nano > load.start_time_unix_nano
        own = [name for name in collector.spans if not name.startswith("kvoffload")]
        assert own, "vLLM's own span of the request is in the same trace"
