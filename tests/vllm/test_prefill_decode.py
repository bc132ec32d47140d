"""One engine computes prompts, another decodes from what the first has saved: vLLM's producer and consumer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.kit.children import child
from tests.kit.free_ports import free_port
from tests.vllm import connector_probe as probe
from tests.vllm.apart import Waiting, engine_of
from tests.vllm.cache_server import SharedServer
from tests.vllm.disk_servers import stats_of
from tests.vllm.engine import EnginePool, make_prompt
from tests.vllm.equality import answer, read_answer, restorable
from tests.vllm.http_service import CONNECTOR, Service
from tests.vllm.http_service import serving as serving_http
from tests.vllm.served_prompts import PROMPT_TOKENS, RESTORABLE
from tests.vllm.tiny_models import DENSE, GDN, SLIDING, TinyModel

pytestmark = pytest.mark.vllm

LENGTHS = (1300, 1280)
"""One ends within a block, the other with one."""


@contextmanager
def serving(folder: Path) -> Iterator[SharedServer]:
    with SharedServer(folder) as server:
        server.start()
        yield server


@pytest.mark.parametrize(
    "model",
    [pytest.param(DENSE, marks=pytest.mark.campaign), pytest.param(SLIDING, marks=pytest.mark.campaign), GDN],
    ids=lambda model: model.name,
)
def test_a_decoder_waits_for_what_a_prefill_engine_computes(
    engines: EnginePool, tmp_path: Path, model: TinyModel
) -> None:
    engines.leave_process()
    with (
        serving(tmp_path) as server,
        engine_of(engines, "kv_producer", server, model, has_own_processes=True, **probe.INSPECTED) as producer,
        engine_of(engines, "kv_consumer", server, model) as consumer,
    ):
        for length in LENGTHS:
            prompt, expected = make_prompt(length, length), restorable(model, length)
            waiting = Waiting(consumer, prompt, expect_tokens=length)
            waiting.stay()
            assert producer.generate(prompt, max_tokens=1).num_cached_tokens == 0
            restored = waiting.wait()
            assert restored.cached == expected, "nothing but the rest is computed"
            local = answer(consumer, prompt)
            assert local.cached == expected
            assert restored == local
        # A proxy passes on the parameters of the first answer. The decoder does not wait for blocks that are there
        # already.
        told = producer.generate(prompt, max_tokens=1).kv_transfer_params
        assert expected <= told["expect_tokens"] <= length
        producer.drain()  # what it saves beyond what was waited for
        before = stats_of(consumer).readable
        consumer.reset_local()
        assert read_answer(consumer.generate(prompt, logprobs=3, **told)) == restored
        assert stats_of(consumer).readable == before, "who only decodes saves nothing"
        assert probe.faults(consumer) == {}
        producer.reset_local()
        assert producer.generate(prompt, max_tokens=1).num_cached_tokens == expected, "a prefill engine has hits, too"


@contextmanager
def proxied(folder: Path, model: Path) -> Iterator[tuple[Service, Service, Service]]:
    """The example's proxy, the engine that computes prompts, and the one that decodes."""
    with ExitStack() as stack:
        server = stack.enter_context(serving(folder))
        services = []
        for role in ("kv_producer", "kv_consumer"):
            extra = {"server": str(server.socket), **probe.PATIENCE, "arrival_deadline": "30s"}
            connector = CONNECTOR | {"kv_role": role, "kv_connector_extra_config": extra}
            services.append(stack.enter_context(serving_http(model, folder / f"log-{role}", connector=connector)))
        port = free_port()
        script = Path(__file__).parents[2] / "examples/08_prefill_and_decode/proxy.py"
        command = [str(script), "--listen", f"127.0.0.1:{port}"]
        for name, service in zip(("--prefill", "--decode"), services, strict=True):
            command += [name, f"http://127.0.0.1:{service.port}"]
        process = stack.enter_context(child(command))
        assert process.stdout is not None
        assert process.stdout.readline().startswith("=")  # it listens
        yield Service(port, folder / "log"), services[0], services[1]


@pytest.mark.campaign
def test_behind_the_examples_proxy_every_prompt_is_computed_once(engines: EnginePool, tmp_path: Path) -> None:
    with proxied(tmp_path, engines.model_folder(DENSE)) as (proxy, producer, consumer):
        prompts = [make_prompt(seed, PROMPT_TOKENS) for seed in range(8)]
        first = [proxy.stream(prompt) for prompt in prompts]
        assert consumer.metric("vllm:external_prefix_cache_hits_total") == len(prompts) * RESTORABLE
        assert consumer.metric("kvoffload_arrivals_total") == len(prompts)
        again = [consumer.stream(prompt) for prompt in prompts]
        assert [one.text for one in again if one.is_clear] == [
            one.text for one, other in zip(first, again, strict=True) if other.is_clear
        ]
        assert producer.metric("kvoffload_saved_bytes_total") > 0
        assert consumer.metric("kvoffload_saved_bytes_total") == 0
        assert producer.metric("vllm:prompt_tokens_total") == len(prompts) * PROMPT_TOKENS
