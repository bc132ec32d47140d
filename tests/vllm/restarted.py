"""Engines that start again."""

from __future__ import annotations

from tests.vllm import connector_probe as probe
from tests.vllm.cache_server import SharedServer
from tests.vllm.engine import Engine, EnginePool, start_engine
from tests.vllm.tiny_models import TinyModel


def start(
    engines: EnginePool, server: SharedServer, model: TinyModel, *, promote_deadline: str = "2s", **arguments: object
) -> Engine:
    """A new engine, which has forgotten nothing: it begins with what the server has."""
    transfer = probe.transfer(server=str(server.socket), promote_deadline=promote_deadline)
    engine = start_engine(model, engines.model_folder(model), kv_transfer_config=transfer, **arguments)  # type: ignore[arg-type]
    probe.prepare(engine)
    return engine
