"""A virtual engine with our connector and a real server, with vLLM's own, with the ideal one, or with none; opened and
closed."""

from __future__ import annotations

import gc
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.ground.engine import VirtualEngine
from benchmarks.ground.engine_config import EngineSettings, make_config
from benchmarks.ground.models import Model
from benchmarks.ground.server import ENVIRONMENT, SEGMENT_BYTES, await_answers, list_clients, run_server
from kvoffload.errors import BenchmarkError
from kvoffload.units import GIB

JOIN_S = 30.0
PATIENT = {"acquire_deadline": "10s"}
"""Virtual time stands still while this machine is busy with something else: that is no reason for a miss."""
ROOM = 512 * GIB
"""A pool that is large enough for all that is asked here."""


@contextmanager
def open_ours(
    model: Model,
    engine_settings: EngineSettings,
    *,
    pool_bytes: int = ROOM,
    segment_bytes: int = SEGMENT_BYTES,
    settings: Mapping[str, Any] | None = None,
) -> Iterator[VirtualEngine]:
    """Opens an engine with our connector and a server of its own. It saves eagerly by default."""
    os.environ.update(ENVIRONMENT)
    with (
        tempfile.TemporaryDirectory() as name,
        run_server(Path(name), memory=str(pool_bytes), segment_bytes=segment_bytes) as socket,
    ):
        given = {"save_policy": "eager", "self_test": False, "server": str(socket), **PATIENT, **(settings or {})}
        config = make_config(
            model, replace(engine_settings, connector="connector:GroundConnector", settings=given), Path(name)
        )
        engine = VirtualEngine(config)
        clients = list_clients(engine)
        for client in clients:
            if not client.wait_until_served(JOIN_S):
                raise BenchmarkError(f"the server does not serve: {client.fault}", remedy="see its log")
        engine.between_steps = partial(await_answers, clients)
        yield from _use(engine)


@contextmanager
def open_ideal(
    model: Model,
    engine_settings: EngineSettings,
    *,
    pool_bytes: int = ROOM,
    in_step: bool = False,
    is_lean: bool = False,
) -> Iterator[VirtualEngine]:
    """`in_step`: steps wait for what their requests load. `is_lean`: it saves only what hits need that end where a
    prompt or a request does."""
    with tempfile.TemporaryDirectory() as name:
        given = {"pool_bytes": pool_bytes, "in_step": in_step, "is_lean": is_lean}
        config = make_config(
            model, replace(engine_settings, connector="ideal:IdealConnector", settings=given), Path(name)
        )
        yield from _use(VirtualEngine(config))


@contextmanager
def open_offloading(
    model: Model,
    engine_settings: EngineSettings,
    *,
    pool_bytes: int = ROOM,
    settings: Mapping[str, Any] | None = None,
) -> Iterator[VirtualEngine]:
    """Opens an engine with vLLM's own OffloadingConnector and its CPU tier, by default with vLLM's settings of it."""
    with tempfile.TemporaryDirectory() as name:
        given = {
            "spec_name": "GroundSpec",
            "spec_module_path": "benchmarks.ground.offloading",
            "cpu_bytes_to_use": pool_bytes,
            **(settings or {}),
        }
        config = make_config(
            model, replace(engine_settings, connector="offloading:GroundOffloading", settings=given), Path(name)
        )
        yield from _use(VirtualEngine(config))


@contextmanager
def open_bare(model: Model, engine_settings: EngineSettings) -> Iterator[VirtualEngine]:
    """Without a connector."""
    with tempfile.TemporaryDirectory() as name:
        yield from _use(VirtualEngine(make_config(model, engine_settings, Path(name))))


def _use(engine: VirtualEngine) -> Iterator[VirtualEngine]:
    # As vLLM's core does: what lives from the start on is no garbage.
    gc.collect()
    gc.freeze()
    try:
        yield engine
    finally:
        engine.close()
        gc.unfreeze()
